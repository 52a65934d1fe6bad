"""A timeout that can be restarted and paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def _nothing() -> None:
    return


def _never() -> bool:
    return False


class IdleTimeout:
    """Calls `expired` when `seconds` have passed since the last restart.

    If `paused` returns True at that time, the timeout restarts instead.

    `restart` is only an assignment, so it is cheap enough for every part of a stream.
    """

    def __init__(self, seconds: float, expired: Callable[[], None], paused: Callable[[], bool] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._expired, self._paused = seconds, expired, paused or _never
        self._started = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def restart(self) -> None:
        self._started = self._loop.time()

    def stop(self) -> None:
        """Stop for good. Drop the callbacks, because they usually refer to the owner of this timeout."""
        self._timer.cancel()
        self._expired, self._paused = _nothing, _never

    def _check(self) -> None:
        if self._paused():
            self.restart()
        left = self._started + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            expired = self._expired
            self.stop()
            expired()
