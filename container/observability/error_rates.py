"""Limits on the number of error replies (SERVING_ERROR_RATE_*). Once a limit is exceeded, /ping fails permanently."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

Kind = Literal["wlm", "server", "model", "any"]
CLIENT_GONE = 499  # The status of a call whose client left before the reply was complete. It is not an error.
# The statuses of calls without a valid key (401), and of calls that a browser sends for another site (403). Their
# senders must not be able to make /ping fail.
UNAUTHORIZED, FORBIDDEN = 401, 403
_MINUTE = 60.0
_MOST = 1_000_000
_RATE = re.compile(r"([0-9]{1,7})(?:/(.{1,64}))?")


@dataclass(frozen=True, slots=True)
class ErrorRate:
    """The maximum number of errors within a period of `seconds`."""

    limit: int
    seconds: float


def error_rate(text: str) -> ErrorRate:
    """Parse `N`, which means N errors per minute, or `N/<ISO-8601 duration>`, such as `1/PT5M`.

    Raises:
        ValueError: The string has another form.
    """
    parts = _RATE.fullmatch(text)
    if parts is None or int(parts[1]) > _MOST:
        raise ValueError(text)
    # msgspec accepts days, hours, minutes and seconds. It refuses months and years, which have no fixed length.
    seconds = msgspec.convert(parts[2], timedelta).total_seconds() if parts[2] else _MINUTE
    if seconds <= 0:
        raise ValueError(text)
    return ErrorRate(int(parts[1]), seconds)


class ErrorRates:
    """Counts errors by kind, and remembers the first limit that was exceeded.

    The kinds are:
    - `wlm`: Refusals because the queue is full or no worker is ready.
    - `server`: Statuses 424 and 5xx.
    - `model`: Statuses 424 and 5xx, except the refusals of `wlm`.
    - `any`: Statuses 4xx and 5xx, except 401, 403 and 499.
    """

    def __init__(
        self, limits: Mapping[Kind, str | None], refusals: frozenset[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Set the limits.

        Args:
            limits: The limits as strings, see `error_rate`.
            refusals: The statuses that count as `wlm`.
            clock: Returns the time in seconds.
        """
        self._limits = {kind: error_rate(text) for kind, text in limits.items() if text is not None}
        self._refusals, self._clock = refusals, clock
        self._times: dict[Kind, deque[float]] = {
            kind: deque(maxlen=rate.limit + 1) for kind, rate in self._limits.items()
        }
        self.exceeded = ""  # The limit that was exceeded, as text. Empty if no limit was exceeded.
        self.limited = bool(self._limits)

    def count(self, status: int) -> None:
        if status < 400 or status in (CLIENT_GONE, UNAUTHORIZED, FORBIDDEN) or self.exceeded:
            return
        refusal = status in self._refusals
        server = status == 424 or status >= 500
        kinds: dict[Kind, bool] = {"wlm": refusal, "server": server, "model": server and not refusal, "any": True}
        now = self._clock()
        for kind, rate in self._limits.items():
            if not kinds[kind]:
                continue
            times = self._times[kind]
            times.append(now)
            if len(times) > rate.limit and now - times[0] <= rate.seconds:
                self.exceeded = f"more than {rate.limit} errors in {rate.seconds:g} s (error_rate_{kind})"
                logger.critical("%s; /ping answers 503 from now on", self.exceeded)
