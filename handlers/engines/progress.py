"""Whether an engine that has work gets on with it: what all engines share.

An engine's own watchdog looks a few times a second; nothing is asked of the engine, and nothing is counted for a token
beyond one number. What is too long is for others to say (`container.stall`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_LOOK = 2.0
"""Seconds between two looks that count at most: time in which this process itself stood still is not the engine's."""


class Progress:
    """The signs of life of one engine. For the event loop."""

    __slots__ = ("_clock", "_looked_at", "mark", "quiet_seconds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked_at = clock, clock()
        self.mark = 0.0
        """What the last look saw; another value means that the engine has moved meanwhile."""
        self.quiet_seconds = 0.0
        """For how long there has been work without any sign of life since the last one.

        Time without work does not count, and does not make up for any either: work that was given up, by its clients or
        for its time limit, is no sign of life.
        """

    def look(self, busy: bool, mark: float) -> None:
        """Take note of the engine.

        `busy`: it has work. `mark`: any number that changes whenever it gives a sign of life.
        """
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK), now
        if mark != self.mark:
            self.quiet_seconds = 0.0
        elif busy:
            self.quiet_seconds += passed
        self.mark = mark
