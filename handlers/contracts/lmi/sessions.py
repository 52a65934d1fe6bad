"""LMI's stateful sessions on the wire.

Source: djl_python, `session_manager.py`; Amazon SageMaker, "Stateful sessions with Amazon SageMaker AI models".
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Literal

import msgspec

from handlers.contracts.lmi.errors import JSON, failed_dependency, payload_refused
from handlers.contracts.protocol import Call, Reply

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "NEW_SESSION"
"""What SageMaker's client sends as an id when it has no session yet."""
CLOSE = "CLOSE"

Action = Literal["NEW_SESSION", "CLOSE"]

_ID = re.compile(r"[A-Za-z0-9-]{1,256}")
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_SHOWN = 64


def session_of(call: Call) -> str:
    """The session that the call's header names; empty if it names none or asks for a new one.

    Raises:
        ContractError: 424; the header is not an id.
    """
    given = ""
    for name, value in call.headers:
        if name == SESSION_ID:
            given = value.strip()
    if given in ("", NEW_SESSION):
        return ""
    if not _ID.fullmatch(given):
        raise failed_dependency(f"{SESSION_ID} is {_shown(given)}; expected 1 to 256 letters, digits and hyphens")
    return given


def action_of(body: bytes) -> Action:
    """The action that a body with a `requestType` asks for.

    Raises:
        ContractError: 424; it is another, or the body has further fields.
    """
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise payload_refused("a field of the body cannot be read") from None
    further = sorted(fields.keys() - {"requestType"})
    if further:
        raise payload_refused(f"`requestType` goes without other fields, got {_shown(further[0])} beside it")
    asked = bytes(fields["requestType"])
    if asked == b'"NEW_SESSION"':
        return "NEW_SESSION"
    if asked == b'"CLOSE"':
        return "CLOSE"
    raise payload_refused(
        f"`requestType` must be {NEW_SESSION} or {CLOSE}, got {_shown(asked.decode('utf-8', 'replace'))}"
    )


def created(session_id: str, expires: float) -> Reply:
    """The reply to NEW_SESSION. `expires`: in seconds since the epoch.

    SageMaker reads the first of the headers; clients that ask LMI directly read the second.
    """
    value = f"{session_id}; Expires={datetime.fromtimestamp(expires, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return _done(session_id, "created", ((NEW_SESSION_ID, value), (SESSION_ID, value)))


def closed(session_id: str) -> Reply:
    """The reply to CLOSE."""
    return _done(session_id, "closed", ((CLOSED_SESSION_ID, session_id),))


def _done(session_id: str, what: str, headers: tuple[tuple[str, str], ...]) -> Reply:
    return Reply(200, JSON, f'{{"result": "Session {session_id} {what}"}}\n'.encode(), headers)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
