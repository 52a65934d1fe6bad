"""Backpressure of one call: the worker may go on once the client has taken what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from handlers.reply import ReplyWriter
from handlers.workers.runtime.frames import WINDOW
from handlers.workers.worker import Worker

_ENOUGH = WINDOW // 2


class Flow:
    """Counts what a call's worker has sent, and gives it credit."""

    __slots__ = ("_call", "_draining", "_ended", "_on_stalled", "_patience", "_uncredited", "_worker", "_writer")

    def __init__(
        self, worker: Worker, call: int, writer: ReplyWriter, patience: float, on_stalled: Callable[[], None]
    ) -> None:
        """`on_stalled` is called when the client has taken nothing for `patience` seconds."""
        self._worker, self._call, self._writer = worker, call, writer
        self._patience, self._on_stalled = patience, on_stalled
        self._uncredited = 0
        self._ended = False
        self._draining: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether it is the client that holds up the call."""
        return self._draining is not None

    def received(self, size: int) -> None:
        """So many bytes have come; now and then the worker is given credit for them."""
        self._uncredited += size
        if self._uncredited >= _ENOUGH and self._draining is None and not self._ended:
            self._draining = asyncio.create_task(self._drain())

    def stop(self) -> None:
        """Nobody waits for the call any more, or it has ended."""
        self._ended = True
        if self._draining is not None and self._draining is not asyncio.current_task():
            self._draining.cancel()

    async def _drain(self) -> None:
        try:
            while self._uncredited >= _ENOUGH:
                size, self._uncredited = self._uncredited, 0
                async with asyncio.timeout(self._patience):
                    await self._writer.drain()
                self._worker.credit(self._call, size)
        except TimeoutError:
            self._ended = True
            self._on_stalled()
        finally:
            self._draining = None
