"""`/ping`: the truth about the model, at once. Source: contracts/lmi.md section 1.9."""

from __future__ import annotations

from json.encoder import encode_basestring

from container.error_rates import ErrorRates
from container.lifecycle import Lifecycle, State
from container.settings import ServerSettings
from handlers.contracts.lmi.errors import JSON
from handlers.contracts.protocol import Reply

_STATUS = {
    State.STARTING: (503, "PENDING"),
    State.READY: (200, "Healthy"),
    State.FAILED: (500, "FAILED"),
    State.DRAINING: (503, "DRAINING"),
    State.STOPPED: (503, "STOPPED"),
}


def ping(lifecycle: Lifecycle, settings: ServerSettings, error_rates: ErrorRates) -> Reply:
    """LMI's body and status texts, and a `reason` where something is wrong. Unlike LMI, 200 means that it can serve.

    `allow_multi_status`: a model that is loading is 207, which some probes take for alive, instead of 503.
    `workers_health_check`: a custom handler with fewer workers than it should have is 500, as in LMI.
    An engine that is stalled is `Unhealthy`, since it may go on; `FAILED` is for good.
    """
    state, reason = lifecycle.state, ""
    status, text = _STATUS[state]
    if state is State.STARTING and settings.allow_multi_status:
        status = 207
    if state is State.FAILED:
        reason = lifecycle.reason
    if state is State.READY and lifecycle.short_of_workers:
        status, text = (500 if settings.workers_health_check else 200), "Unhealthy"
    if stalled := lifecycle.stalled:
        status, text, reason = 500, "Unhealthy", stalled
    if error_rates.exceeded:
        status, reason = 503, reason or error_rates.exceeded
    return _reply(status, lifecycle.model.name, text, reason)


def _reply(status: int, name: str, text: str, reason: str) -> Reply:
    why = f',\n    "reason": {encode_basestring(reason)}' if reason else ""
    return Reply(status, JSON, f'{{\n  "{name}": {{\n    "status": "{text}"{why}\n  }}\n}}\n'.encode())
