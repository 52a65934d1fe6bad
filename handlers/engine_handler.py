"""From a call to an engine and back: each call goes to the engine at once, which batches by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial

from handlers.contracts.protocol import LONG_BODY, Call, Contract, ContractError, Exchange, Reply
from handlers.engines.protocol import Engine, Generation
from handlers.errors import GenerationFailed, InvalidRequest, Overloaded, RequestError
from handlers.formatter_thread import FormatterThread
from handlers.reply import ReplyWriter, Running
from handlers.request import FinishReason, TokenDelta

logger = logging.getLogger(__name__)

_FORMATTED_PER_JOB = 16
"""Deltas; other requests' formatters have their turn after so many."""
_SUBMITS_PER_TURN = 16
"""After so many prompts of one call others get their turn on the event loop."""


class EngineHandler:
    """Serves one model through one engine.

    At most `limit` sequences are in the engine at a time, running or waiting; further calls are refused at once.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        self.engine = engine
        self.limit = limit
        self.open_sequences = 0
        self._running: dict[str, _Delivery] = {}

    async def handle(
        self, contract: Contract, call: Call, writer: ReplyWriter, thread: FormatterThread | None = None
    ) -> Running:
        """Answer a call through `writer`; returns what cancels it.

        `thread`: where the contract runs, if it is one that may block.

        Raises:
            ContractError: the call was refused before inference; the error holds the reply.
        """
        exchange = await self._understood(contract, call, thread)
        for note in exchange.notes:
            logger.info("%s", note, extra={"request_id": call.request_id})
        delivery = _Delivery(self, exchange, writer, thread, call.request_id)
        self._running[call.request_id] = delivery
        try:
            await delivery.submit()
        except RequestError as error:
            if delivery.answered:  # by an earlier prompt of this call, which has failed already
                return delivery
            delivery.cancel()
            self.engine.meter.calls.count(0.0, failed=True)
            raise ContractError(exchange.answer.fail(error), error.message) from None
        except BaseException:
            delivery.cancel()
            raise
        return delivery

    async def _understood(self, contract: Contract, call: Call, thread: FormatterThread | None) -> Exchange:
        if thread is None:
            return contract.parse(call) if len(call.body) < LONG_BODY else await asyncio.to_thread(contract.parse, call)
        try:
            return await thread.run(partial(contract.parse, call))
        except RequestError as error:
            raise ContractError(contract.refusal(error), error.message) from None

    def abort(self, request_id: str) -> None:
        """End the call with this id, if it is running: its client gets what there is of the answer, as aborted."""
        if (delivery := self._running.get(request_id)) is not None:
            delivery.abort()

    def forget(self, request_id: str, delivery: _Delivery) -> None:
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

    def __init__(self, handler: EngineHandler, contract: Contract, thread: FormatterThread | None = None) -> None:
        self._handler, self._contract, self._thread = handler, contract, thread

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        """See `Handler.handle`."""
        return await self._handler.handle(self._contract, call, writer, self._thread)


_Formatted = tuple[list[tuple[int, TokenDelta, bytes]], BaseException | None]
"""What became of some deltas, up to an error."""


class _Delivery:
    """One call on its way: passes deltas to the answer, and the answer's bytes to the writer."""

    __slots__ = (
        *("_aborted", "_answer", "_begun_at", "_closed", "_exchange", "_generations", "_handler", "_held", "_open"),
        *("_formatting", "_prompts", "_request_id", "_started", "_thread", "_unformatted", "_writer"),
    )

    def __init__(
        self,
        handler: EngineHandler,
        exchange: Exchange,
        writer: ReplyWriter,
        thread: FormatterThread | None,
        request_id: str,
    ) -> None:
        self._handler, self._exchange, self._writer, self._thread = handler, exchange, writer, thread
        self._answer, self._request_id = exchange.answer, request_id
        self._prompts: list[_Prompt] = []
        self._begun_at = time.monotonic()
        self._generations: list[Generation] = []
        self._open = len(exchange.requests)
        self._held = 0
        self._unformatted: deque[tuple[int, TokenDelta]] = deque()
        self._started = self._closed = self._aborted = self._formatting = False

    async def submit(self) -> None:
        requests, engine = self._exchange.requests, self._handler.engine
        sequences = sum(request.sequences_in_engine for request in requests)
        self._handler.admit(sequences)
        self._held = sequences
        for index, request in enumerate(requests):
            if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
                await asyncio.sleep(0)
            sink = _Prompt(self, index)
            self._prompts.append(sink)
            generation = await engine.submit(request, sink)
            if self._aborted:
                generation.cancel()
                sink.abort(request.sequences)
                continue
            self._generations.append(generation)
            if self._closed:  # an earlier prompt of this call has failed meanwhile
                generation.cancel()
                return

    @property
    def answered(self) -> bool:
        """Whether the reply is complete."""
        return self._closed

    def deliver(self, prompt: int, delta: TokenDelta) -> None:
        if self._closed:
            return
        if self._thread is None:
            try:
                data = self._answer.feed(prompt, delta)
            except RequestError as error:
                self.fail(error)
                return
            self._send(prompt, delta, data)
            return
        self._unformatted.append((prompt, delta))
        self._have_formatted(self._thread)

    def _have_formatted(self, thread: FormatterThread) -> None:
        """One job at a time, so that a formatter that lags finds all that has come meanwhile."""
        if not self._formatting and self._unformatted and not self._closed:
            self._formatting = True
            thread.submit(self._format, partial(self._formatted, thread))

    def _format(self) -> _Formatted:
        """On the formatters' thread: all that has come meanwhile; nothing for a client that has gone."""
        done: list[tuple[int, TokenDelta, bytes]] = []
        while self._unformatted and not self._closed and len(done) < _FORMATTED_PER_JOB:
            prompt, delta = self._unformatted[0]
            try:
                done.append((prompt, delta, self._answer.feed(prompt, delta)))
            except Exception as error:
                return done, error
            self._unformatted.popleft()
        return done, None

    def _formatted(self, thread: FormatterThread, outcome: _Formatted | BaseException) -> None:
        self._formatting = False
        done, error = ([], outcome) if isinstance(outcome, BaseException) else outcome
        for prompt, delta, data in done:
            self._send(prompt, delta, data)
        if error is not None:
            self.fail(error if isinstance(error, RequestError) else GenerationFailed(f"internal error: {error}"))
        self._have_formatted(thread)

    def _send(self, prompt: int, delta: TokenDelta, data: bytes) -> None:
        if self._closed:
            return
        if delta.last:
            self._open -= 1
            self._release(self._exchange.requests[prompt].sequences_in_engine)
        if self._open == 0:
            self._finish(data)
        elif data:
            if not self._started:
                self._started = True
                self._writer.start(200, self._answer.content_type, self._answer.headers)
            self._writer.write(data)

    def _finish(self, data: bytes) -> None:
        self._close(failed=False)
        if self._started:
            self._writer.end(data)
        else:
            self._writer.reply(Reply(200, self._answer.content_type, data, self._answer.headers))

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        self._prompts.clear()
        self._handler.forget(self._request_id, self)
        self._handler.engine.meter.calls.count(time.monotonic() - self._begun_at, failed=failed)

    def abort(self) -> None:
        """Stop generating, and answer as if every open sequence had come to its end here."""
        self._aborted = True
        generations, self._generations = self._generations, []
        for generation in generations:
            generation.cancel()
        for prompt in list(self._prompts):
            prompt.abort(self._exchange.requests[prompt.index].sequences)

    def fail(self, error: RequestError) -> None:
        if self._closed:
            return
        self._close(failed=True)
        self.cancel()
        if self._started:
            self._writer.end(self._answer.fail_midway(error))
        else:
            self._writer.reply(self._answer.fail(error))

    def cancel(self) -> None:
        self._closed = True
        self._prompts.clear()
        self._handler.forget(self._request_id, self)
        self._release(self._held)
        for generation in self._generations:
            generation.cancel()
        self._generations.clear()

    def _release(self, sequences: int) -> None:
        self._held -= sequences
        self._handler.open_sequences -= sequences


class _Prompt:
    """The sink for one prompt of a call."""

    __slots__ = ("_delivery", "_latest", "index")

    def __init__(self, delivery: _Delivery, index: int) -> None:
        self._delivery, self.index = delivery, index
        self._latest: dict[int, TokenDelta] = {}

    def on_delta(self, delta: TokenDelta) -> None:
        self._latest[delta.sequence] = delta
        self._delivery.deliver(self.index, delta)

    def on_error(self, error: RequestError) -> None:
        self._delivery.fail(error)

    def abort(self, sequences: int) -> None:
        """End the sequences that have not ended; the counts are those of their latest deltas."""
        latest = [self._latest.get(sequence) or TokenDelta("", sequence=sequence) for sequence in range(sequences)]
        unfinished = [delta for delta in latest if delta.finish_reason is None]
        for delta in unfinished:
            self.on_delta(
                TokenDelta(
                    "",
                    sequence=delta.sequence,
                    finish_reason=FinishReason.ABORT,
                    prompt_token_count=delta.prompt_token_count,
                    token_count=delta.token_count,
                    cumulative_logprob=delta.cumulative_logprob,
                    last=delta is unfinished[-1],
                )
            )
