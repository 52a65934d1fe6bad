"""A writer that keeps what it is given."""

from __future__ import annotations

from collections.abc import Callable

from handlers.contract import Reply


class CollectedReply:
    def __init__(self) -> None:
        self.whole: Reply | None = None
        self.status = 0
        self.content_type = ""
        self.headers: tuple[tuple[str, str], ...] = ()
        self.parts: list[bytes] = []
        self.ended = False
        self.drained = 0

    def reply(self, reply: Reply) -> None:
        assert self.whole is None
        assert not self.status
        self.whole = reply

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        assert not self.status
        self.status, self.content_type, self.headers = status, content_type, headers

    def write(self, data: bytes) -> None:
        assert self.status
        assert not self.ended
        self.parts.append(data)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self.write(data)
        self.ended = True

    async def drain(self) -> None:
        self.drained += 1
