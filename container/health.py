"""`/ping` and TGI-style `/health`: the truth about the model, at once. Source: contracts/lmi.md section 1.9."""

from __future__ import annotations

from container.lifecycle import Lifecycle, State
from handlers.contracts.lmi_errors import JSON
from handlers.contracts.protocol import Reply

_STATUS = {
    State.STARTING: (503, "PENDING"),
    State.READY: (200, "Healthy"),
    State.FAILED: (500, "FAILED"),
    State.DRAINING: (503, "DRAINING"),
    State.STOPPED: (503, "STOPPED"),
}


def ping(lifecycle: Lifecycle, allow_multi_status: bool) -> Reply:
    """LMI's body and status texts. Unlike LMI, 200 means that the model generates.

    `allow_multi_status`: a model that is loading is 207, which some probes take for alive, instead of 503.
    """
    status, text = _STATUS[lifecycle.state]
    if lifecycle.state is State.STARTING and allow_multi_status:
        status = 207
    name = lifecycle.model.name
    return Reply(status, JSON, f'{{\n  "{name}": {{\n    "status": "{text}"\n  }}\n}}\n'.encode())
