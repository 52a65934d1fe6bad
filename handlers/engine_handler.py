"""From a call to an engine and back: each call goes to the engine at once, which batches by itself."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from handlers.contracts.protocol import LONG_BODY, Call, Contract, ContractError, Exchange
from handlers.delivery import Delivery
from handlers.engines.protocol import Engine
from handlers.errors import InvalidRequest, Overloaded, RequestError
from handlers.formatter_thread import FormatterThread
from handlers.reply import ReplyWriter, Running

logger = logging.getLogger(__name__)


class EngineHandler:
    """Serves one model through one engine.

    At most `limit` sequences are in the engine at a time, running or waiting; further calls are refused at once.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        self.engine = engine
        self.limit = limit
        self.open_sequences = 0
        self._running: dict[str, Delivery] = {}

    async def handle(
        self,
        contract: Contract,
        call: Call,
        writer: ReplyWriter,
        thread: FormatterThread | None = None,
        long_body: int = LONG_BODY,
    ) -> Running:
        """Answer a call through `writer`; returns what cancels it.

        `thread`: where the contract runs, if it is one that may block; others understand a body of `long_body` bytes
        and more in a thread.

        Raises:
            ContractError: the call was refused before inference; the error holds the reply.
        """
        exchange = await self._understood(contract, call, thread, long_body)
        for note in exchange.notes:
            logger.info("%s", note, extra={"request_id": call.request_id})
        delivery = Delivery(self, exchange, writer, thread, call.request_id)
        self._running[call.request_id] = delivery
        try:
            await delivery.submit()
        except RequestError as error:
            if delivery.begun:  # with what an earlier prompt of this call has made
                delivery.fail(error)
            if delivery.answered:  # now, or before that, as an earlier prompt has failed
                return delivery
            delivery.cancel()
            self.engine.meter.calls.count(0.0, failed=True)
            raise ContractError(exchange.answer.fail(error), error.message) from None
        except BaseException:
            delivery.cancel()
            raise
        return delivery

    async def _understood(
        self, contract: Contract, call: Call, thread: FormatterThread | None, long_body: int
    ) -> Exchange:
        if thread is None:
            return contract.parse(call) if len(call.body) < long_body else await asyncio.to_thread(contract.parse, call)
        try:
            return await thread.run(partial(contract.parse, call))
        except RequestError as error:
            raise ContractError(contract.refusal(error), error.message) from None

    def abort(self, request_id: str) -> None:
        """End the call with this id, if it is running: its client gets what there is of the answer, as aborted."""
        if (delivery := self._running.get(request_id)) is not None:
            delivery.abort()

    def forget(self, request_id: str, delivery: Delivery) -> None:
        """The call has ended."""
        if self._running.get(request_id) is delivery:  # ids are the clients', who may use one twice
            del self._running[request_id]

    def admit(self, sequences: int) -> None:
        """Take places for a call.

        Raises:
            InvalidRequest: the call would never fit.
            Overloaded: there are not enough now.
        """
        if sequences > self.limit:
            raise InvalidRequest(f"the request asks for {sequences} sequences; at most {self.limit} can be served")
        if self.open_sequences + sequences > self.limit:
            raise Overloaded(
                f"the queue is full: {self.open_sequences} of {self.limit} places are taken; try again later"
            )
        self.open_sequences += sequences


class ContractHandler:
    """One contract on one engine; see `handlers.reply.Handler`."""

    def __init__(
        self,
        handler: EngineHandler,
        contract: Contract,
        thread: FormatterThread | None = None,
        long_body: int = LONG_BODY,
    ) -> None:
        self._handler, self._contract, self._thread, self._long_body = handler, contract, thread, long_body

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        """See `Handler.handle`."""
        return await self._handler.handle(self._contract, call, writer, self._thread, self._long_body)
