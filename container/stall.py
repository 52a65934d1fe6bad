"""An engine that lives, has requests and makes nothing of them. Source: contracts/sagemaker_hosting.md section 2."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from handlers.engines.protocol import EngineHealth

logger = logging.getLogger(__name__)


class StallWatch:
    """Says when an engine is stalled, and logs when that begins and ends.

    It begins after `limit` seconds in which requests ran and nothing came, and ends with the engine's next sign of
    life: that the requests have been given up meanwhile does not make it well.
    """

    def __init__(
        self, health: Callable[[], EngineHealth], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: in seconds; 0: never."""
        self._health, self._limit, self._clock = health, limit, clock
        self._mark: float | None = None
        """The engine's mark when it was found to be stalled; None while it is not."""
        self._since = 0.0

    @property
    def reason(self) -> str:
        """What is wrong with the engine; empty if it is not stalled. Costs microseconds and asks no other process."""
        if not self._limit:
            return ""
        health = self._health()
        if self._mark is not None and health.mark != self._mark:
            logger.warning("the engine goes on after %.0f s; /ping answers 200 again", self._clock() - self._since)
            self._mark = None
        if self._mark is None and health.quiet_seconds > self._limit:
            self._mark, self._since = health.mark, self._clock() - health.quiet_seconds
            logger.error("%s; /ping now answers 500", self._text())
        return "" if self._mark is None else self._text()

    def _text(self) -> str:
        seconds = self._clock() - self._since
        return f"the engine is stalled: requests run, and nothing has come of them for {seconds:.0f} s"
