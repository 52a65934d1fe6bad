"""Adapters that a customer's handler manages: each worker is told of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from handlers.adapters import Adapter
from handlers.engines.protocol import EngineStartError
from handlers.errors import AdapterError, AdapterFailed, NoRoomForAdapter
from handlers.workers.runtime.channel import InputMessage, OutputMessage
from handlers.workers.worker import Receiver, Worker

logger = logging.getLogger("handlers.workers")

REGISTER, UPDATE, UNREGISTER = "register_adapter", "update_adapter", "unregister_adapter"
"""Functions of the customer's module."""
_FAILED, _OUT_OF_MEMORY = 300, 507
_NOTHING_SAID = frozenset({"", "OK", "No content"})
"""The default messages of an `Output`."""


class WorkerAdapters:
    """Implements `handlers.adapters.AdapterHost` with the workers of one model."""

    reads_src = True

    def __init__(self, workers: Callable[[], Collection[Worker]], patience: float) -> None:
        """`workers`: those that take requests. `patience`: seconds that each may take to answer, including the calls
        that it has to finish before."""
        self._workers, self._patience = workers, patience
        self._known: dict[str, Adapter] = {}
        """The adapters that a starting worker is told of, by name."""
        self._telling = asyncio.Lock()
        """One order at a time: no worker starts to take requests in the middle of one."""

    async def register(self, adapter: Adapter) -> str:
        async with self._telling:
            try:
                message = await self._tell_all(REGISTER, adapter)
            except AdapterError:
                former = self._known.get(adapter.name)
                await self._take_back((UNREGISTER, adapter), *([(REGISTER, former)] if former is not None else []))
                raise
            self._known[adapter.name] = adapter
        return message

    async def update(self, adapter: Adapter) -> str:
        async with self._telling:
            try:
                message = await self._tell_all(UPDATE, adapter)
            except AdapterError:
                await self._take_back((UPDATE, self._known[adapter.name]))
                raise
            self._known[adapter.name] = adapter
        return message

    async def unregister(self, adapter: Adapter) -> str:
        async with self._telling:
            message = await self._tell_all(UNREGISTER, adapter)
            self._known.pop(adapter.name, None)
        return message

    async def stop(self) -> None:
        """Do nothing: there is no background work."""

    async def introduce(self, worker: Worker) -> None:
        """Tell a worker that has just started of all adapters.

        Raises:
            EngineStartError: it has refused one.
        """
        async with self._telling:
            try:
                for adapter in self._known.values():
                    await self._tell(worker, REGISTER, adapter)
            except AdapterError as error:
                raise EngineStartError(f"{worker.name} did not take the model's adapters: {error.message}") from None

    async def _tell_all(self, function: str, adapter: Adapter) -> str:
        """Tell all workers; returns the first message.

        Raises:
            AdapterError: the first failure.
        """
        orders = (self._tell(worker, function, adapter) for worker in self._workers())
        answers = await asyncio.gather(*orders, return_exceptions=True)
        said = ""
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            said = said or answer
        return said

    async def _take_back(self, *orders: tuple[str, Adapter]) -> None:
        """Undo with these orders what some workers may have carried out."""
        for function, adapter in orders:
            try:
                await self._tell_all(function, adapter)
            except AdapterError as error:
                logger.info("adapter %s: %s", adapter.name, error)

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


class _AnswerReceiver(Receiver):
    """Waits for one answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[OutputMessage] = asyncio.get_running_loop().create_future()

    def on_output(self, output: OutputMessage, size: int) -> None:
        if not self.answer.done():
            self.answer.set_result(output)

    def on_done(self) -> None:
        self._fail(AdapterFailed("the handler's worker ended without an answer"))

    def on_lost(self, reason: str) -> None:
        self._fail(_WorkerLost(f"the handler's worker {reason}"))

    def _fail(self, error: AdapterFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _WorkerLost(AdapterFailed):
    """The worker has ended before it answered."""


def _message(function: str, adapter: Adapter) -> InputMessage:
    named = (("name", adapter.name), ("alias", adapter.alias or adapter.name), ("src", adapter.src))
    loaded = (("preload", str(adapter.preload).lower()), ("pin", str(adapter.pin).lower()))
    options = {**dict(named), **dict(loaded), **adapter.options}
    contents = tuple((name, value.encode("utf-8", "replace")) for name, value in options.items())
    return InputMessage((("handler", function), *named), contents)
