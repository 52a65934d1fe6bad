"""Tells what happens, with the time since the start, and the clock that waiting goes by."""

from __future__ import annotations

import time
from typing import Protocol, TextIO


class Clock(Protocol):
    """Time that tests can turn."""

    def now(self) -> float:
        """Seconds, from any start."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class RealClock:
    """The machine's own."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait; a signal may end it with KeyboardInterrupt."""
        time.sleep(seconds)


class Progress:
    """One line for each thing that happens."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock.now()

    def say(self, text: str) -> None:
        """Write a line, with the seconds since the start."""
        print(f"[{self._clock.now() - self._start:6.0f} s] {text}", file=self._stream, flush=True)
