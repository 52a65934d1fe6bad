"""Counts and timings of generation, updated in the hot path.

They are plain numbers and lists. They need no locks, because everything happens on one event loop.
`container.observability.metrics` turns them into Prometheus metrics when `/metrics` is scraped.
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
    """The duration of each phase of the start, for the log and `/metrics`. The phase that ended first comes first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of the `with` block. A phase that fails is not recorded."""
        started = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


TIME_TO_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# In seconds: TGI's buckets, up to two and a half minutes.
DURATION_BUCKETS = tuple(float(f"{0.0001 * 1.5**power:.4g}") for power in range(1, 36))
# In tokens. TGI instead divides the range up to its longest length into a hundred equal buckets.
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


# The possible results of checking an answer whose JSON schema is enforced only in part. "incomplete": a token limit or
# a stop string cut the answer short. "unchecked": the check takes too long, the schema cannot be read, or the queue of
# checks is full.
VERDICTS = ("valid", "invalid", "incomplete", "unchecked")


# The possible results of a call that ends at its deadline: a part of the answer, or nothing.
AT_DEADLINE = ("partial", "nothing")


MOST_WAITING = 4096
"""A `Distribution` sorts its waiting values into buckets when there are this many."""


class Distribution:
    """A histogram. New values wait in a list, and are sorted into buckets when the histogram is read."""

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
        """Sort the waiting values into buckets."""
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
        """Return each upper bound as text, with the number of values up to this bound. Prometheus expects this form."""
        running, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


@dataclass(slots=True)
class CallCounts:
    """Counts the HTTP requests that an engine has answered, for all contracts together."""

    succeeded: int = 0
    failed: int = 0
    succeeded_seconds: float = 0.0
    failed_seconds: float = 0.0
    last_at: float = 0.0  # When the last call ended, in seconds since the epoch. 0 before the first call.
    durations: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))  # Only successful calls.

    def count(self, seconds: float, *, failed: bool) -> None:
        """Count a call that took this many seconds. Calls whose clients have left are not counted."""
        self.last_at = time.time()
        if failed:
            self.failed += 1
            self.failed_seconds += seconds
        else:
            self.succeeded += 1
            self.succeeded_seconds += seconds
            self.durations.observe(seconds)


# A step of the engine: the arrival time of its message, in seconds since the epoch; the numbers of running and of
# waiting requests; the number of prompt and answer tokens that it computed; the used share of the KV cache. It is a
# tuple because tuples are fast to create, and each step creates one.
Step = tuple[float, int, int, int, float]
MOST_STEPS = 8192
"""The number of steps that are kept for each copy. If a step takes at least 7.4 ms, they cover the last minute."""


@dataclass(slots=True)
class EngineStatistics:
    """All counts and timings of one engine."""

    calls: CallCounts = field(default_factory=CallCounts)
    started_requests: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    continued_requests: int = 0  # The number of times that a request was continued after an engine process had died.
    down_seconds: float = 0.0  # Seconds in which no engine process accepted requests.
    partial_requests: int = 0  # The number of prompts whose JSON schema is enforced only in part.
    partial_answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))  # By verdict.
    deadlines: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AT_DEADLINE, 0))  # By result.
    prompt_tokens: int = 0
    tokens: int = 0
    time_to_first_token: Distribution = field(default_factory=lambda: Distribution(TIME_TO_FIRST_TOKEN_BUCKETS))
    inter_token: Distribution = field(default_factory=lambda: Distribution(INTER_TOKEN_BUCKETS))
    queue_time: Distribution = field(default_factory=lambda: Distribution(TIME_TO_FIRST_TOKEN_BUCKETS))
    prompt_lengths: Distribution = field(default_factory=lambda: Distribution(LENGTH_BUCKETS))
    # For finished sequences: the number of tokens, the seconds from the first step to the last token, and the seconds
    # per token.
    lengths: Distribution = field(default_factory=lambda: Distribution(LENGTH_BUCKETS))
    inference: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))
    mean_times: Distribution = field(default_factory=lambda: Distribution(DURATION_BUCKETS))
    # The latest steps of each copy or data-parallel rank, by its number from 0. Empty if the engine reports no steps.
    steps: Mapping[int, deque[Step]] = field(default_factory=dict)
    vllm: Collector | None = None  # vLLM's own metrics, if vLLM is the engine.

    def prompt(self, tokens: int) -> None:
        """Count a prompt that was given to the engine."""
        self.started_requests += 1
        self.prompt_tokens += tokens
        self.prompt_lengths.waiting.append(tokens)
        if len(self.prompt_lengths.waiting) >= MOST_WAITING:
            of_prompts = (self.prompt_lengths, self.time_to_first_token, self.queue_time)
            for each in (*of_prompts, self.lengths, self.inference, self.mean_times):
                each.count()

    def count_verdict(self, verdict: str) -> None:
        """Count the verdict on an answer whose schema is enforced only in part. `verdict` is one of `VERDICTS`."""
        self.partial_answers[verdict] += 1

    def of_beam_steps(self) -> tuple[EngineStatistics, EngineStatistics]:
        """Return the statistics for the first step of a beam search, and for its later steps."""
        first = EngineStatistics(time_to_first_token=self.time_to_first_token, queue_time=self.queue_time)
        # The first token of a later step is not the first token of its beam. So the time to this token counts as a time
        # between two tokens.
        return first, EngineStatistics(time_to_first_token=self.inter_token)

    def pooled(self, seconds: float, queued: float) -> None:
        """Count a pooled prompt.

        Args:
            seconds: The time from the submission of the prompt to its result (a vector or scores).
            queued: The part of this time that the prompt spent in the queue.
        """
        self.finished_requests += 1
        self.inference.observe(max(seconds - queued, 0.0))
        self.queue_time.observe(queued)

    def ended(self, tokens: int, seconds: float) -> None:
        """Record the length and the duration of a finished sequence."""
        self.lengths.waiting.append(tokens)
        self.inference.waiting.append(seconds)
        if tokens:
            self.mean_times.waiting.append(seconds / tokens)
