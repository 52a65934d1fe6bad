"""Detects a stalled engine: requests run, but the engine makes no progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engines.interface import EngineHealth

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
NEW_ENGINE_STALL_SECONDS = 300.0
NEW_ENGINE_SECONDS = 600.0  # An engine counts as new during this many seconds of work.


class StallWatch:
    """Detects when an engine is stalled, and logs the beginning and the end of each stall.

    A stall begins after `limit` seconds in which requests ran and no token was generated. It ends with the engine's
    next sign of life. An engine whose requests have all timed out is still stalled.
    """

    def __init__(
        self, health: Callable[[], EngineHealth], limit: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the watch.

        Args:
            health: Returns the engine's health.
            limit: The limit in seconds. 0 disables the watch. None means `STALL_SECONDS`, or more for a new engine.
            clock: Returns the time in seconds.
        """
        self._health, self._limit, self._clock = health, limit, clock
        self._mark: float | None = None  # The engine's progress mark when the stall began. None without a stall.
        self._since = 0.0

    @property
    def reason(self) -> str:
        """The reason why the engine counts as stalled. Empty if it is not stalled."""
        if self._limit == 0:
            return ""
        health = self._health()
        limit = _stall_seconds(health) if self._limit is None else self._limit
        if self._mark is not None and health.mark != self._mark:
            logger.warning("the engine goes on after %.0f s; /ping answers 200 again", self._clock() - self._since)
            self._mark = None
        if self._mark is None and health.quiet_seconds > limit:
            self._mark, self._since = health.mark, self._clock() - health.quiet_seconds
            logger.error("%s; /ping now answers 500", self._text())
        return "" if self._mark is None else self._text()

    def _text(self) -> str:
        seconds = self._clock() - self._since
        return f"the engine is stalled: requests run, and nothing has come of them for {seconds:.0f} s"


def _stall_seconds(health: EngineHealth) -> float:
    """Return the default limit. A GPU's kernels are compiled during the first requests that need them."""
    return NEW_ENGINE_STALL_SECONDS if health.worked_seconds < NEW_ENGINE_SECONDS else STALL_SECONDS
