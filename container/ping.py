"""`/ping`: the health of the models, judged by their latest signs of life."""

from __future__ import annotations

from json.encoder import encode_basestring

from container.models.life_cycle import State
from container.models.registry import Model, Models
from container.observability.error_rates import ErrorRates
from container.settings.server import ServerConfig
from handlers.contract import JSON, Reply

_TEXT = {
    State.STARTING: "PENDING",
    State.READY: "Healthy",
    State.FAILED: "FAILED",
    State.RESTARTING: "RESTARTING",
    State.DRAINING: "DRAINING",
    State.STOPPED: "STOPPED",
}


def ping(models: Models, server_config: ServerConfig, error_rates: ErrorRates) -> Reply:
    """Return the reply to `/ping`: LMI's body, with a `reason` if something is wrong.

    Unlike in LMI, 200 means that all models can serve. While a startup model loads, the status is 503, or 207 if
    `allow_multi_status` is set. Some probes accept 207 as healthy. With `workers_health_check`, the status is 500 while
    too few workers or copies serve, as in LMI. A stalled engine is `Unhealthy`, because it may recover. `FAILED` is
    final.

    While a dead engine is restarted and calls wait for it (`RESTARTING`), the status is 200. If it were 500, SageMaker
    might replace the instance, and the calls would be lost. The status is also 200 while a dead copy is restarted and
    other copies serve. If the copy is abandoned and too few copies remain, the model is `Unhealthy` and the status is
    500, even though calls are answered. The reason is that scaling policies expect the capacity of the whole machine,
    and that SageMaker replaces the machine only if the status is not 200. While the management API loads a
    model, this model is PENDING, and does not change the status.
    """
    exceeded = error_rates.exceeded
    entries = [_entry(model, exceeded) for model in models]
    body = "{\n" + ",\n".join(entries) + "\n}\n" if entries else "{}\n"
    return Reply(503 if exceeded else _status(models, server_config), JSON, body.encode())


def _status(models: Models, server_config: ServerConfig) -> int:
    """Return the first status that applies, in LMI's order."""
    states = [(model, model.lifecycle.state) for model in models]
    if any(state is State.FAILED or model.lifecycle.unhealthy for model, state in states):
        return 500
    if server_config.workers_health_check and any(s is State.READY and m.lifecycle.short_of_workers for m, s in states):
        return 500
    if any(model.at_startup and state is State.STARTING for model, state in states):
        return 207 if server_config.allow_multi_status else 503
    ending = any(state in (State.DRAINING, State.STOPPED) for _, state in states)
    return 503 if models.draining or ending else 200


def _entry(model: Model, exceeded: str) -> str:
    lifecycle = model.lifecycle
    state = lifecycle.state
    text, reason = _TEXT[state], lifecycle.reason if state in (State.FAILED, State.RESTARTING) else lifecycle.missing
    if state is State.READY and lifecycle.short_of_workers:
        text = "Unhealthy"
    if unhealthy := lifecycle.unhealthy:
        text, reason = "Unhealthy", unhealthy
    if reason and model.fault.black_box:
        reason += f"; black box: {model.fault.black_box}"
    reason = reason or exceeded
    why = f',\n    "reason": {encode_basestring(reason)}' if reason else ""
    return f'  "{model.title}": {{\n    "status": "{text}"{why}\n  }}'
