"""Manages a custom handler's LoRA adapters: makes each worker's handler load, update or remove adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from engines.adapters import Adapter
from engines.errors import AdapterError, AdapterFailed, NoRoomForAdapter
from engines.interface import EngineStartError
from handlers.custom.worker import Worker
from handlers.custom.worker_process.socket_protocol import Message, MessageKind

logger = logging.getLogger(__name__)

# The names of functions in the customer's module.
REGISTER, UPDATE, UNREGISTER = "register_adapter", "update_adapter", "unregister_adapter"
_FAILED, _OUT_OF_MEMORY = 300, 507  # The lowest code of a failure, and the code for lack of memory.
_DEFAULT_MESSAGES = frozenset({"", "OK", "No content"})  # The default messages of an `Output`.


class WorkerAdapterHost:
    """Implements `engines.adapters.AdapterHost` with the workers of one model."""

    reads_src = True

    def __init__(self, workers: Callable[[], Collection[Worker]], patience: float) -> None:
        """Create the host.

        Args:
            workers: Returns the workers that take requests.
            patience: The time limit for a worker's answer, in seconds. It includes the time for the worker's earlier
                calls.
        """
        self._workers, self._patience = workers, patience
        self._known: dict[str, Adapter] = {}  # The adapters that each new worker must register, keyed by name.
        # This lock is held during each change, so that no new worker starts to take requests in the middle of a change.
        self._changing = asyncio.Lock()

    async def register(self, adapter: Adapter) -> str:
        return await self._change(REGISTER, adapter)

    async def update(self, adapter: Adapter) -> str:
        return await self._change(UPDATE, adapter)

    async def unregister(self, adapter: Adapter) -> str:
        return await self._change(UNREGISTER, adapter)

    async def stop(self) -> None: ...

    async def register_all(self, worker: Worker) -> None:
        """Register all adapters in a worker that has just started.

        Raises:
            EngineStartError: The handler refused an adapter.
        """
        async with self._changing:
            try:
                for adapter in self._known.values():
                    await self._call(worker, REGISTER, adapter)
            except AdapterError as error:
                raise EngineStartError(f"{worker.name} cannot register the model's adapters: {error.message}") from None

    async def _change(self, function: str, adapter: Adapter) -> str:
        """Call the function in all workers. If a worker fails, undo the change."""
        async with self._changing:
            workers = list(self._workers())
            answers = await self._call_all(function, adapter, workers)
            refusals = [answer for answer in answers if isinstance(answer, BaseException)]
            if refusals:
                undo = [(UNREGISTER, adapter)] if function == REGISTER else []
                if (former := self._known.get(adapter.name)) is not None:
                    undo.append((REGISTER if function == UNREGISTER else function, former))
                if function == UNREGISTER:  # A worker that refused still has the adapter, so it needs no undo.
                    agreed = zip(workers, answers, strict=True)
                    workers = [worker for worker, answer in agreed if isinstance(answer, str)]
                for undoing, undone in undo:
                    for answer in await self._call_all(undoing, undone, workers):
                        if isinstance(answer, BaseException):
                            logger.error("adapter %s: a change cannot be undone: %s", adapter.name, answer)
                raise refusals[0]
            if function == UNREGISTER:
                self._known.pop(adapter.name, None)
            else:
                self._known[adapter.name] = adapter
        return next((str(answer) for answer in answers if answer), "")

    async def _call_all(
        self, function: str, adapter: Adapter, workers: Iterable[Worker]
    ) -> Sequence[str | BaseException]:
        """Call the function in several workers, and return the message or the error of each."""
        calls = (self._call(worker, function, adapter) for worker in workers)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, worker: Worker, function: str, adapter: Adapter) -> str:
        receiver = _SingleAnswer()
        call = worker.call(_message(function, adapter), receiver)
        try:
            async with asyncio.timeout(self._patience):
                output = await receiver.answer
        except TimeoutError:
            worker.cancel(call)
            raise AdapterFailed(
                f"{function} of {worker.name} did not answer within {self._patience:g} seconds (predict_timeout)"
            ) from None
        except _WorkerLost:
            if function == UNREGISTER:  # The adapter is gone with the worker.
                return ""
            raise
        message = "" if output.message in _DEFAULT_MESSAGES else output.message
        if output.code == _OUT_OF_MEMORY:
            raise NoRoomForAdapter(output.error or message or "out of memory")
        if output.code >= _FAILED:
            raise AdapterFailed(output.error or message or f"{function} answered {output.code}")
        return message


class _SingleAnswer:
    """Implements `AnswerReceiver` for a call with exactly one output."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def on_message(self, message: Message) -> None:
        if message.kind is MessageKind.DONE:
            self._fail(AdapterFailed("the handler's worker ended without an answer"))
        elif message.kind is MessageKind.OUTPUT and not self.answer.done():
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
