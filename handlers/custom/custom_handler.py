"""The handler of a model with a customer's `model.py`. Worker processes run the customer's code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container
from importlib.metadata import version

from engines.errors import UnknownAdapter
from engines.interface import EngineHealth
from handlers.contract import EXPLAIN, LONG_BODY, Call, ContractError, ReplyWriter
from handlers.custom.batching.dynamic import DynamicBatcher
from handlers.custom.batching.format import MAX_BATCH
from handlers.custom.batching.rolling import RollingBatcher
from handlers.custom.engine_call import EngineLoader, Origin
from handlers.custom.handler_input import input_of, priority_of
from handlers.custom.handler_reply import HandlerReply
from handlers.custom.request import CallLimits, Request
from handlers.custom.requirements import environment_variables, prepare_interpreter, requirements_dir
from handlers.custom.worker import WorkerPlan
from handlers.custom.worker_adapters import WorkerAdapterHost
from handlers.custom.worker_pool import WorkerPool
from handlers.custom.worker_process.socket_protocol import LoadRequest, Message
from handlers.deadline import HEADER as DEADLINE
from handlers.djl_errors import unknown_adapter
from handlers.explanation import Explained
from handlers.model_config import ModelConfig
from handlers.parsing.forms import is_form


class CustomHandler:
    """Implements `Handler`: the workers of one model answer the calls.

    All methods must run on one event loop.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        queue_size: int,
        overload_status: int,
        unavailable_status: int = 503,
        grace: float = 2.0,
        load_engine: EngineLoader | None = None,
    ) -> None:
        """Prepare the workers without starting them.

        Args:
            config: The model's settings, with a handler.
            queue_size: The number of calls that may wait while all workers are busy.
            overload_status: The status of calls that are refused because the queue is full.
            unavailable_status: The status of calls that fail because a worker has ended or hangs.
            grace: The number of seconds that `stop` gives a worker to finish its calls.
            load_engine: Returns the engine's handler, which answers calls of the customer's handler.

        Raises:
            ValueError: The settings name no handler.
        """
        if config.handler is None:
            raise ValueError("the settings name no handler")
        self._config, self._handler_config = config, config.handler
        # Async handlers and handlers with a rolling batch get each request immediately.
        uses_batches = not self._handler_config.async_mode and not self._handler_config.rolling_batch
        limits = CallLimits(
            queue_size=queue_size,
            overload_status=overload_status,
            unavailable_status=unavailable_status,
            predict_timeout=config.predict_timeout,
            async_mode=self._handler_config.async_mode,
            # An async handler runs up to `queue_size` calls at the same time.
            concurrency=max(queue_size, 1) if self._handler_config.async_mode else 1,
            batch_size=min(config.batch_size, MAX_BATCH) if uses_batches else 1,
            max_batch_delay=config.max_batch_delay,
            max_rolling_batch_size=config.rolling_batch_size,
        )
        self._grace, self._load_engine = grace, load_engine
        self.adapter_host = WorkerAdapterHost(lambda: self.pool.serving, config.predict_timeout)
        rolling = self._handler_config.rolling_batch and not self._handler_config.async_mode
        batcher = RollingBatcher if rolling else DynamicBatcher
        self.pool = WorkerPool(self._handler_config, limits, batcher, self.adapter_host.register_all)
        self._load_request = LoadRequest(
            model_dir=os.path.abspath(config.model_dir),
            entry_point=self._handler_config.entry_point,
            function=self._handler_config.function,
            async_mode=self._handler_config.async_mode,
            properties=dict(self._handler_config.properties),
            model_name=config.name,
            server_version=version("slipway"),
            sets_python_path="PYTHONPATH" not in self._handler_config.environment,
        )
        self.adapters: Container[str] | None = None  # Allowed values of a call's `adapter`. None allows all.

    async def start(self) -> None:
        """Install the model's requirements, start `min_workers` workers and load the handler in them.

        Raises:
            EngineStartError: The handler cannot be loaded. The message has the cause. If the customer's code failed,
                the message also has the file and the line.
        """
        handler_config = self._handler_config
        python = await prepare_interpreter(requirements_dir(self._config.model_dir, handler_config), handler_config)
        timeout = self._config.model_loading_timeout
        environment, metrics = environment_variables(handler_config, python), self.pool.metrics
        await self.pool.start(WorkerPlan(python, environment, self._load_request, timeout, self._load_engine, metrics))

    async def handle(self, call: Call, writer: ReplyWriter) -> Request:
        # Only the headers count: the customer may use the attributes `deadline` and `explain` for something else.
        if call.steering_fault is not None and call.time_limit is None and DEADLINE in call.headers:
            raise call.steering_fault
        if call.explanation is not None and EXPLAIN in call.headers:
            if call.steering_fault is not None:
                raise call.steering_fault
            handler = f"{os.path.basename(self._handler_config.entry_point)}, function {self._handler_config.function}"
            call.explanation.because.append(f"the model's own handler takes every body: {handler}")
            raise Explained
        # A long form takes seconds to read, so a thread reads it.
        slow = len(call.body) > LONG_BODY and is_form(call.content_type)
        given = await asyncio.to_thread(input_of, call) if slow else input_of(call)
        name = next((value for key, value in given.contents if key == "adapter"), b"").decode("utf-8", "replace")
        if name and self.adapters is not None and name not in self.adapters:
            error = UnknownAdapter(name)
            raise ContractError(unknown_adapter(error), error.message)
        request = Request(
            Message(properties=given.properties, headers=given.headers, contents=given.contents),
            HandlerReply(writer),
            call.request_id,
            priority_of(given),
            Origin(call.key_salt, call.arrived_at, call.time_limit),
        )
        self.pool.submit(request)
        return request

    def health(self) -> EngineHealth:
        """Return the health. The model is dead after more than `retry_threshold` crashes, hangs and failed restarts."""
        return EngineHealth(not self.pool.failed, self.pool.failed)

    async def stop(self) -> None:
        """End all workers and the processes that they started. Running calls have `grace` seconds to finish."""
        await self.pool.stop(self._grace)
