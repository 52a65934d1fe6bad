"""The pool of one model's workers. It starts, restarts and scales workers, and sends them requests from the queue."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from engines.interface import EngineStartError
from engines.stacks import Stack
from handlers.contract import ContractError
from handlers.custom.batching.dynamic import DynamicBatcher
from handlers.custom.batching.rolling import RollingBatcher
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.request import CallLimits, Request
from handlers.custom.settings import HandlerConfig
from handlers.custom.worker import Worker, WorkerPlan
from handlers.djl_errors import refused

logger = logging.getLogger("handlers.custom")

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 30.0  # Seconds between a worker's failure and its restart.
_HEALTHY_SECONDS = 60.0  # If a worker runs longer than this before it fails, the delay of restarts is reset.
_IDLE_GRACE = 5.0  # The time limit, in seconds, for an idle worker to exit. After that, it is killed.
_CPU = "-1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_STOPPING = "the server is stopping"
_NOT_LOADED = "the handler is not loaded"
_SCALED_TO_NOTHING = "the model has no workers: it is scaled to 0"

Batcher = DynamicBatcher | RollingBatcher  # Turns the requests of one worker into calls.
# Called with a worker that has loaded the handler, before the worker gets requests. May raise EngineStartError.
PrepareWorker = Callable[[Worker], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class FailedWorker:
    """A worker that has crashed or hung."""

    name: str
    pid: int | None
    reason: str
    stacks: Sequence[Stack]  # The stacks of its threads, if the worker hung.


class WorkerPool:
    """Starts workers, sends them requests, and restarts workers that have ended."""

    def __init__(
        self, handler_config: HandlerConfig, limits: CallLimits, batcher: type[Batcher], prepare_worker: PrepareWorker
    ) -> None:
        self._handler_config, self._limits = handler_config, limits
        self._batcher, self._prepare_worker = batcher, prepare_worker
        self.min_workers, self.max_workers = (
            handler_config.min_workers,
            max(handler_config.min_workers, handler_config.max_workers),
        )
        self._queue: list[Request] = []  # Waiting requests, ordered by priority and then by arrival.
        self._batchers: dict[Worker, Batcher] = {}  # The workers that take requests, and their batchers.
        self._starting: set[Worker] = set()
        self._pending_starts = 0  # The number of workers that are starting or scheduled to start.
        self._worker_ids = itertools.count(1)
        self._arrivals = itertools.count(1)
        self.metrics = HandlerMetrics()  # Metrics that the handler prints.
        self.last_failed: FailedWorker | None = None
        self.failures = 0  # The number of crashes, hangs and failed restarts since the start.
        self._recent_failures = 0  # The number of failures since a worker last ran for `_HEALTHY_SECONDS`.
        # The reason why the model counts as failed, or empty. After more than `retry_threshold` failures it stays set,
        # but running workers still serve requests.
        self.failed = _NOT_LOADED
        self._no_worker_reason = ""  # The reason why the last worker could not be restarted. Empty while a worker runs.
        self._stopping = False
        # Starts a batch after `max_batch_delay`, even if the batch is not full.
        self._batch_timer: asyncio.TimerHandle | None = None
        self._idle_timers: dict[Worker, asyncio.TimerHandle] = {}  # Each timer ends a worker after `max_idle_time`.
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def start(self, plan: WorkerPlan) -> None:
        """Start `min_workers` workers.

        Raises:
            EngineStartError: A worker cannot be started. All other workers have been ended.
        """
        self._plan = plan
        parallel = self._handler_config.properties.get("parallel_loading", "").lower() == "true"
        try:
            # A worker that ends while another worker loads is restarted by `_on_end`, and counts as a pending start.
            while len(self._batchers) + self._pending_starts < self.min_workers:
                starts = (self._start_worker() for _ in range(self.min_workers if parallel else 1))
                for failure in await asyncio.gather(*starts, return_exceptions=True):
                    if failure is not None:
                        raise failure
        except BaseException:
            await self.stop(0)
            raise
        if self.failed == _NOT_LOADED:  # Otherwise too many workers have already failed.
            self.failed = ""

    async def stop(self, grace: float) -> None:
        """End all workers. Running requests have `grace` seconds to finish."""
        self._stopping = True
        self._refuse_all(_STOPPING)
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(worker.stop(grace) for worker in (*self._batchers, *self._starting)), *self._ends)
        self._batchers.clear()

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Change the limits on the number of workers. Surplus workers get no more requests, and end once idle."""
        self.min_workers, self.max_workers = min_workers, max_workers
        for _ in range(min_workers - len(self._batchers) - self._pending_starts):
            self._add_worker()
        surplus = len(self._batchers) - max_workers
        idle = [worker for worker, batcher in self._batchers.items() if not batcher.load]
        for worker in idle[: max(surplus, 0)]:
            self._end_idle(worker)
        if max_workers < 1:
            self._refuse_all(_SCALED_TO_NOTHING)
        self._dispatch()

    def submit(self, request: Request) -> None:
        """Send a request to a worker, or put the request in the queue.

        Raises:
            ContractError: The queue is full, or no worker can take the request.
        """
        if self._stopping:
            raise self._unavailable(_STOPPING)
        if self.max_workers < 1:
            raise self._unavailable(_SCALED_TO_NOTHING)
        if self._no_worker_reason and self._pending_starts:
            raise self._unavailable(self._no_worker_reason)
        if not self._batchers and not self._pending_starts:
            self._add_worker(self._backoff if self._no_worker_reason else 0.0)
            self._no_worker_reason = ""
        self.refuse_if_full()
        request.number = next(self._arrivals)
        request.arrived_at = asyncio.get_running_loop().time()
        request.forget = self._queue.remove
        bisect.insort(self._queue, request, key=lambda one: (one.priority, one.number))
        self._dispatch()

    def refuse_if_full(self) -> None:
        """Refuse a call if the queue has no room for one more.

        Raises:
            ContractError: The queue is full.
        """
        if len(self._queue) >= self._limits.queue_size + self._places():
            message = f"every worker is busy and {len(self._queue)} calls wait already; try again later"
            raise refused(self._limits.overload_status, "WlmCapacityException", message)

    @property
    def serving(self) -> tuple[Worker, ...]:
        """The workers that take requests."""
        return tuple(self._batchers)

    @property
    def workers(self) -> list[Worker]:
        """All workers in the order of their start, including workers that are still starting."""
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
            if len(self._queue) < self._batch_size and self._waits_for_more():
                return
            requests, self._queue[: batcher.room] = self._queue[: batcher.room], []
            batcher.begin(requests)
        enough = len(self._batchers) + self._pending_starts >= self.max_workers
        if len(self._queue) - self._places() > 2 * self._batch_size and not self._pending_starts and not enough:
            self._add_worker()

    @property
    def _batch_size(self) -> int:
        """The largest number of requests in a call."""
        return self._limits.batch_size if all(worker.takes_batches for worker in self._batchers) else 1

    def _best_batcher(self) -> Batcher | None:
        ready = (batcher for batcher in self._open_batchers() if batcher.room)
        return min(ready, key=lambda batcher: batcher.load, default=None)

    def _places(self) -> int:
        return sum(batcher.places for batcher in self._open_batchers())

    def _open_batchers(self) -> list[Batcher]:
        """Return the batchers that get requests: the batchers of the `max_workers` workers that were ready first."""
        return list(self._batchers.values())[: self.max_workers]

    def _waits_for_more(self) -> bool:
        """Return True if a partial batch should wait for more requests.

        The batch waits for at most `max_batch_delay` after its first request arrived.
        """
        loop = asyncio.get_running_loop()
        end = min(request.arrived_at for request in self._queue) + self._limits.max_batch_delay
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        self._batch_timer = loop.call_at(end, self._dispatch) if loop.time() < end else None
        return self._batch_timer is not None

    async def _start_worker(self) -> None:
        self._pending_starts += 1
        device = least_used(
            self._handler_config.devices, [worker.device for worker in (*self._batchers, *self._starting)]
        )
        plan = on_device(self._plan, device, self._handler_config.sees_own_gpus)
        worker = Worker(next(self._worker_ids), device, plan, self._on_end)
        self._starting.add(worker)
        try:
            await worker.start()
            await self._prepare_worker(worker)
            if not worker.ready:
                raise EngineStartError(f"{worker.name} ended before it got requests")
        except BaseException:
            await worker.kill("was killed because its start failed or was cancelled")
            raise
        finally:
            self._pending_starts -= 1
            self._starting.discard(worker)
        self._no_worker_reason = ""
        logger.info("%s is ready (pid %s)", worker.name, worker.pid, extra={"worker": worker.name})
        self._batchers[worker] = self._batcher(worker, self._limits, lambda: self._on_free(worker))
        self._on_free(worker)

    def _on_free(self, worker: Worker) -> None:
        if self._stopping:
            return
        self._dispatch()
        batcher = self._batchers.get(worker)
        if batcher is None or batcher.load:
            return
        if batcher not in self._open_batchers():
            self._end_idle(worker)
        elif len(self._batchers) > self.min_workers:
            self._end_timer(worker)
            later = asyncio.get_running_loop().call_later
            self._idle_timers[worker] = later(
                self._handler_config.max_idle_time, self._end_surplus, worker, worker.calls
            )

    def _end_timer(self, worker: Worker) -> None:
        if (timer := self._idle_timers.pop(worker, None)) is not None:
            timer.cancel()

    def _end_surplus(self, worker: Worker, calls: int) -> None:
        """End a surplus worker if it has stayed idle: its number of calls is then still `calls`."""
        self._idle_timers.pop(worker, None)
        if worker.calls != calls or len(self._batchers) <= self.min_workers:
            return
        if self._queue:  # A batch is waiting for more requests.
            self._on_free(worker)
            return
        logger.info("%s is ended because it is idle", worker.name, extra={"worker": worker.name})
        self._end_idle(worker)

    def _end_idle(self, worker: Worker) -> None:
        del self._batchers[worker]
        self._end_timer(worker)
        _spawn(self._ends, worker.stop(_IDLE_GRACE))

    def _on_end(self, worker: Worker, reason: str) -> None:
        batcher = self._batchers.pop(worker, None)
        self._end_timer(worker)
        if batcher is None or self._stopping:
            return
        if time.time() - worker.started > _HEALTHY_SECONDS:
            self._recent_failures = 0
        self.last_failed = FailedWorker(worker.name, worker.pid, reason, worker.stacks)
        self._count_failure(f"{worker.name} {reason}")
        self._restart_missing()

    def _count_failure(self, reason: str) -> None:
        """Count a failure.

        After more than `retry_threshold` failures the health check fails, as in LMI. SageMaker then replaces the
        container.
        """
        self.failures += 1
        self._recent_failures += 1
        if self.failures > self._handler_config.retry_threshold:
            limit = self._handler_config.retry_threshold
            self.failed = f"the handler failed {self.failures} times (retry_threshold: {limit}); at last {reason}"
            logger.error("%s", self.failed)

    def _restart_missing(self) -> None:
        missing = self.min_workers - len(self._batchers) - self._pending_starts
        wanted = missing > 0 or (self._queue and not self._batchers and not self._pending_starts)
        if wanted and not self._stopping:
            self._add_worker(self._backoff)

    @property
    def _backoff(self) -> float:
        """The number of seconds between a failure and the next start of a worker."""
        return min(_FIRST_BACKOFF * 2.0 ** min(self._recent_failures - 1, 20), _LONGEST_BACKOFF)

    def _add_worker(self, delay: float = 0.0) -> None:
        self._pending_starts += 1
        _spawn(self._starts, self._start_later(delay))

    async def _start_later(self, delay: float) -> None:
        try:
            await asyncio.sleep(delay)
        finally:
            self._pending_starts -= 1
        try:
            await self._start_worker()
        except Exception as error:
            logger.error("a worker cannot be started: %s", error, exc_info=not isinstance(error, EngineStartError))
            self._count_failure(f"a worker could not be started: {error}")
            if not self._batchers:
                self._no_worker_reason = f"there is no worker: {error}"
                self._refuse_all(self._no_worker_reason)
            self._restart_missing()

    def _refuse_all(self, reason: str) -> None:
        while self._queue:
            self._queue.pop().reply.reply(self._unavailable(reason).reply)

    def _unavailable(self, reason: str) -> ContractError:
        return refused(self._limits.unavailable_status, "ServiceUnavailableException", reason)


def _spawn(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def least_used(groups: Sequence[str], used: Sequence[str]) -> str:
    """Return the group of devices with the fewest workers.

    If there are several such groups, return the first.

    Args:
        groups: The groups of devices, such as `0` or `0,1`.
        used: The group of each worker.
    """
    return min(groups or (_CPU,), key=used.count)


def on_device(plan: WorkerPlan, group: str, sees_own: bool) -> WorkerPlan:
    """Return the plan for a worker on a group of devices.

    If the group is one device, the worker's `device_id` names that device. If the group has several devices, or
    `sees_own` is True, the worker sees only the devices of its group, and its `device_id` is 0.
    """
    if group == _CPU or ("," not in group and not sees_own):
        return replace(plan, load_request=replace(plan.load_request, device_id=group))
    environment = {**plan.environment, _VISIBLE: _of_visible(group, plan.environment.get(_VISIBLE))}
    return replace(plan, environment=environment, load_request=replace(plan.load_request, device_id="0"))


def _of_visible(group: str, visible: str | None) -> str:
    """Return the names of a group's devices. The group's numbers are indices into CUDA_VISIBLE_DEVICES."""
    if visible is None:
        return group
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[int(index)] for index in group.split(","))
