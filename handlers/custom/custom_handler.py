"""A customer's `model.py`, run in worker processes, and the adapters that it manages."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Container

from engines.adapters import Adapter
from engines.errors import AdapterError, AdapterFailed, NoRoomForAdapter, UnknownAdapter
from engines.interface import EngineHealth, EngineStartError
from engines.model_settings import ModelSettings
from handlers.contract import LONG_BODY, Call, ContractError, ReplyWriter
from handlers.custom.batching import MAX_BATCH, CallBatcher, CallSettings, Request, RollingBatcher
from handlers.custom.handler_input import input_of, priority_of
from handlers.custom.packages import prepare_interpreter, requirements_dir, variables_of
from handlers.custom.pool import Pool
from handlers.custom.reply import HandlerReply
from handlers.custom.runtime.channel import Kind, LoadOrder, Message
from handlers.custom.worker import LoadedEngine, Worker, WorkerPlan
from handlers.djl_errors import unknown_adapter
from handlers.forms import is_form


class CustomHandler:
    """Implements `Handler` with the workers of one model, on the event loop that runs `start`. `queue_size` calls may
    wait while all workers are busy."""

    def __init__(
        self,
        settings: ModelSettings,
        *,
        queue_size: int,
        overload_status: int,
        unavailable_status: int = 503,
        grace: float = 2.0,
        engine: LoadedEngine | None = None,
    ) -> None:
        """`grace`: seconds that `stop` gives a worker to finish its calls. `engine`: what the handler's calls to an
        engine go to. Raises ValueError if the settings name no handler."""
        if settings.handler is None:
            raise ValueError("the settings name no handler")
        self._settings, self._handler = settings, settings.handler
        # Async and rolling-batch handlers get each request as it comes.
        gathers = not self._handler.async_mode and not self._handler.rolling_batch
        calls = CallSettings(
            queue_size=queue_size,
            overload_status=overload_status,
            unavailable_status=unavailable_status,
            predict_timeout=settings.predict_timeout,
            async_mode=self._handler.async_mode,
            # An async handler runs all calls at once, as many as the queue would hold.
            concurrency=max(queue_size, 1) if self._handler.async_mode else 1,
            batch_size=min(settings.batch_size, MAX_BATCH) if gathers else 1,
            max_batch_delay=settings.max_batch_delay,
            max_rolling_batch_size=settings.rolling_batch_size,
        )
        self._grace, self._engine = grace, engine
        self.adapter_host = WorkerAdapters(lambda: self.pool.serving, settings.predict_timeout)
        rolling = self._handler.rolling_batch and not self._handler.async_mode
        batcher = RollingBatcher if rolling else CallBatcher
        self.pool = Pool(self._handler, calls, batcher, self.adapter_host.introduce)
        self._order = LoadOrder(
            model_dir=os.path.abspath(settings.model_dir),
            entry_point=self._handler.entry_point,
            function=self._handler.function,
            async_mode=self._handler.async_mode,
            properties=dict(self._handler.properties),
        )
        self.adapters: Container[str] | None = None  # Names that a call's `adapter` may have; None: not checked.

    async def start(self) -> None:
        """Install the model's requirements, start `min_workers` workers and have them load the handler.

        Raises EngineStartError: the handler cannot be loaded; the message has the cause, with the file and line of the
        customer's code where that is at fault.
        """
        handler = self._handler
        python = await prepare_interpreter(requirements_dir(self._settings.model_dir, handler), handler)
        timeout = self._settings.model_loading_timeout
        environment, metrics = variables_of(handler), self.pool.metrics
        await self.pool.start(WorkerPlan(python, environment, self._order, timeout, self._engine, metrics))

    async def handle(self, call: Call, writer: ReplyWriter) -> Request:
        # A long form takes seconds to read.
        slow = len(call.body) > LONG_BODY and is_form(call.content_type)
        given = await asyncio.to_thread(input_of, call) if slow else input_of(call)
        name = next((value for key, value in given.contents if key == "adapter"), b"").decode("utf-8", "replace")
        if name and self.adapters is not None and name not in self.adapters:
            error = UnknownAdapter(name)
            raise ContractError(unknown_adapter(error), error.message)
        request = Request(
            Message(properties=given.properties, contents=given.contents), HandlerReply(writer), priority_of(given)
        )
        self.pool.submit(request)
        return request

    def health(self) -> EngineHealth:
        """Not alive once workers have died or hung more often than `retry_threshold` allows."""
        return EngineHealth(not self.pool.failed, self.pool.failed)

    async def stop(self) -> None:
        """End all workers and all that they started; running calls have a few seconds to finish."""
        await self.pool.stop(self._grace)


# Functions of the customer's module.
REGISTER, UPDATE, UNREGISTER = "register_adapter", "update_adapter", "unregister_adapter"
_FAILED, _OUT_OF_MEMORY = 300, 507
_NOTHING_SAID = frozenset({"", "OK", "No content"})  # The default messages of an `Output`.


class WorkerAdapters:
    """Implements `engines.adapters.AdapterHost` with the workers of one model."""

    reads_src = True

    def __init__(self, workers: Callable[[], Collection[Worker]], patience: float) -> None:
        """`workers`: those that take requests. `patience`: seconds that each may take to answer, including the calls
        that it has to finish before."""
        self._workers, self._patience = workers, patience
        self._known: dict[str, Adapter] = {}  # The adapters that a starting worker is told of, by name.
        self._telling = asyncio.Lock()  # One order at a time: no worker starts to take requests in the middle of one.

    async def register(self, adapter: Adapter) -> str:
        return await self._order(REGISTER, adapter)

    async def update(self, adapter: Adapter) -> str:
        return await self._order(UPDATE, adapter)

    async def unregister(self, adapter: Adapter) -> str:
        async with self._telling:
            message = await self._tell_all(UNREGISTER, adapter)
            self._known.pop(adapter.name, None)
        return message

    async def stop(self) -> None: ...

    async def introduce(self, worker: Worker) -> None:
        """Tell a worker that has just started of all adapters. Raises EngineStartError: it has refused one."""
        async with self._telling:
            try:
                for adapter in self._known.values():
                    await self._tell(worker, REGISTER, adapter)
            except AdapterError as error:
                raise EngineStartError(f"{worker.name} did not take the model's adapters: {error.message}") from None

    async def _order(self, function: str, adapter: Adapter) -> str:
        """Tell all workers of an adapter; if one fails, undo what others may have carried out."""
        async with self._telling:
            try:
                message = await self._tell_all(function, adapter)
            except AdapterError:
                undo = [(UNREGISTER, adapter)] if function == REGISTER else []
                if (former := self._known.get(adapter.name)) is not None:
                    undo.append((function, former))
                for undoing, undone in undo:
                    with contextlib.suppress(AdapterError):
                        await self._tell_all(undoing, undone)
                raise
            self._known[adapter.name] = adapter
        return message

    async def _tell_all(self, function: str, adapter: Adapter) -> str:
        """Tell all workers; returns the first message. Raises AdapterError, the first failure."""
        orders = (self._tell(worker, function, adapter) for worker in self._workers())
        answers = await asyncio.gather(*orders, return_exceptions=True)
        said = ""
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            said = said or answer
        return said

    async def _tell(self, worker: Worker, function: str, adapter: Adapter) -> str:
        receiver = _AnswerReceiver()
        call = worker.call(_message(function, adapter), receiver)
        try:
            output = await asyncio.wait_for(receiver.answer, self._patience)
        except TimeoutError:
            worker.cancel(call)
            raise AdapterFailed(
                f"{function} of {worker.name} did not answer within {self._patience:g} seconds (predict_timeout)"
            ) from None
        except _WorkerLost:
            if function == UNREGISTER:  # it has let go of the adapter, too
                return ""
            raise
        said = "" if output.message in _NOTHING_SAID else output.message
        if output.code == _OUT_OF_MEMORY:
            raise NoRoomForAdapter(output.error or said or "out of memory")
        if output.code >= _FAILED:
            raise AdapterFailed(output.error or said or f"{function} answered {output.code}")
        return said


class _AnswerReceiver:
    """Waits for one answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def on_message(self, message: Message) -> None:
        if message.kind is Kind.DONE:
            self._fail(AdapterFailed("the handler's worker ended without an answer"))
        elif message.kind is Kind.OUTPUT and not self.answer.done():
            self.answer.set_result(message)

    def on_lost(self, reason: str) -> None:
        self._fail(_WorkerLost(f"the handler's worker {reason}"))

    def _fail(self, error: AdapterFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _WorkerLost(AdapterFailed):
    """The worker has ended before it answered."""


def _message(function: str, adapter: Adapter) -> Message:
    named = (("name", adapter.name), ("alias", adapter.alias or adapter.name), ("src", adapter.src))
    loaded = (("preload", str(adapter.preload).lower()), ("pin", str(adapter.pin).lower()))
    options = {**dict(named), **dict(loaded), **adapter.options}
    contents = tuple((name, value.encode("utf-8", "replace")) for name, value in options.items())
    return Message(properties=(("handler", function), *named), contents=contents)
