"""One system call for all that is written to a connection in one turn of the event loop.

A reply's head and body are two writes, and an engine that is ahead of us brings several tokens for one client at a
time. uvloop hands each write to the kernel at once, and a write to a client on the same machine wakes it as well; so
writes are collected and go out when the event loop has run what was ready.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Corked(Protocol):
    """What collects what is written to it."""

    def flush(self) -> None:
        """Hand over what was written."""


class Cork:
    """All that has something to hand over at the end of this turn."""

    def __init__(self) -> None:
        self._waiting: list[Corked] = []

    def add(self, corked: Corked) -> None:
        """Have it flushed at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.append(corked)

    def _flush_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for corked in waiting:
            try:
                corked.flush()
            except Exception:  # of one connection; the others have theirs to send
                logger.exception("a connection could not be written to")


class CorkedTransport:
    """A transport whose writes wait for the end of the turn; everything else passes through."""

    def __init__(self, transport: asyncio.Transport, cork: Cork) -> None:
        self._transport = transport
        self._cork = cork
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Keep the data until the end of this turn."""
        if not self._pieces:
            self._cork.add(self)
        self._pieces.append(data)

    def flush(self) -> None:
        """Hand over what was written."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces = []
        if not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
