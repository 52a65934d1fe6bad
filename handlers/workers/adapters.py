"""Adapters that a customer's handler looks after: each worker is told of each. Source: contracts/lmi.md section 9.2."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from handlers.adapters import Adapter
from handlers.engines.protocol import EngineStartError
from handlers.errors import AdapterError, AdapterFailed, NoRoomForAdapter
from handlers.workers.runtime.messages import InputMessage, OutputMessage
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")

REGISTER, UPDATE, UNREGISTER = "register_adapter", "update_adapter", "unregister_adapter"
"""Functions of the customer's module."""
_FAILED, _OUT_OF_MEMORY = 300, 507
_NOTHING_SAID = frozenset({"", "OK", "No content"})
"""Messages of an `Output` that nobody wrote."""


class WorkerAdapters:
    """See `handlers.adapters.AdapterHost`."""

    def __init__(self, workers: Callable[[], Collection[Worker]], patience: float) -> None:
        """`workers`: those that take calls. `patience`: seconds that each may take to answer, what it does before
        included."""
        self._workers, self._patience = workers, patience
        self._known: dict[int, Adapter] = {}
        """What a worker that starts is told of."""

    async def register(self, adapter: Adapter) -> str:
        if not await asyncio.to_thread(_exists, adapter):
            raise AdapterFailed(f"src: there is nothing at {adapter.path}")
        former = [known for known in self._known.values() if known.name == adapter.name]
        self._known[adapter.id] = adapter
        try:
            # A worker that is ready only later has been told of it by `introduce`.
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
        """See `AdapterHost.unregister`. A worker that ends instead of answering has let go of it, too."""
        answers = await self._tell_all(UNREGISTER, adapter)
        message = _said([answer for answer in answers if not isinstance(answer, _WorkerLost)])
        self._known.pop(adapter.id, None)
        return message

    async def stop(self) -> None:
        """Nothing goes on in the background."""

    async def introduce(self, worker: Worker) -> None:
        """Tell a worker that has just started of all adapters, those included that come meanwhile.

        Raises:
            EngineStartError: it has refused one.
        """
        told: dict[int, Adapter] = {}
        try:
            while self._known.keys() != told.keys():
                # What has gone first: an adapter that has come since may have its name.
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
        """The answers of all workers, those included that become ready meanwhile: they were told of the adapter."""
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
        """Undo a registration that some workers may have taken, in the place of a former one of its name."""
        orders = [(UNREGISTER, adapter), *((REGISTER, known) for known in former)]
        for function, subject in orders:
            for answer in await self._tell_some(self._workers(), function, subject):
                if isinstance(answer, BaseException):
                    logger.info("adapter %s: %s", subject.name, answer)

    async def _tell(self, worker: Worker, function: str, adapter: Adapter) -> str:
        order = _Order(asyncio.get_running_loop().create_future())
        call = worker.call(_message(function, adapter), order)
        try:
            output = await asyncio.wait_for(order.answer, self._patience)
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


class _Order:
    """Waits for one answer; implements `handlers.workers.worker.Receiver`."""

    def __init__(self, answer: asyncio.Future[OutputMessage]) -> None:
        self.answer = answer

    def on_output(self, output: OutputMessage, size: int) -> None:
        """Called by the worker."""
        if not self.answer.done():
            self.answer.set_result(output)

    def on_chunk(self, chunk: bytes) -> None:
        """Nobody reads a stream here."""

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        """Called by the worker; async mode tells of exceptions so."""
        if failure is not None:
            self.on_output(failure, 0)

    def on_done(self) -> None:
        """Called by the worker."""
        self._fail("ended without an answer")

    def on_lost(self, reason: str) -> None:
        """Called by the worker."""
        self._fail(reason, _WorkerLost)

    def _fail(self, reason: str, kind: type[AdapterFailed] = AdapterFailed) -> None:
        if not self.answer.done():
            self.answer.set_exception(kind(f"the handler's worker {reason}"))


class _WorkerLost(AdapterFailed):
    """The worker has ended before it answered."""


def _said(answers: Collection[str | BaseException]) -> str:
    """What the first worker says; every one has answered before the first failure is raised."""
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
