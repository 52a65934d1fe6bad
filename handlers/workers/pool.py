"""The workers of one model: how many there are, and who gets which call.

Source: contracts/lmi.md sections 1.8, 1.9 and 5.1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from handlers.contracts.lmi.errors import front_end_reply
from handlers.contracts.protocol import ContractError
from handlers.engines.protocol import EngineStartError
from handlers.workers.job import Job, JobQueue, Lane
from handlers.workers.worker import Worker, WorkerPlan

logger = logging.getLogger("handlers.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Numbers of workers and of calls."""

    min_workers: int
    max_workers: int
    queue_size: int
    """Calls that may wait while every worker is busy."""
    scale_up_above: int
    """More calls than these in the queue start another worker."""
    retry_threshold: int
    """So many crashes, hangs and failed restarts are survived."""
    max_idle_time: float
    """Seconds."""
    overload_status: int
    unavailable_status: int
    devices: tuple[str, ...] = ()
    """Those of a worker each; without any, the CPU."""
    parallel_loading: bool = False
    """Workers load at the same time."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker."""

    id: int
    state: str
    """STARTING, READY, STOPPING or ENDED."""
    pid: int | None
    started: float
    """Seconds since the epoch."""
    busy: bool


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """All workers of a model."""

    workers: tuple[WorkerStatus, ...]
    min_workers: int
    max_workers: int
    queue_length: int
    """Calls that wait."""
    queue_size: int
    failures: int
    """Crashes, hangs and failed restarts since the start."""
    failed: str
    """Why the model counts as failed; empty while it does not."""

    @property
    def busy(self) -> int:
        """Workers that have a call."""
        return sum(worker.busy for worker in self.workers)

    @property
    def ready(self) -> int:
        """Workers that can serve."""
        return sum(worker.state == "READY" for worker in self.workers)


NO_DEVICE = "-1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Devices:
    """Hands out devices so that none has many more workers than another."""

    def __init__(self, groups: Sequence[str]) -> None:
        """`groups`: the devices of a worker each, such as "0", or "0,1" for one that takes several; "-1" is the CPU."""
        self._groups = tuple(groups) or (NO_DEVICE,)
        self._workers: Counter[str] = Counter()

    def take(self) -> str:
        """The group with the fewest workers, the first of several."""
        group = min(self._groups, key=lambda one: self._workers[one])
        self._workers[group] += 1
        return group

    def give_back(self, group: str) -> None:
        """A worker has ended."""
        self._workers[group] -= 1


def on_device(plan: WorkerPlan, group: str) -> WorkerPlan:
    """The plan for a worker on these devices: it is told its `device_id`, and of several it sees no others."""
    several = "," in group
    environment = plan.process.environment
    if several:
        environment = {**environment, _VISIBLE: _of_visible(group, environment.get(_VISIBLE))}
    standing = (*plan.order.standing_properties, ("device_id", "0" if several else group))
    return replace(
        plan,
        process=replace(plan.process, environment=environment),
        order=replace(plan.order, standing_properties=standing),
    )


def _of_visible(group: str, visible: str | None) -> str:
    """The group in the driver's own terms: its numbers count what this process sees."""
    if visible is None:
        return group
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[int(index)] for index in group.split(","))


_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 30.0
"""Seconds between a worker's failure and the next start."""

_HEALTHY_SECONDS = 60.0
"""A worker that has lived for so long is no sign that the next one cannot."""

_IDLE_GRACE = 5.0
"""Seconds that an idle worker gets to end by itself."""

MakeLane = Callable[[Worker, Callable[[], None]], Lane]
Introduce = Callable[[Worker], Awaitable[None]]
"""What is done with a worker that has loaded the handler, before it gets calls; may raise EngineStartError."""


