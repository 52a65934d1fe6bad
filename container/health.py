"""`/ping`: the truth about the model, at once. Source: contracts/lmi.md section 1.9."""

from __future__ import annotations

from json.encoder import encode_basestring

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


def ping(lifecycle: Lifecycle, settings: ServerSettings) -> Reply:
    """LMI's body and status texts, and a `reason` where the model has failed. Unlike LMI, 200 means that it can serve.

    `allow_multi_status`: a model that is loading is 207, which some probes take for alive, instead of 503.
    `workers_health_check`: a custom handler with fewer workers than it should have is 500, as in LMI.
    """
    state = lifecycle.state
    status, text = _STATUS[state]
    if state is State.STARTING and settings.allow_multi_status:
        status = 207
    if state is State.READY and lifecycle.short_of_workers:
        status, text = (500 if settings.workers_health_check else 200), "Unhealthy"
    reason = f',\n    "reason": {encode_basestring(lifecycle.reason)}' if state is State.FAILED else ""
    name = lifecycle.model.name
    return Reply(status, JSON, f'{{\n  "{name}": {{\n    "status": "{text}"{reason}\n  }}\n}}\n'.encode())
