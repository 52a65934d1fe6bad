"""What a worker prints, line by line into the log."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import cast

logger = logging.getLogger("handlers.workers")

_MAX_LINE = 32 * 1024
"""Bytes after which a line without an end is logged as it is."""


class LogRelay(asyncio.Protocol):
    """Logs the lines of one pipe. It always reads on, so that printing never blocks the worker for good."""

    def __init__(self, worker: str, tail: deque[str]) -> None:
        self._worker = worker
        self._tail = tail
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)
        while len(self._rest) > _MAX_LINE:
            self._log(self._rest[:_MAX_LINE])
            self._rest = self._rest[_MAX_LINE:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        if self._rest:
            self._log(self._rest)
            self._rest = b""
        self.closed.set()

    async def finish(self, patience: float) -> None:
        """Close the pipe, once all is read or after `patience` seconds."""
        try:
            await asyncio.wait_for(self.closed.wait(), patience)
        except TimeoutError:  # a process that has left the group still holds it
            cast(asyncio.BaseTransport, self._transport).close()
            await self.closed.wait()

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._tail.append(text)
        logger.info("%s: %s", self._worker, text, extra={"worker": self._worker})
