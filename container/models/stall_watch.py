"""Logs the stalls of an engine: requests run, but the engine makes no progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engines.interface import EngineHealth

logger = logging.getLogger(__name__)


class StallWatch:
    """Logs the beginning and the end of each stall of an engine, and how long the stall lasted.

    A stall lasts until the engine makes progress, even if all of its requests have timed out.
    """

    def __init__(self, health: Callable[[], EngineHealth], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the watch.

        Args:
            health: Returns the engine's health.
            clock: Returns the time in seconds.
        """
        self._health, self._clock = health, clock
        self._since: float | None = None  # The time of the last sign of life before the stall. None without a stall.

    @property
    def reason(self) -> str:
        """The reason why the engine counts as stalled. Empty if it is not stalled."""
        health, now = self._health(), self._clock()
        if not health.stalled:
            if self._since is not None:
                logger.warning("the engine goes on after %.0f s; /ping answers 200 again", now - self._since)
            self._since = None
            return ""
        since = now - health.quiet_seconds if self._since is None else self._since
        text = f"{health.stalled} is stalled: requests run, and nothing has come of them for {now - since:.0f} s"
        if self._since is None:
            self._since = since
            logger.error("%s; /ping now answers 500", text)
        return text
