"""A writer that converts the replies of vLLM's serving classes to LMI's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from handlers.contract import JSON, Reply, ReplyWriter
from handlers.djl_errors import front_end_reply, payload_error

DONE = b"[DONE]"
_EVENT = b"data: "
_OVERLOADED = 503  # vLLM's status for a full queue.


class Shape(Protocol):
    """Converts one reply of vLLM."""

    stream_type: str  # The content type of a stream.

    def refusal(self, reply: Reply) -> Reply:
        """Return the reply for an error object of vLLM."""

    def whole(self, reply: Reply) -> Reply:
        """Return the reply for a complete (non-streamed) answer from vLLM."""

    def event(self, data: bytes) -> bytes:
        """Return the bytes for the data of an event of vLLM: a chunk, an error object, or `[DONE]`."""


class VllmError(msgspec.Struct):
    """The fields of an error object of vLLM."""

    message: str = ""
    code: int = 500


class _ErrorObject(msgspec.Struct):
    error: VllmError = msgspec.field(default_factory=VllmError)


_decode_error = msgspec.json.Decoder(_ErrorObject).decode


def events(data: bytes) -> list[bytes]:
    """Return the data of the events in a part of a stream. Comments are left out."""
    return [part.removeprefix(_EVENT) for part in data.split(b"\n\n") if part.startswith(_EVENT)]


def is_error(event: bytes) -> bool:
    """Return True if an event is an error object rather than a chunk."""
    return event.startswith(b'{"error"')


def error_of(body: bytes) -> VllmError:
    """Return the error in an error object, or an empty error if the body is not an error object."""
    try:
        return _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return VllmError()


def lmi_error(reply: Reply, status: int, overload_status: int) -> Reply:
    """Return the reply for an error object of vLLM.

    If the queue is full, the reply is an error of DJL Serving's front end. Otherwise it is a payload error.
    """
    message = error_of(reply.body).message
    if status == _OVERLOADED:
        return front_end_reply(overload_status, "WlmCapacityException", message)
    return Reply(status, JSON, payload_error(message, status))


class ShapedReply:
    """Implements `ReplyWriter`: passes vLLM's replies to another writer, in the form that `shape` gives them."""

    def __init__(self, writer: ReplyWriter, shape: Shape) -> None:
        self._writer, self._shape = writer, shape
        self._headers: tuple[tuple[str, str], ...] = ()
        self._status = 0
        self._started = self._ended = False

    def reply(self, reply: Reply) -> None:
        # A stream that comes in one piece has one token, or an early error.
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):
            self.start(reply.status, reply.content_type, reply.headers)
            self.end(reply.body)
        elif reply.status >= 400:
            self._ended = True
            self._writer.reply(self._shape.refusal(reply))
        else:
            self._whole(reply)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Wait for the first event. If it is an error, the reply is not streamed."""
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        for event in events(data):
            self._event(event)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self.write(data)
        if self._ended:
            return
        if not self._started:
            self._begin()
        self._ended = True
        self._writer.end(b"")

    async def drain(self) -> None:
        await self._writer.drain()

    def _event(self, event: bytes) -> None:
        if self._ended:
            return
        if not self._started and is_error(event):
            self._ended = True
            self._writer.reply(self._shape.refusal(Reply(error_of(event).code, JSON, event)))
            return
        if data := self._shape.event(event):
            if not self._started:
                self._begin()
            self._writer.write(data)

    def _whole(self, reply: Reply) -> None:
        self._writer.reply(self._shape.whole(reply))

    def _begin(self) -> None:
        self._started = True
        self._writer.start(self._status, self._shape.stream_type, self._headers)
