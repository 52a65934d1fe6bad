"""A reply writer that keeps the reply."""

from __future__ import annotations

from collections.abc import Callable

from handlers.contract import Reply


class CollectedReply:
    """Implements `ReplyWriter`. A second reply, or data after the end, fails the test."""

    def __init__(self) -> None:
        self.whole: Reply | None = None  # A reply that was not streamed.
        self.status = 0  # This and the next fields describe a streamed reply.
        self.content_type = ""
        self.headers: tuple[tuple[str, str], ...] = ()
        self.parts: list[bytes] = []
        self.ended = False
        self.drained = 0

    @property
    def finished(self) -> bool:
        return self.whole is not None or self.ended

    @property
    def body(self) -> bytes:
        """The bytes that were written so far, whether the reply is streamed or not."""
        return self.whole.body if self.whole is not None else b"".join(self.parts)

    def reply(self, reply: Reply) -> None:
        assert self.whole is None
        assert not self.status
        self.whole = reply

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        assert not self.finished
        assert not self.status
        self.status, self.content_type, self.headers = status, content_type, headers

    def write(self, data: bytes) -> None:
        self.parts.append(data)  # Data that comes too late is kept, too, so that a test sees it.
        assert self.status
        assert not self.ended

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self.write(data)
        self.ended = True

    async def drain(self) -> None:
        self.drained += 1
