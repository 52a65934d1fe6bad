"""A customer's `model.py`, run in worker processes. Source: contracts/lmi.md sections 1.3, 1.5 to 1.8, 2.15, 5.1, 7."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container

from handlers.contracts.lmi.body import HandlerInput, input_of, is_form, priority_of
from handlers.contracts.lmi.errors import unknown_adapter
from handlers.contracts.protocol import LONG_BODY, Call, ContractError
from handlers.engines.protocol import EngineHealth
from handlers.errors import UnknownAdapter
from handlers.model_settings import HandlerSettings, ModelSettings
from handlers.reply import ReplyWriter, Running
from handlers.workers.adapters import WorkerAdapters
from handlers.workers.batch_messages import MAX_BATCH
from handlers.workers.job import Job
from handlers.workers.lanes import BatchLane, LaneSettings, SingleLane
from handlers.workers.packages import prepare_interpreter, variables_of
from handlers.workers.pool import MakeLane, Pool, PoolSettings, PoolStatus
from handlers.workers.reply import Delivery
from handlers.workers.rolling_lane import RollingLane
from handlers.workers.runtime.messages import InputMessage, LoadOrder
from handlers.workers.worker import ProcessPlan, WorkerPlan


class CustomHandler:
    """Implements `handlers.reply.Handler` with the workers of one model.

    `queue_size` calls may wait while all workers are busy. Everything happens on the event loop that runs `start`.
    """

    def __init__(
        self, settings: ModelSettings, *, queue_size: int, overload_status: int, unavailable_status: int = 503
    ) -> None:
        """Raises ValueError if the settings name no handler."""
        if settings.handler is None:
            raise ValueError("the settings name no handler")
        self._settings, self._handler = settings, settings.handler
        self._queue_size = queue_size
        self._overload_status, self._unavailable_status = overload_status, unavailable_status
        self.grace = 5.0
        """Seconds that `stop` gives a worker to finish its call."""
        self.client_patience = 120.0
        """Seconds that a client may take nothing of its stream; then its worker is freed for others."""
        self._pool: Pool | None = None
        self.adapter_host = WorkerAdapters(
            lambda: self._pool.workers if self._pool is not None else (), settings.predict_timeout
        )
        self.adapters: Container[str] | None = None
        """Names that a call's `adapter` may have; None: calls are not looked at."""

    async def start(self) -> None:
        """Install the model's requirements, start `min_workers` workers and have them load the handler.

        Raises:
            EngineStartError: the handler cannot be loaded; the message has the cause, with file and line where the
                customer's code is to blame.
        """
        python = await prepare_interpreter(self._settings.model_dir, self._handler)
        pool = Pool(self._worker_plan(python), self._pool_settings(), self._make_lane(), self.adapter_host.introduce)
        await pool.start()
        self._pool = pool

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        """Answer a call through `writer`; returns what cancels it.

        Raises:
            ContractError: the call is malformed, the queue is full, or there is no worker.
        """
        # Reading a long form takes seconds.
        slow = len(call.body) > LONG_BODY and is_form(call.content_type)
        given = await asyncio.to_thread(input_of, call) if slow else input_of(call)
        self._check_adapter(given)
        job = Job(InputMessage(given.properties, given.contents), Delivery(writer), priority_of(given), 0)
        pool = self._running_pool()
        pool.submit(job)
        return _RunningCall(pool, job)

    def _check_adapter(self, given: HandlerInput) -> None:
        """Refuse a call for an adapter that is not registered. Source: contracts/lmi.md section 9.4."""
        if self.adapters is None:
            return
        named = next((value for key, value in given.contents if key == "adapter"), b"").decode("utf-8", "replace")
        if named and named not in self.adapters:
            error = UnknownAdapter(named)
            raise ContractError(unknown_adapter(error), error.message)

    def health(self) -> EngineHealth:
        """Not alive once workers have died or hung more often than `retry_threshold` allows."""
        failed = self._pool.failed if self._pool is not None else "the handler is not loaded"
        return EngineHealth(not failed, failed)

    def status(self) -> PoolStatus:
        """Workers and queue."""
        return self._running_pool().status()

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Have other numbers of workers from now on."""
        self._running_pool().scale(min_workers, max_workers)

    async def stop(self) -> None:
        """End all workers with all that they started; calls that run have a few seconds to finish."""
        if self._pool is not None:
            await self._pool.stop(self.grace)

    def _running_pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("the handler has not been started")
        return self._pool

    def _worker_plan(self, python: str) -> WorkerPlan:
        settings, handler = self._settings, self._handler
        model_dir = os.path.abspath(settings.model_dir)
        return WorkerPlan(
            process=ProcessPlan(python=python, directory=settings.model_dir, environment=variables_of(handler)),
            order=LoadOrder(
                model_dir=model_dir,
                entry_point=handler.entry_point,
                function=handler.function,
                async_mode=handler.async_mode,
                properties=tuple(handler.properties.items()),
                standing_properties=(("model_dir", model_dir),),
            ),
            load_timeout=settings.model_loading_timeout,
        )

    def _pool_settings(self) -> PoolSettings:
        handler = self._handler
        return PoolSettings(
            min_workers=handler.min_workers,
            max_workers=max(handler.min_workers, handler.max_workers),
            queue_size=self._queue_size,
            scale_up_above=2 * _batch_size(self._settings, handler),
            retry_threshold=handler.retry_threshold,
            max_idle_time=handler.max_idle_time,
            overload_status=self._overload_status,
            unavailable_status=self._unavailable_status,
            devices=handler.devices,
            parallel_loading=handler.properties.get("parallel_loading", "").lower() == "true",
        )

    def _make_lane(self) -> MakeLane:
        settings, handler = self._settings, self._handler
        lane_settings = LaneSettings(
            predict_timeout=settings.predict_timeout,
            client_patience=self.client_patience,
            unavailable_status=self._unavailable_status,
            async_mode=handler.async_mode,
            # Calls of an async handler run at once, so that the queue's bound is theirs.
            concurrency=max(self._queue_size, 1) if handler.async_mode else 1,
            batch_size=_batch_size(settings, handler),
            max_batch_delay=settings.max_batch_delay,
            max_rolling_batch_size=settings.rolling_batch_size,
        )
        if handler.async_mode:
            return lambda worker, on_free: SingleLane(worker, lane_settings, on_free)
        if handler.rolling_batch:
            return lambda worker, on_free: RollingLane(worker, lane_settings, on_free)
        if lane_settings.batch_size > 1:
            return lambda worker, on_free: BatchLane(worker, lane_settings, on_free)
        return lambda worker, on_free: SingleLane(worker, lane_settings, on_free)


class _RunningCall:
    """Implements `handlers.reply.Running`."""

    __slots__ = ("_job", "_pool")

    def __init__(self, pool: Pool, job: Job) -> None:
        self._pool, self._job = pool, job

    def cancel(self) -> None:
        """The client has gone. Harmless when the reply is complete."""
        if self._job.delivery.open:
            self._pool.cancel(self._job)


def _batch_size(settings: ModelSettings, handler: HandlerSettings) -> int:
    """Calls that are gathered into one; async and rolling-batch handlers see each call as it comes."""
    if handler.async_mode or handler.rolling_batch:
        return 1
    return min(settings.batch_size, MAX_BATCH)
