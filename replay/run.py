"""Runs a replay: reads requests, sends them to one or two servers within the limits, and compares the answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engines.daemon_thread import in_daemon_thread
from replay.answer import parse
from replay.comparison import Difference, Kind, compare
from replay.explanations import explanation_of
from replay.request import RecordedRequest, Reply
from replay.results import Result, bodies, shown, side_of
from replay.sources import MalformedLine, Sample, Source
from replay.targets import NoAnswer, Target, Unreachable

_AHEAD = 2  # How many requests are read ahead for each running request.
# The replay stops after this many consecutive requests without an answer, plus the number of concurrent requests.
MOST_FAILURES = 20
_READER_SECONDS = 3.0  # At its end, the run waits at most this long for the thread that reads the source.
_LONG = 1 << 18  # Bytes. Longer answers are compared in a thread, so that they do not delay other requests.
# The longest pause between two requests with recorded times. A wrong time must not make the replay wait for years.
_MOST_DAYS = 7
_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a replay runs."""

    concurrency: int = 4
    rate: float | None = None  # The maximum number of requests per second.
    as_recorded: bool = False  # Whether to keep the recorded intervals.
    limit: int | None = None
    sample: Sample = field(default_factory=Sample)
    redact: bool = False
    other_model: bool = False
    management: bool = False  # Whether to send requests that change the server, too.
    passed_headers: frozenset[str] = frozenset()  # Names of further headers to send, in lower case.


class NoTimes(Exception):
    """The replay needs times, but the source has none."""


class Replay:
    """A replay of one source. `stop` ends it early."""

    def __init__(
        self,
        source: Source,
        new: Target,
        old: Target | None,
        plan: Plan,
        on_result: Callable[[Result], None],
        on_malformed: Callable[[MalformedLine], None],
        on_unsent: Callable[[str], None],
        done: Collection[bytes] = frozenset(),
    ) -> None:
        """Prepare the replay.

        Args:
            source: The requests.
            new: The server to judge.
            old: The server to compare with. None: the recorded answers.
            plan: How the replay runs.
            on_result: Called with each result.
            on_malformed: Called with each line that is not a request.
            on_unsent: Called with the name of each header that is left out, or with an empty name for a whole request.
            done: The `digest`s of the requests whose results are known.
        """
        self._source, self._new, self._old, self._plan = source, new, old, plan
        self._on_result, self._on_malformed, self._on_unsent, self._done = on_result, on_malformed, on_unsent, done
        self._stopped = asyncio.Event()
        self._pace, self._failures = _Pace(plan), 0
        self._reached: set[Target] = set()  # The targets that have answered so far.
        self.gave_up = False  # Whether the replay stopped because too many consecutive requests had no answer.

    def stop(self) -> None:
        """Send no further requests, and cancel running requests."""
        self._stopped.set()

    async def run(self) -> None:
        """Send all requests.

        Raises:
            NoTimes: The plan needs times, but the source has none.
            Unreachable: A target that has never answered cannot be reached.
        """
        queue: asyncio.Queue[RecordedRequest | None] = asyncio.Queue(self._plan.concurrency * _AHEAD)
        # `_put_all` runs in a thread, because a file or S3 may be slow. It is a daemon thread, so that a blocked read
        # does not keep the process from exiting.
        read = in_daemon_thread(partial(self._put_all, asyncio.get_running_loop(), queue))
        reading = asyncio.ensure_future(read)
        workers = [asyncio.create_task(self._work(queue)) for _ in range(self._plan.concurrency)]
        working = asyncio.gather(*workers)
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            ends: set[asyncio.Future[Any]] = {working, stopping}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopped.set()
            stopping.cancel()
            for worker in workers:
                worker.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READER_SECONDS):
                    while not reading.done():  # The thread may wait until the queue has room.
                        with contextlib.suppress(asyncio.QueueEmpty):
                            queue.get_nowait()
                        await asyncio.sleep(0.01)
            with contextlib.suppress(asyncio.CancelledError):
                await working
            if not reading.cancel():
                reading.result()

    def _put_all(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[RecordedRequest | None]) -> None:
        """Put the requests to send into the queue. Runs in a thread."""

        def put(item: RecordedRequest | None) -> None:
            asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

        plan, count = self._plan, 0
        latest: float | None = None  # The time of the latest request.
        try:
            for item in self._source:
                if self._stopped.is_set() or (plan.limit is not None and count >= plan.limit):
                    break
                if isinstance(item, MalformedLine):
                    loop.call_soon_threadsafe(self._on_malformed, item)
                    continue
                if not plan.sample.has(item):
                    continue
                if item.is_management and not plan.management:
                    loop.call_soon_threadsafe(self._on_unsent, "")
                    continue
                if plan.as_recorded and item.time is not None:
                    if latest is not None and (days := (item.time - latest) / _DAY) > _MOST_DAYS:
                        message = f"its time is {days:.0f} days later; --as-recorded expects at most {_MOST_DAYS}"
                        loop.call_soon_threadsafe(self._on_malformed, MalformedLine(item.place, message))
                        continue
                    latest = item.time if latest is None else max(latest, item.time)
                count += 1
                request, unknown = item.without_unknown_headers(plan.passed_headers)
                for name in unknown:
                    loop.call_soon_threadsafe(self._on_unsent, name)
                if digest(item) not in self._done:
                    put(request)
        finally:
            for _ in range(plan.concurrency):
                put(None)

    async def _work(self, queue: asyncio.Queue[RecordedRequest | None]) -> None:
        while (request := await queue.get()) is not None:
            await self._pace.wait(request)
            result = await self._result(request)
            self._on_result(result)
            self._failures = self._failures + 1 if result.failed else 0
            if self._failures >= MOST_FAILURES + self._plan.concurrency:
                self.gave_up = True
                self.stop()

    async def _ask(self, target: Target, request: RecordedRequest) -> tuple[Reply | None, str]:
        try:
            reply = await target.ask(request)
        except NoAnswer as error:
            if isinstance(error, Unreachable) and target not in self._reached:
                raise
            return None, str(error)
        self._reached.add(target)
        return reply, ""

    async def _result(self, request: RecordedRequest) -> Result:
        asked = [self._ask(target, request) for target in (self._new, self._old) if target is not None]
        (new, failure), *others = await asyncio.gather(*asked)
        old, old_failure = others[0] if others else (request.reply, "")
        if old is not None and not old.complete:
            old = None  # The recorded client left before the answer was complete.
        differences: list[tuple[Difference, str | None]] = []
        similarity = None
        if old is not None and new is not None:
            long = len(old.body) + len(new.body) > _LONG
            judged = (request, old, new, self._plan.other_model)
            similarity, differences = await asyncio.to_thread(_judge, *judged) if long else _judge(*judged)
        elif failure or old_failure:
            lost = Difference(Kind.NO_ANSWER, "", old_failure or "an answer", failure or "an answer")
            differences.append((lost, None))
        redact = self._plan.redact
        return Result(
            key=digest(request).hex(),
            id=request.id,
            place=request.place,
            route=request.route,
            new=side_of(new, failure),
            old=side_of(old, old_failure) if old is not None or old_failure else None,
            differences=tuple(shown(one, name, redact=redact) for one, name in differences),
            similarity=similarity,
            greedy=request.greedy,
            compared=old is not None and new is not None,
            bodies=bodies(request, old, new) if differences and not redact else None,
        )


