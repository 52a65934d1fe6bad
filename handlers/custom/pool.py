"""The workers of one model: how many there are, and which of them gets which request."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace

from engines.interface import EngineStartError
from engines.model_settings import HandlerSettings
from handlers.contract import ContractError
from handlers.custom.batching import Batcher, CallSettings, Request
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.worker import Worker, WorkerPlan
from handlers.djl_errors import refused

logger = logging.getLogger("handlers.custom")

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 30.0  # Seconds between a worker's failure and the next start.
_HEALTHY_SECONDS = 60.0  # The failure of a worker that has lived this long does not delay the next start.
_IDLE_GRACE = 5.0  # Seconds that an idle worker gets to end by itself.
_CPU = "-1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_STOPPING = "the server is stopping"

# Called with a worker that has loaded the handler, before it gets requests; may raise EngineStartError.
Introduce = Callable[[Worker], Awaitable[None]]


class Pool:
    """Starts workers, gives them requests, and replaces those that die."""

    def __init__(
        self, settings: HandlerSettings, calls: CallSettings, batcher: type[Batcher], introduce: Introduce
    ) -> None:
        self._settings, self._calls = settings, calls
        self._batcher, self._introduce = batcher, introduce
        self.min_workers, self.max_workers = settings.min_workers, max(settings.min_workers, settings.max_workers)
        self._queue: list[Request] = []  # Requests that wait, ordered by priority, then by arrival.
        self._batchers: dict[Worker, Batcher] = {}  # Of the workers that take requests.
        self._starting: set[Worker] = set()
        self._to_come = 0  # Workers that start or wait for their start.
        self._worker_ids = itertools.count(1)
        self._arrivals = itertools.count(1)
        self.metrics = HandlerMetrics()  # What the handler prints of them.
        self.failures = 0  # Crashes, hangs and failed restarts since the start.
        self._streak = 0  # Failures since a worker last lived for a while.
        # Why the model counts as failed, which is final; workers that live serve nevertheless.
        self.failed = "the handler is not loaded"
        self._down = ""  # Why there is no worker, after one could not be started again.
        self._stopping = False
        # Runs once a batch that is not full has waited for long enough.
        self._gathering: asyncio.TimerHandle | None = None
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def start(self, plan: WorkerPlan) -> None:
        """Start the smallest number of workers. Raises EngineStartError: one of them cannot be started; none is
        left."""
        self._plan = plan
        parallel = self._settings.properties.get("parallel_loading", "").lower() == "true"
        try:
            while len(self._batchers) < self.min_workers:
                starts = (self._start_worker() for _ in range(self.min_workers if parallel else 1))
                for failure in await asyncio.gather(*starts, return_exceptions=True):
                    if failure is not None:
                        raise failure
        except BaseException:
            await self.stop(0)
            raise
        self.failed = ""

    async def stop(self, grace: float) -> None:
        """End all workers; requests that run have `grace` seconds to finish."""
        self._stopping = True
        self._refuse_all(_STOPPING)
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(worker.stop(grace) for worker in (*self._batchers, *self._starting)), *self._ends)
        self._batchers.clear()

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Change the numbers of workers. Surplus ones end as they become idle."""
        self.min_workers, self.max_workers = min_workers, max_workers
        for _ in range(min_workers - len(self._batchers) - self._to_come):
            self._add_worker()
        surplus = len(self._batchers) - max_workers
        idle = [worker for worker, batcher in self._batchers.items() if not batcher.load]
        for worker in idle[: max(surplus, 0)]:
            self._end_idle(worker)

    def submit(self, request: Request) -> None:
        """Give a request to a worker, or have it wait for one. Raises ContractError: the queue is full, or there will
        be no worker."""
        if self._stopping:
            raise self._unavailable(_STOPPING)
        if self._down:
            raise self._unavailable(self._down)
        if not self._batchers and not self._to_come:
            if self.max_workers < 1:
                raise self._unavailable("the model has no workers: it is scaled to 0")
            self._add_worker()
        self.check_place()
        request.number = next(self._arrivals)
        request.arrived_at = asyncio.get_running_loop().time()
        request.forget = self._queue.remove
        bisect.insort(self._queue, request, key=lambda one: (one.priority, one.number))
        self._dispatch()

    def check_place(self) -> None:
        """Raise ContractError if the queue is full."""
        if len(self._queue) >= self._calls.queue_size + self._places():
            message = f"every worker is busy and {len(self._queue)} calls wait already; try again later"
            raise refused(self._calls.overload_status, "WlmCapacityException", message)

    @property
    def serving(self) -> tuple[Worker, ...]:
        return tuple(self._batchers)

    @property
    def workers(self) -> list[Worker]:
        """All workers, in the order of their start; some may be starting."""
        return sorted((*self._batchers, *self._starting), key=lambda worker: worker.id)

    @property
    def ready(self) -> int:
        return sum(worker.ready for worker in self.workers)

    @property
    def busy(self) -> int:
        """The number of workers that have a request."""
        return sum(batcher.load > 0 for batcher in self._batchers.values())

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    def _dispatch(self) -> None:
        while self._queue and (batcher := self._best_batcher()) is not None:
            if len(self._queue) < self._calls.batch_size and self._waits_for_more():
                return
            requests, self._queue[: batcher.room] = self._queue[: batcher.room], []
            batcher.begin(requests)
        enough = len(self._batchers) + self._to_come >= self.max_workers
        if len(self._queue) - self._places() > 2 * self._calls.batch_size and not self._to_come and not enough:
            self._add_worker()

    def _best_batcher(self) -> Batcher | None:
        ready = (batcher for batcher in self._batchers.values() if batcher.room)
        return min(ready, key=lambda batcher: batcher.load, default=None)

    def _places(self) -> int:
        return sum(batcher.places for batcher in self._batchers.values())

    def _waits_for_more(self) -> bool:
        """Whether a batch that is not full waits for others: `max_batch_delay` from its first request's arrival."""
        loop = asyncio.get_running_loop()
        end = min(request.arrived_at for request in self._queue) + self._calls.max_batch_delay
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = loop.call_at(end, self._dispatch) if loop.time() < end else None
        return self._gathering is not None

    async def _start_worker(self) -> None:
        self._to_come += 1
        device = least_used(self._settings.devices, [worker.device for worker in (*self._batchers, *self._starting)])
        plan = on_device(self._plan, device)
        worker = Worker(next(self._worker_ids), device, plan, lambda reason: self._on_end(worker, reason))
        self._starting.add(worker)
        try:
            await worker.start()
            await self._introduce(worker)
        except BaseException:
            await worker.kill("was not needed any more")
            raise
        finally:
            self._to_come -= 1
            self._starting.discard(worker)
        self._down = ""
        logger.info("%s is ready (pid %s)", worker.name, worker.pid, extra={"worker": worker.name})
        self._batchers[worker] = self._batcher(worker, self._calls, lambda: self._on_free(worker))
        self._on_free(worker)

    def _on_free(self, worker: Worker) -> None:
        if self._stopping:
            return
        self._dispatch()
        batcher = self._batchers.get(worker)
        if batcher is not None and not batcher.load and len(self._batchers) > self.min_workers:
            later = asyncio.get_running_loop().call_later
            later(self._settings.max_idle_time, self._end_surplus, worker, worker.calls)

    def _end_surplus(self, worker: Worker, calls: int) -> None:
        """End a worker that has had no call since it had so many, unless it is needed."""
        if worker not in self._batchers or worker.calls != calls or len(self._batchers) <= self.min_workers:
            return
        if self._queue:  # a batch is being gathered
            self._on_free(worker)
            return
        logger.info("%s has nothing to do and ends", worker.name, extra={"worker": worker.name})
        self._end_idle(worker)

    def _end_idle(self, worker: Worker) -> None:
        del self._batchers[worker]
        _spawn(self._ends, worker.stop(_IDLE_GRACE))

    def _on_end(self, worker: Worker, reason: str) -> None:
        batcher = self._batchers.pop(worker, None)
        if batcher is None or self._stopping:
            return
        if time.time() - worker.started > _HEALTHY_SECONDS:
            self._streak = 0
        self._count_failure(f"{worker.name} {reason}")
        self._replace()

    def _count_failure(self, reason: str) -> None:
        """Count a failure. After too many the health check fails, as in LMI; SageMaker then replaces the container."""
        self.failures += 1
        self._streak += 1
        if self.failures > self._settings.retry_threshold:
            limit = self._settings.retry_threshold
            self.failed = f"the handler failed {self.failures} times (retry_threshold: {limit}); at last {reason}"
            logger.error("%s", self.failed)

    def _replace(self) -> None:
        missing = self.min_workers - len(self._batchers) - self._to_come
        wanted = missing > 0 or (self._queue and not self._batchers and not self._to_come)
        if wanted and not self._stopping:
            self._add_worker(min(_FIRST_BACKOFF * 2.0 ** min(self._streak - 1, 20), _LONGEST_BACKOFF))

    def _add_worker(self, delay: float = 0.0) -> None:
        self._to_come += 1
        _spawn(self._starts, self._start_later(delay))

    async def _start_later(self, delay: float) -> None:
        try:
            await asyncio.sleep(delay)
        finally:
            self._to_come -= 1
        try:
            await self._start_worker()
        except Exception as error:
            logger.error("a worker cannot be started: %s", error, exc_info=not isinstance(error, EngineStartError))
            self._count_failure(f"a worker could not be started: {error}")
            if not self._batchers:
                self._down = f"there is no worker: {error}"
                self._refuse_all(self._down)
            self._replace()

    def _refuse_all(self, reason: str) -> None:
        while self._queue:
            self._queue.pop().reply.reply(self._unavailable(reason).reply)

    def _unavailable(self, reason: str) -> ContractError:
        return refused(self._calls.unavailable_status, "ServiceUnavailableException", reason)


def _spawn(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def least_used(groups: Sequence[str], used: Sequence[str]) -> str:
    """The group of devices with the fewest workers, the first of several; `used` has one for each worker."""
    return min(groups or (_CPU,), key=used.count)


def on_device(plan: WorkerPlan, group: str) -> WorkerPlan:
    """The plan for a worker on these devices: it gets its `device_id`; with several, it sees only those."""
    if "," not in group:
        return replace(plan, order=replace(plan.order, device_id=group))
    environment = {**plan.environment, _VISIBLE: _of_visible(group, plan.environment.get(_VISIBLE))}
    return replace(plan, environment=environment, order=replace(plan.order, device_id="0"))


def _of_visible(group: str, visible: str | None) -> str:
    """The group in the driver's numbers: its own count the devices that this process sees."""
    if visible is None:
        return group
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[int(index)] for index in group.split(","))
