"""A writer that gives vLLM's replies LMI's form."""

from __future__ import annotations

from collections.abc import Callable

from handlers.contract import JSON, Reply, ReplyWriter
from handlers.lmi.reply_shapes import Shape, error_of, events, is_error


class ShapedReply:
    """Implements `ReplyWriter`: passes vLLM's replies to another writer, in the form that `shape` gives them."""

    def __init__(self, writer: ReplyWriter, shape: Shape) -> None:
        self._writer, self.shape = writer, shape
        self._headers: tuple[tuple[str, str], ...] = ()
        self._status = 0
        self._started = self._ended = False

    def reply(self, reply: Reply) -> None:
        # A stream in one piece has one token, or an early error.
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):
            self.start(reply.status, reply.content_type, reply.headers)
            self.end(reply.body)
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
            self._writer.reply(self.shape.reply(Reply(error_of(event).code, JSON, event)))
            return
        if data := self.shape.event(event):
            if not self._started:
                self._begin()
            self._writer.write(data)

    def _whole(self, reply: Reply) -> None:
        self._writer.reply(self.shape.reply(reply))

    def _begin(self) -> None:
        self._started = True
        self._writer.start(self._status, self.shape.stream_type, self._headers)
