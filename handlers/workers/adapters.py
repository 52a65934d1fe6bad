"""Adapters that a customer's handler manages: each worker is told of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from handlers.adapters import Adapter
from handlers.engines.protocol import EngineStartError
from handlers.errors import AdapterError, AdapterFailed, NoRoomForAdapter
from handlers.workers.runtime.channel import InputMessage, OutputMessage
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")

REGISTER, UPDATE, UNREGISTER = "register_adapter", "update_adapter", "unregister_adapter"
"""Functions of the customer's module."""
_FAILED, _OUT_OF_MEMORY = 300, 507
_NOTHING_SAID = frozenset({"", "OK", "No content"})
"""The default messages of an `Output`."""


class WorkerAdapters:
    """Implements `handlers.adapters.AdapterHost` with the workers of one model."""

    def __init__(self, workers: Callable[[], Collection[Worker]], patience: float) -> None:
        """`workers`: those that take requests. `patience`: seconds that each may take to answer, including the calls
        that it has to finish before."""
        self._workers, self._patience = workers, patience
        self._known: dict[int, Adapter] = {}
        """The adapters that a starting worker is told of, by id."""

    async def register(self, adapter: Adapter) -> str:
        if not await asyncio.to_thread(_exists, adapter):
            raise AdapterFailed(f"src: there is nothing at {adapter.path}")
        former = [known for known in self._known.values() if known.name == adapter.name]
        self._known[adapter.id] = adapter
        try:
            # Workers that are not ready yet hear of it from `introduce`.
            message = _said(await self._tell_some(self._workers(), REGISTER, adapter))
        except asyncio.CancelledError:  # the workers are about to end
            del self._known[adapter.id]
            raise
        except BaseException:
            del self._known[adapter.id]
            await self._take_back(adapter, former)
            raise
        for known in former:
            self._known.pop(known.id, None)
        return message

    async def update(self, adapter: Adapter) -> str:
        message = _said(await self._tell_all(UPDATE, adapter))
        self._known[adapter.id] = adapter
        return message

    async def unregister(self, adapter: Adapter) -> str:
        answers = await self._tell_all(UNREGISTER, adapter)
        # A worker that ends instead of answering has let go of the adapter, too.
        message = _said([answer for answer in answers if not isinstance(answer, _WorkerLost)])
        self._known.pop(adapter.id, None)
        return message

    async def stop(self) -> None:
        """Do nothing: there is no background work."""

    async def introduce(self, worker: Worker) -> None:
        """Tell a worker that has just started of all adapters, also of those that come meanwhile.

        Raises:
            EngineStartError: it has refused one.
        """
        told: dict[int, Adapter] = {}
        try:
            while self._known.keys() != told.keys():
                # Removals first: a newer adapter may have the same name.
                for adapter in [adapter for id_, adapter in told.items() if id_ not in self._known]:
                    await self._tell(worker, UNREGISTER, adapter)
                    del told[adapter.id]
                for adapter in [adapter for id_, adapter in self._known.items() if id_ not in told]:
                    await self._tell(worker, REGISTER, adapter)
                    told[adapter.id] = adapter
        except AdapterError as error:
            await worker.kill("was ended because it did not take an adapter")
            raise EngineStartError(f"{worker.name} did not take the model's adapters: {error.message}") from None

    async def _tell_all(self, function: str, adapter: Adapter) -> list[str | BaseException]:
        """The answers of all workers, also of those that become ready meanwhile."""
        told: set[Worker] = set()
        answers: list[str | BaseException] = []
        while late := [worker for worker in self._workers() if worker not in told]:
            told.update(late)
            answers += await self._tell_some(late, function, adapter)
        return answers

    async def _tell_some(
        self, workers: Collection[Worker], function: str, adapter: Adapter
    ) -> list[str | BaseException]:
        return await asyncio.gather(
            *(self._tell(worker, function, adapter) for worker in workers), return_exceptions=True
        )

    async def _take_back(self, adapter: Adapter, former: Collection[Adapter]) -> None:
        """Undo a registration that some workers may have carried out, and restore the former adapter of its name."""
        orders = [(UNREGISTER, adapter), *((REGISTER, known) for known in former)]
        for function, subject in orders:
            for answer in await self._tell_some(self._workers(), function, subject):
                if isinstance(answer, BaseException):
                    logger.info("adapter %s: %s", subject.name, answer)

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
        said = "" if output.message in _NOTHING_SAID else output.message
        if output.code == _OUT_OF_MEMORY:
            raise NoRoomForAdapter(output.error or said or "out of memory")
        if output.code >= _FAILED:
            raise AdapterFailed(output.error or said or f"{function} answered {output.code}")
        return said


class _AnswerReceiver:
    """Waits for one answer; implements `handlers.workers.worker.Receiver`."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[OutputMessage] = asyncio.get_running_loop().create_future()

    def on_output(self, output: OutputMessage, size: int) -> None:
        if not self.answer.done():
            self.answer.set_result(output)

    def on_chunk(self, chunk: bytes) -> None:
        """Ignore the stream: the output before it is the answer."""

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        if failure is not None:  # an exception in async mode
            self.on_output(failure, 0)

    def on_done(self) -> None:
        self._fail(AdapterFailed("the handler's worker ended without an answer"))

    def on_lost(self, reason: str) -> None:
        self._fail(_WorkerLost(f"the handler's worker {reason}"))

    def _fail(self, error: AdapterFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _WorkerLost(AdapterFailed):
    """The worker has ended before it answered."""


def _said(answers: Collection[str | BaseException]) -> str:
    """The first message.

    Raises:
        BaseException: the first failure.
    """
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return next((answer for answer in answers if isinstance(answer, str) and answer), "")


def _message(function: str, adapter: Adapter) -> InputMessage:
    named = (("name", adapter.name), ("alias", adapter.alias or adapter.name), ("src", str(adapter.path)))
    loaded = (("preload", str(adapter.preload).lower()), ("pin", str(adapter.pin).lower()))
    options = {**dict(named), **dict(loaded), **adapter.options}
    contents = tuple((name, value.encode("utf-8", "replace")) for name, value in options.items())
    return InputMessage((("handler", function), *named), contents)


def _exists(adapter: Adapter) -> bool:
    try:
        return bool(adapter.src) and adapter.path.exists()
    except OSError:
        return False
