"""How a handler sends bytes back: pushed, without waiting."""

from __future__ import annotations

from typing import Protocol

from handlers.contracts.protocol import Reply


class ReplyWriter(Protocol):
    """Where one reply goes. No method blocks; a slow client makes the writer merge what it is given."""

    def reply(self, reply: Reply) -> None:
        """Send a whole reply."""

    def start(self, status: int, content_type: str) -> None:
        """Begin a reply whose length is not known."""

    def write(self, data: bytes) -> None:
        """Go on with it."""

    def end(self, data: bytes) -> None:
        """Finish it with these last bytes, which may be empty."""


class Running(Protocol):
    """A call whose reply is still coming."""

    def cancel(self) -> None:
        """The client has gone. Harmless when the reply is complete."""
