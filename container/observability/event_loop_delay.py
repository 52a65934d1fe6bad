"""Measures the delay of the event loop, and logs the loop's stack if the loop is blocked."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from engines.statistics import Distribution

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_LOOK_SECONDS = 0.25
LIMIT_SECONDS = 1.0  # A longer delay is logged.
_STUCK_SECONDS = 30.0  # After this delay `on_stuck` is called.
_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class EventLoopWatch:
    """Measures the delay of the event loop ten times a second. A separate thread logs the cause of a long delay."""

    def __init__(self, on_stuck: Callable[[float], None] = lambda _: None) -> None:
        """Create the watch.

        Args:
            on_stuck: Called once, in the watch's thread, if the event loop is blocked for half a minute. The argument
                is the delay in seconds.
        """
        self._on_stuck = on_stuck
        self._stuck = 0.0  # The due time of the late tick for which `on_stuck` was last called.
        self.lag = Distribution(_BUCKETS)
        self._due = 0.0
        self._reported = 0.0  # The due time of the late tick for which the loop's stack was last logged.
        self._thread = 0
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to watch the running event loop. Call this method on the event loop."""
        self._thread = threading.get_ident()
        self._due = time.monotonic() + _TICK_SECONDS
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        threading.Thread(target=self._watch, name="event-loop-watch", daemon=True).start()

    @property
    def late(self) -> float:
        """The number of seconds by which the event loop is late now. 0 if the loop is not watched."""
        return max(time.monotonic() - self._due, 0.0) if self._due and not self._ended.is_set() else 0.0

    def stop(self) -> None:
        self._ended.set()

    def _tick(self) -> None:
        if self._ended.is_set():
            return
        now = time.monotonic()
        late = max(now - self._due, 0.0)
        self.lag.observe(late)
        if late > LIMIT_SECONDS:
            # The watch's thread logs the stack of a late event loop. If it has logged none, it could not run either.
            why = "" if self._reported == self._due else "; no other thread ran either, or the machine stood still"
            logger.warning("the event loop goes on after %.1f s%s", late, why)
        self._due = now + _TICK_SECONDS
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            due = self._due
            late = time.monotonic() - due
            if late >= _STUCK_SECONDS and self._stuck != due:
                self._stuck = due
                self._on_stuck(late)
            if late <= LIMIT_SECONDS or self._reported == due:
                continue
            frames = traceback.walk_stack(sys._current_frames().get(self._thread))
            # Reads no source files yet, because a disk may be slow. The event loop may continue during the read.
            stack = traceback.StackSummary.extract(frames, lookup_lines=False)
            if due != self._due:  # The event loop has run in the meantime.
                continue
            self._reported = due
            stack.reverse()
            logger.warning("the event loop has stood still for %.1f s, in:\n%s", late, "".join(stack.format()))