class _Pace:
    """Decides when requests are sent."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._next = 0.0
        self._began = self._first = 0.0

    async def wait(self, request: RecordedRequest) -> None:
        """Wait until a request is due."""
        now = time.monotonic()
        if self._plan.as_recorded:
            if request.time is None:
                raise NoTimes(f"{request.place} has no time; --as-recorded needs a source with times")
            if not self._began:
                self._began, self._first = now, request.time
            due = self._began + request.time - self._first
        elif self._plan.rate is not None:
            due = max(now, self._next)
            self._next = due + 1 / self._plan.rate
        else:
            return
        if due > now:
            await asyncio.sleep(due - now)


def _judge(
    request: RecordedRequest, old: Reply, new: Reply, other_model: bool
) -> tuple[float | None, list[tuple[Difference, str | None]]]:
    """Return the similarity of the texts, and the differences with the names of their explanations."""
    try:
        before, after = (parse(reply, streams=request.streams) for reply in (old, new))
        comparison = compare(before, after, greedy=request.greedy, other_model=other_model)
        differences = [(one, explanation_of(request, before, after, one)) for one in comparison.differences]
        return comparison.similarity, differences
    except (RecursionError, OverflowError):
        said = "one of the answers is nested too deeply, or has too large a number, to be compared"
        return None, [(Difference(Kind.FRAMING, "", "JSON", said), None)]


def digest(request: RecordedRequest) -> bytes:
    """Return a short digest that is unique to the request within its source."""
    return hashlib.blake2b(request.key.encode(errors="replace"), digest_size=12).digest()
