"""Counts and timings of generation, updated in the hot path.

Plain numbers and lists, no locks, no label look-ups: everything happens on one event loop.
`container.observability.metrics` makes Prometheus metrics of them when it is scraped.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.registry import Collector


class StartupTimes:
    """Seconds by phase, in the order in which the phases ended; the log and `/metrics` show them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of the block; a phase that fails is not kept."""
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


TIME_TO_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# TGI's: up to two minutes and a half.
DURATION_BUCKETS = tuple(float(f"{0.0001 * 1.5**power:.4g}") for power in range(1, 36))
# Tokens. TGI's are hundredths of the longest.
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


# The results of a check of an answer whose schema is held in part. "incomplete": a limit of tokens or a stop string has
# cut the answer. "unchecked": the check takes too long, cannot read the schema, or had too many before it.
VERDICTS = ("valid", "invalid", "incomplete", "unchecked")


# The contents of a call at its deadline: a part of its answer, or nothing.
AT_DEADLINE = ("partial", "nothing")


MOST_WAITING = 4096
"""Values of a `Distribution` that wait until they are counted."""


class Distribution:
    """A histogram: values, counted by upper bound when they are read."""

    __slots__ = ("_counts", "_total", "bounds", "waiting")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.waiting: list[float] = []
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self.waiting.append(value)
        if len(self.waiting) >= MOST_WAITING:
            self.count()

    def observe_all(self, values: Sequence[float]) -> None:
        self.waiting.extend(values)
        if len(self.waiting) >= MOST_WAITING:
            self.count()

    def count(self) -> None:
        """Count the values that wait."""
        for value in self.waiting:
            self._counts[bisect_left(self.bounds, value)] += 1
        self._total += sum(self.waiting)
        self.waiting.clear()

    @property
    def counts(self) -> list[int]:
        self.count()
        return self._counts

    @property
    def total(self) -> float:
        self.count()
        return self._total

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds as text with the number of observations not above them, as Prometheus wants them."""
        running, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


@dataclass(slots=True)
class CallCounts:
    """Calls of all contracts, answered by an engine: whole HTTP requests of any kind."""

    succeeded: int = 0
    failed: int = 0
    succeeded_seconds: float = 0.0
    failed_seconds: float = 0.0
    last_at: float = 0.0  # Seconds since the epoch; 0 if none ran.
    durations: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))  # Of successful requests.

    def count(self, seconds: float, *, failed: bool) -> None:
        """Count a call that took so long. One whose client went away counts as neither."""
        self.last_at = time.time()
        if failed:
            self.failed += 1
            self.failed_seconds += seconds
        else:
            self.succeeded += 1
            self.succeeded_seconds += seconds
            self.durations.observe(seconds)


# A step of the engine: when its message came, in seconds since the epoch; running and waiting requests; the tokens of
# prompts and answers that it computed; the used share of the KV cache. No class, because one is made for each step.
Step = tuple[float, int, int, int, float]
MOST_STEPS = 8192
"""Steps of a copy that are kept: those of a minute, if a step takes 7 ms or longer."""


@dataclass(slots=True)
class EngineStatistics:
    """Everything that one engine counts."""

    calls: CallCounts = field(default_factory=CallCounts)
    started_requests: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    continued_requests: int = 0  # Times that a request was continued after the engine had died.
    down_seconds: float = 0.0  # Time in which requests waited for another engine process.
    partial_requests: int = 0  # Prompts whose answers follow a part of their JSON schema.
    partial_answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))  # By verdict.
    deadlines: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AT_DEADLINE, 0))  # Calls that reached it.
    prompt_tokens: int = 0
    tokens: int = 0
    time_to_first_token: Distribution = field(default_factory=lambda: Distribution(TIME_TO_FIRST_TOKEN_BUCKETS))
    inter_token: Distribution = field(default_factory=lambda: Distribution(INTER_TOKEN_BUCKETS))
    queue_time: Distribution = field(default_factory=lambda: Distribution(TIME_TO_FIRST_TOKEN_BUCKETS))
    prompt_lengths: Distribution = field(default_factory=lambda: Distribution(LENGTH_BUCKETS))
    # Of sequences that came to their end: tokens, and seconds from the engine's first step for it to its last.
    lengths: Distribution = field(default_factory=lambda: Distribution(LENGTH_BUCKETS))
    inference: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))
    mean_times: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))
    # The latest steps of each copy or data-parallel rank, by its number from 0. Empty if the engine reports none.
    steps: Mapping[int, deque[Step]] = field(default_factory=dict)
    vllm: Collector | None = None  # vLLM's own metrics, if it is the engine.

    def prompt(self, tokens: int) -> None:
        """Count a prompt that was given to the engine."""
        self.started_requests += 1
        self.prompt_tokens += tokens
        self.prompt_lengths.waiting.append(tokens)
        if len(self.prompt_lengths.waiting) >= MOST_WAITING:
            for each in (self.prompt_lengths, self.time_to_first_token, self.queue_time):
                each.count()
            for each in (self.lengths, self.inference, self.mean_times):
                each.count()

    def count_verdict(self, verdict: str) -> None:
        """Count an answer whose schema is held in part, by what its check has found: one of `VERDICTS`."""
        self.partial_answers[verdict] += 1

    def of_beam_steps(self) -> tuple[EngineStatistics, EngineStatistics]:
        """Return the statistics for the first step of a beam search, and for its later steps."""
        first = EngineStatistics(time_to_first_token=self.time_to_first_token, queue_time=self.queue_time)
        # The first token of a later step comes after another of its beam, so its time is one between two tokens.
        return first, EngineStatistics(time_to_first_token=self.inter_token)

    def pooled(self, seconds: float, queued: float) -> None:
        """Count a prompt whose numbers came after `seconds`, of which it waited `queued` for its first step."""
        self.finished_requests += 1
        self.inference.observe(max(seconds - queued, 0.0))
        self.queue_time.observe(queued)

    def ended(self, tokens: int, seconds: float) -> None:
        """Keep the length and the time of a sequence that came to its end."""
        self.lengths.waiting.append(tokens)
        self.inference.waiting.append(seconds)
        if tokens:
            self.mean_times.waiting.append(seconds / tokens)
