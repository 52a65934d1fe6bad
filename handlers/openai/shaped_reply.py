"""A reply in another shape than it is made in."""

from __future__ import annotations

from collections.abc import Callable

from handlers.contracts.lmi.openai_shape import Shape, error_of, events, is_error
from handlers.contracts.protocol import Reply
from handlers.reply import ReplyWriter


class ShapedReply:
    """Implements `ReplyWriter`: takes vLLM's replies, and gives another writer what a shape makes of them."""

    def __init__(self, writer: ReplyWriter, shape: Shape) -> None:
        self._writer, self.shape = writer, shape
        self._headers: tuple[tuple[str, str], ...] = ()
        self._status = 0
        self._started = self._ended = False

    def reply(self, reply: Reply) -> None:
        """See `ReplyWriter.reply`."""
        self._writer.reply(self.shape.reply(reply))

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """See `ReplyWriter.start`. Waits for the first event: if that is an error, the reply is no stream."""
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        """See `ReplyWriter.write`."""
        for event in events(data):
            self._event(event)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """See `ReplyWriter.write_latest`. An event may hold what an earlier one does not."""
        self.write(part())

    def end(self, data: bytes) -> None:
        """See `ReplyWriter.end`."""
        self.write(data)
        if self._ended:
            return
        if not self._started:
            self._begin()
        self._ended = True
        self._writer.end(b"")

    async def drain(self) -> None:
        """See `ReplyWriter.drain`."""
        await self._writer.drain()

    def _event(self, event: bytes) -> None:
        if self._ended:
            return
        if not self._started and is_error(event):
            self._ended = True
            self._writer.reply(self.shape.reply(Reply(error_of(event).code, "application/json", event)))
            return
        if data := self.shape.event(event):
            if not self._started:
                self._begin()
            self._writer.write(data)

    def _begin(self) -> None:
        self._started = True
        self._writer.start(self._status, self.shape.stream_type, self._headers)
