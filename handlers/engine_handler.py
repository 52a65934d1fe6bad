"""The handler that passes each call to an engine at once. The engine batches the calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from engines.errors import DeadlineExceeded, Overloaded, RequestError
from handlers.contract import LONG_BODY, Call, Contract, ContractError, Exchange, Reply, ReplyWriter, ended_at_deadline
from handlers.explanation import explaining, prepare
from handlers.formatter_thread import FormatterThread
from handlers.parsing.images import ImageLoader
from handlers.queue import EngineQueue
from handlers.running_call import RunningCall

logger = logging.getLogger(__name__)


class EngineHandler:
    """Implements `Handler` for one contract on one engine."""

    def __init__(
        self,
        queue: EngineQueue,
        contract: Contract,
        refuse_unread: Callable[[Overloaded], Reply] | None = None,
        images: ImageLoader | None = None,
        thread: FormatterThread | None = None,
    ) -> None:
        """Create the handler.

        Args:
            queue: The engine's queue.
            contract: Parses the calls.
            refuse_unread: Makes the reply to a call that is refused before its body is parsed, because the queue is
                full. None if the format of a refusal depends on the body.
            images: Loads the images of the calls. None if the model takes text only.
            thread: Runs the contract and the answer, because they call formatters, which may block. None if the
                contract calls no formatters.
        """
        self._queue, self._contract, self._refuse_unread = queue, contract, refuse_unread
        self._images, self._thread = images, thread

    async def handle(self, call: Call, writer: ReplyWriter) -> RunningCall:
        queue = self._queue if call.explanation is None else explaining(self._queue, call)
        if self._refuse_unread is not None:
            try:
                queue.refuse_if_full()
            except Overloaded as full:
                raise ContractError(self._refuse_unread(full), full.message) from None
        if self._thread is not None:
            exchange = await self._thread.read(call, partial(self._contract.parse, call), queue)
        elif len(call.body) < LONG_BODY:
            exchange = self._contract.parse(call)
        else:
            exchange = await asyncio.to_thread(self._contract.parse, call)
        if call.explanation is not None:
            call.explanation.ignored += exchange.notes
            call.explanation.once |= self._thread is not None or bool(exchange.images)
        else:
            for note in exchange.notes:
                logger.info("%s", note, extra={"request_id": call.request_id})
        if call.steering_fault is not None:
            raise _refusal(queue, exchange, call.steering_fault)
        try:
            if not exchange.images:
                if call.explanation is not None:
                    await prepare(queue, exchange, call)
                running = RunningCall(queue, exchange, writer, call, self._thread)
                await running.submit()
                return running
            assert self._images is not None, "no contract has images for a model of text"
            deadline = queue.deadline_of(exchange, call)
            async with contextlib.AsyncExitStack() as stack:
                loading = stack.enter_async_context(self._images.load(exchange.images))
                images = await (loading if deadline is None else deadline.limit(loading))
                requests = [msgspec.structs.replace(request, images=images) for request in exchange.requests]
                shown = replace(exchange, requests=tuple(requests), images=())
                if call.explanation is not None:
                    await prepare(queue, shown, call)
                running = RunningCall(queue, shown, writer, call, self._thread)
                await running.submit()
                return running
        except RequestError as error:
            if isinstance(error, Overloaded):  # an engine that raises it does not know this status
                error = Overloaded(error.message, queue.overload_status)
            if isinstance(error, DeadlineExceeded):  # the deadline passed while images were loaded
                queue.count_deadline(call.request_id, begun=False)
            raise _refusal(queue, exchange, error) from None


def _refusal(queue: EngineQueue, exchange: Exchange, error: RequestError) -> ContractError:
    queue.statistics.calls.count(0.0, failed=True)
    reply = exchange.answer.fail(error)
    return ContractError(ended_at_deadline(reply) if isinstance(error, DeadlineExceeded) else reply, error.message)
