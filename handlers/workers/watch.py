"""A limit on the time without any sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watch:
    """Calls `expired` once `seconds` have passed since the last `touch`, not counting pauses.

    A touch costs an assignment, so that every part of a stream may be one.
    """

    def __init__(self, seconds: float, expired: Callable[[], None], paused: Callable[[], bool] = lambda: False) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._expired, self._paused = seconds, expired, paused
        self._touched = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def touch(self) -> None:
        """There was a sign of life."""
        self._touched = self._loop.time()

    def stop(self) -> None:
        """Nothing more is expected."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._paused():
            self.touch()
        left = self._touched + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._expired()
