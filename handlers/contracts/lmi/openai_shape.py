"""What becomes of vLLM's OpenAI answers on LMI's routes: whole replies and the parts of streams, bytes to bytes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from handlers.contracts.lmi.errors import JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Reply

DONE = b"[DONE]"
_EVENT = b"data: "
_OVERLOADED = 503
"""vLLM's status for a full queue."""


class Shape(Protocol):
    """One answer's shape; used once."""

    stream_type: str
    """Content type of a stream."""

    def reply(self, reply: Reply) -> Reply:
        """A whole reply of vLLM's."""

    def event(self, data: bytes) -> bytes:
        """A server-sent event of vLLM's, without its frame: a chunk, an error object, or `[DONE]`."""


class VllmError(msgspec.Struct):
    """The inside of vLLM's error object."""

    message: str = ""
    code: int = 500


class _ErrorObject(msgspec.Struct):
    error: VllmError = msgspec.field(default_factory=VllmError)


_decode_error = msgspec.json.Decoder(_ErrorObject).decode


def events(data: bytes) -> list[bytes]:
    """The events in a piece of a stream, without frames; comments, which keep a connection alive, are left out."""
    return [part.removeprefix(_EVENT) for part in data.split(b"\n\n") if part.startswith(_EVENT)]


def error_of(body: bytes) -> VllmError:
    """What an error object says; what is no such object says nothing."""
    try:
        return _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return VllmError()


def is_error(event: bytes) -> bool:
    """Whether an event is an error object rather than a chunk."""
    return event.startswith(b'{"error"')


def lmi_error(error: VllmError, status: int, overload_status: int) -> Reply:
    """vLLM's error as LMI's: E1 for a full queue, else E2. Source: contracts/lmi.md section 1.6."""
    if status == _OVERLOADED:
        return front_end_reply(overload_status, "WlmCapacityException", error.message)
    return Reply(status, JSON, payload_error(error.message, status))
