"""What a handler is: it answers calls by pushing bytes, without waiting for the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from handlers.contracts.protocol import Call, Reply


class ReplyWriter(Protocol):
    """Where one reply goes. No method blocks; a slow client makes the writer merge what it is given.

    A client that has the writer hold too much loses its connection, and the call is cancelled.
    """

    def reply(self, reply: Reply) -> None:
        """Send a whole reply."""

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin a reply whose length is not known; an empty content type is left out."""

    def write(self, data: bytes) -> None:
        """Add a part to the body."""

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """Add what `part` gives, at once or when the client has taken what came before.

        For replies each part of which repeats all before it: of parts that wait, only the latest is asked for, and none
        once the reply ends. Not to be mixed with `write`.
        """

    def end(self, data: bytes) -> None:
        """Finish it with these last bytes, which may be empty."""

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written; at once where it keeps up or has gone."""


class Handler(Protocol):
    """Answers the calls of one route."""

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        """Answer a call through `writer`; returns what cancels it, None if the reply is complete.

        Raises:
            ContractError: the call was refused before inference; the error holds the reply.
        """


class Running(Protocol):
    """Handle of a call whose reply is still coming."""

    def cancel(self) -> None:
        """Stop: the client has gone. Harmless when the reply is complete."""
