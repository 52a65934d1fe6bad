"""What every load run reports, whether it came over HTTP or straight from the engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

clock = time.perf_counter


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One load run. Times are those that the client saw; `tokens` counts complete answers only."""

    requests: int
    """Complete and correct answers."""
    errors: int
    error_kinds: dict[str, int]
    """What went wrong, and how often."""
    tokens: int
    records: int
    """Streamed records; fewer than `tokens` where a server merged several tokens into one record."""
    wall_s: float
    first_p50_ms: float
    """From writing the request to the first byte of the body, or to the engine's first output."""
    first_p90_ms: float
    total_p50_ms: float
    total_p90_ms: float
    client_cpu_s: float
    """What the process that made the load used in the same time."""
    client_real_time: bool = False
    """Whether that process ran before all others. See `benchmarks.load.take_precedence`."""


class Tally:
    """Collects the answers of one load run."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.records = 0
        self._errors: Counter[str] = Counter()
        self._first: list[float] = []
        self._total: list[float] = []
        self._cpu_started = time.process_time()
        self._started = clock()

    def answered(self, *, tokens: int, records: int, first_s: float, total_s: float) -> None:
        self.requests += 1
        self.tokens += tokens
        self.records += records
        self._first.append(first_s)
        self._total.append(total_s)

    def failed(self, kind: str) -> None:
        self._errors[kind] += 1

    def figures(self) -> Figures:
        return Figures(
            requests=self.requests,
            errors=self._errors.total(),
            error_kinds=dict(self._errors),
            tokens=self.tokens,
            records=self.records,
            wall_s=clock() - self._started,
            first_p50_ms=1000 * percentile(self._first, 0.5),
            first_p90_ms=1000 * percentile(self._first, 0.9),
            total_p50_ms=1000 * percentile(self._total, 0.5),
            total_p90_ms=1000 * percentile(self._total, 0.9),
            client_cpu_s=time.process_time() - self._cpu_started,
        )


class Waves:
    """Lets every client make the same number of requests, however many fit into the time.

    The first client that is ready for its next request opens a wave, if there is time left, and all others join it.
    So no client goes on alone at the end, and the number of concurrent requests is what the run says it is.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = clock() + seconds
        self._opened = 1

    def admits(self, made: int) -> bool:
        """Whether a client that has made so many requests may make another."""
        if made < self._opened:
            return True
        if clock() >= self._deadline:
            return False
        self._opened = made + 1
        return True


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; not a number when there are no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