class Pool:
    """Starts workers, gives them jobs, and replaces those that die."""

    def __init__(
        self, plan: WorkerPlan, settings: PoolSettings, make_lane: MakeLane, introduce: Introduce | None = None
    ) -> None:
        self._plan, self._settings, self._make_lane = plan, settings, make_lane
        self._introduce = introduce
        self._queue = JobQueue()
        self._devices = Devices(settings.devices)
        self._device_of: dict[Worker, str] = {}
        self._lanes: dict[Worker, Lane] = {}
        self._starting: set[Worker] = set()
        self._to_come = 0
        """Workers that start or are to start again."""
        self._last_number = 0
        self._last_job = 0
        self._failures = 0
        self._streak = 0
        """Failures since a worker last lived for a while."""
        self._failed = ""
        self._down = ""
        """Why there is no worker, after one could not be started again."""
        self._stopping = False
        self._idle_timers: dict[Worker, asyncio.TimerHandle] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the smallest number of workers.

        Raises:
            EngineStartError: one of them cannot be started; none is left.
        """
        at_once = self._settings.min_workers if self._settings.parallel_loading else 1
        try:
            while len(self._lanes) < self._settings.min_workers:
                starts = (self._start_worker() for _ in range(at_once))
                for failure in await asyncio.gather(*starts, return_exceptions=True):
                    if failure is not None:
                        raise failure
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace: float) -> None:
        """End all workers; a call that runs has `grace` seconds to finish."""
        self._stopping = True
        for lane in self._lanes.values():
            self._take_back(lane)
        self._refuse_all("the server is stopping")
        for worker in tuple(self._idle_timers):
            self._stop_idle_timer(worker)
        for task in self._starts:
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        await asyncio.gather(*(worker.stop(grace) for worker in (*self._lanes, *self._starting)), *self._ends)
        self._lanes.clear()

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Have other numbers of workers from now on. Surplus ones end as they become idle; calls are not touched."""
        self._settings = replace(self._settings, min_workers=min_workers, max_workers=max_workers)
        for _ in range(min_workers - len(self._lanes) - self._to_come):
            self._add_worker()
        surplus = len(self._lanes) - max_workers
        idle = [worker for worker, lane in self._lanes.items() if not lane.busy]
        for worker in idle[: max(surplus, 0)]:
            self._end_idle(worker)

    def submit(self, job: Job) -> None:
        """Give a job to a worker, or have it wait for one.

        Raises:
            ContractError: the queue is full, or there will be no worker.
        """
        if self._stopping:
            raise self._unavailable("the server is stopping")
        if self._down:
            raise self._unavailable(self._down)
        if not self._lanes and not self._to_come:
            if self._settings.max_workers < 1:
                raise self._unavailable("the model has no workers: it is scaled to 0")
            self._add_worker()
        if len(self._queue) >= self._settings.queue_size and not self._best_lane():
            message = f"every worker is busy and {len(self._queue)} calls wait already; try again later"
            status = self._settings.overload_status
            raise ContractError(front_end_reply(status, "WlmCapacityException", message), message)
        self._last_job += 1
        job.number = self._last_job
        self._queue.add(job)
        self._dispatch()

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more."""
        if self._queue.remove(job):
            job.delivery.drop()
        elif job.lane is not None:
            job.lane.cancel(job)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that take calls."""
        return tuple(self._lanes)

    @property
    def failed(self) -> str:
        """Why the model counts as failed, which it does for good; workers that live serve nevertheless."""
        return self._failed

    def status(self) -> PoolStatus:
        """The state of everything."""
        lanes = tuple(
            WorkerStatus(worker.number, worker.state, worker.pid, worker.started, lane.busy)
            for worker, lane in self._lanes.items()
        )
        starting = tuple(
            WorkerStatus(worker.number, worker.state, worker.pid, worker.started, False) for worker in self._starting
        )
        return PoolStatus(
            workers=tuple(sorted(lanes + starting, key=lambda worker: worker.id)),
            min_workers=self._settings.min_workers,
            max_workers=self._settings.max_workers,
            queue_length=len(self._queue),
            queue_size=self._settings.queue_size,
            failures=self._failures,
            failed=self._failed,
        )

    def _dispatch(self) -> None:
        while self._queue and (lane := self._best_lane()) is not None:
            job = self._queue.pop()
            job.lane = lane
            self._stop_idle_timer(lane.worker)
            lane.take(job)
        enough = len(self._lanes) + self._to_come >= self._settings.max_workers
        if len(self._queue) > self._settings.scale_up_above and not self._to_come and not enough:
            self._add_worker()

    def _best_lane(self) -> Lane | None:
        open_lanes = (lane for lane in self._lanes.values() if lane.free > 0)
        return min(open_lanes, key=lambda lane: lane.reluctance, default=None)

    async def _start_worker(self) -> None:
        self._to_come += 1
        self._last_number += 1
        device = self._devices.take()
        worker = Worker(self._last_number, on_device(self._plan, device), lambda reason: self._on_end(worker, reason))
        self._device_of[worker] = device
        self._starting.add(worker)
        try:
            await worker.start()
            if self._introduce is not None:
                await self._introduce(worker)
        except BaseException:
            await worker.kill("was not needed any more")
            self._free_device(worker)
            raise
        finally:
            self._to_come -= 1
            self._starting.discard(worker)
        self._down = ""
        logger.info("%s is ready (pid %s)", worker.name, worker.pid, extra={"worker": worker.name})
        self._lanes[worker] = self._make_lane(worker, lambda: self._on_free(worker))
        self._on_free(worker)

    def _on_free(self, worker: Worker) -> None:
        """A worker can take more."""
        if self._stopping:
            return
        self._dispatch()
        lane = self._lanes.get(worker)
        if lane is None or lane.busy:
            return
        if len(self._lanes) > self._settings.min_workers:
            self._stop_idle_timer(worker)
            later = asyncio.get_running_loop().call_later
            self._idle_timers[worker] = later(self._settings.max_idle_time, self._end_surplus, worker)

    def _end_surplus(self, worker: Worker) -> None:
        if len(self._lanes) > self._settings.min_workers:
            logger.info("%s has nothing to do and ends", worker.name, extra={"worker": worker.name})
            self._end_idle(worker)

    def _end_idle(self, worker: Worker) -> None:
        self._stop_idle_timer(worker)
        del self._lanes[worker]
        _spawn(self._ends, self._stop_idle(worker))

    async def _stop_idle(self, worker: Worker) -> None:
        await worker.stop(_IDLE_GRACE)
        self._free_device(worker)

    def _free_device(self, worker: Worker) -> None:
        if (device := self._device_of.pop(worker, None)) is not None:
            self._devices.give_back(device)

    def _stop_idle_timer(self, worker: Worker) -> None:
        timer = self._idle_timers.pop(worker, None)
        if timer is not None:
            timer.cancel()

    def _on_end(self, worker: Worker, reason: str) -> None:
        """A worker has died."""
        self._free_device(worker)
        lane = self._lanes.pop(worker, None)
        self._stop_idle_timer(worker)
        if lane is None:
            return
        self._take_back(lane)
        if self._stopping:
            self._refuse_all("the server is stopping")
            return
        if time.time() - worker.started > _HEALTHY_SECONDS:
            self._streak = 0
        self._count_failure(f"{worker.name} {reason}")
        self._replace()

    def _take_back(self, lane: Lane) -> None:
        """Have the jobs that the worker has not seen wait again."""
        for job in lane.recall():
            job.lane = None
            self._queue.add(job)

    def _count_failure(self, reason: str) -> None:
        """Too many failures make the health check fail, as in LMI; SageMaker then replaces the container."""
        self._failures += 1
        self._streak += 1
        if self._failures > self._settings.retry_threshold:
            limit = self._settings.retry_threshold
            self._failed = f"the handler failed {self._failures} times (retry_threshold: {limit}); at last {reason}"
            logger.error("%s", self._failed)

    def _replace(self) -> None:
        missing = self._settings.min_workers - len(self._lanes) - self._to_come
        wanted = missing > 0 or (self._queue and not self._lanes and not self._to_come)
        if wanted and not self._stopping:
            delay = min(_FIRST_BACKOFF * 2.0 ** min(self._streak - 1, 20), _LONGEST_BACKOFF)
            self._add_worker(delay)

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
            if not self._lanes:
                self._down = f"there is no worker: {error}"
                self._refuse_all(self._down)
            self._replace()

    def _refuse_all(self, reason: str) -> None:
        for job in self._queue.clear():
            job.delivery.reply(self._unavailable(reason).reply)

    def _unavailable(self, reason: str) -> ContractError:
        status = self._settings.unavailable_status
        return ContractError(front_end_reply(status, "ServiceUnavailableException", reason), reason)


def _spawn(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
