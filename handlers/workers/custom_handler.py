"""A customer's `model.py`, run in worker processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container

from handlers.contracts.lmi.body import HandlerInput, input_of, is_form, priority_of
from handlers.contracts.lmi.errors import unknown_adapter
from handlers.contracts.protocol import LONG_BODY, Call, ContractError, ReplyWriter
from handlers.engines.protocol import EngineHealth
from handlers.errors import UnknownAdapter
from handlers.model_settings import ModelSettings
from handlers.workers.adapters import WorkerAdapters
from handlers.workers.batching import MAX_BATCH, CallBatcher, CallSettings, Request
from handlers.workers.engine_calls import LoadedEngine
from handlers.workers.packages import prepare_interpreter, requirements_dir, variables_of
from handlers.workers.pool import Pool, PoolStatus
from handlers.workers.reply import HandlerReply
from handlers.workers.rolling_batch import RollingBatcher
from handlers.workers.runtime.channel import InputMessage, LoadOrder
from handlers.workers.worker import WorkerPlan


class CustomHandler:
    """Implements `Handler` with the workers of one model, on the event loop that runs `start`.

    `queue_size` calls may wait while all workers are busy.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        queue_size: int,
        overload_status: int,
        unavailable_status: int = 503,
        grace: float = 5.0,
        client_patience: float = 120.0,
        engine: LoadedEngine | None = None,
    ) -> None:
        """`grace`: seconds that `stop` gives a worker to finish its calls. `client_patience`: seconds that a client may
        take nothing of its stream before its call is cancelled. `engine`: what the handler's calls to an engine go to.

        Raises ValueError if the settings name no handler."""
        if settings.handler is None:
            raise ValueError("the settings name no handler")
        self._settings, self._handler = settings, settings.handler
        # Async and rolling-batch handlers get each request as it comes.
        gathers = not self._handler.async_mode and not self._handler.rolling_batch
        self._calls = CallSettings(
            queue_size=queue_size,
            overload_status=overload_status,
            unavailable_status=unavailable_status,
            predict_timeout=settings.predict_timeout,
            client_patience=client_patience,
            async_mode=self._handler.async_mode,
            # An async handler runs all calls at once, as many as the queue would hold.
            concurrency=max(queue_size, 1) if self._handler.async_mode else 1,
            batch_size=min(settings.batch_size, MAX_BATCH) if gathers else 1,
            max_batch_delay=settings.max_batch_delay,
            max_rolling_batch_size=settings.rolling_batch_size,
        )
        self._grace, self._engine = grace, engine
        self._pool: Pool | None = None
        self.adapter_host = WorkerAdapters(
            lambda: self._pool.workers if self._pool is not None else (), settings.predict_timeout
        )
        self.adapters: Container[str] | None = None
        """Names that a call's `adapter` may have; None: not checked."""

    async def start(self) -> None:
        """Install the model's requirements, start `min_workers` workers and have them load the handler.

        Raises:
            EngineStartError: the handler cannot be loaded; the message has the cause, with the file and line of the
                customer's code where that is at fault.
        """
        directory = requirements_dir(self._settings.model_dir, self._handler)
        python = await prepare_interpreter(directory, self._handler)
        rolling = self._handler.rolling_batch and not self._handler.async_mode
        batcher = RollingBatcher if rolling else CallBatcher
        pool = Pool(self._worker_plan(python), self._handler, self._calls, batcher, self.adapter_host.introduce)
        await pool.start()
        self._pool = pool

    async def handle(self, call: Call, writer: ReplyWriter) -> Request:
        # A long form takes seconds to read.
        slow = len(call.body) > LONG_BODY and is_form(call.content_type)
        given = await asyncio.to_thread(input_of, call) if slow else input_of(call)
        self._check_adapter(given)
        request = Request(InputMessage(given.properties, given.contents), HandlerReply(writer), priority_of(given))
        self._running_pool().submit(request)
        return request

    def _check_adapter(self, given: HandlerInput) -> None:
        """Refuse a call for an adapter that is not registered."""
        if self.adapters is None:
            return
        name = next((value for key, value in given.contents if key == "adapter"), b"").decode("utf-8", "replace")
        if name and name not in self.adapters:
            error = UnknownAdapter(name)
            raise ContractError(unknown_adapter(error), error.message)

    def health(self) -> EngineHealth:
        """Not alive once workers have died or hung more often than `retry_threshold` allows."""
        failed = self._pool.failed if self._pool is not None else "the handler is not loaded"
        return EngineHealth(not failed, failed)

    def status(self) -> PoolStatus:
        """The state of the workers and of the queue."""
        return self._running_pool().status()

    def scale(self, min_workers: int, max_workers: int) -> None:
        """Change the numbers of workers."""
        self._running_pool().scale(min_workers, max_workers)

    async def stop(self) -> None:
        """End all workers and all that they started; running calls have a few seconds to finish."""
        if self._pool is not None:
            await self._pool.stop(self._grace)

    def _running_pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("the handler has not been started")
        return self._pool

    def _worker_plan(self, python: str) -> WorkerPlan:
        handler = self._handler
        return WorkerPlan(
            python=python,
            environment=variables_of(handler),
            order=LoadOrder(
                model_dir=os.path.abspath(self._settings.model_dir),
                entry_point=handler.entry_point,
                function=handler.function,
                async_mode=handler.async_mode,
                properties=dict(handler.properties),
            ),
            load_timeout=self._settings.model_loading_timeout,
            engine=self._engine,
        )
