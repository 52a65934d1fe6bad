"""From a call to an engine and back: each call goes to the engine at once, which batches by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from handlers.contracts.protocol import LONG_BODY, Call, Contract, ContractError, CumulativeAnswer, Exchange, Reply
from handlers.engines.protocol import Engine, Generation
from handlers.errors import GenerationFailed, InvalidRequest, Overloaded, RequestError
from handlers.formatters import FormatterThread
from handlers.reply import ReplyWriter, Running
from handlers.request import TokenDelta

logger = logging.getLogger(__name__)

_LONG = 64 * 1024
"""Bytes; parts up to this length come as often as there is something new."""
_BYTES_PER_SECOND = 32 * 1024 * 1024
"""What one answer makes of longer ones."""


class Parts:
    """The parts of one answer, as they come to be due."""

    __slots__ = ("_answer", "_at_once", "_length", "_timer", "_unsent", "_writer")

    def __init__(self, answer: CumulativeAnswer, writer: ReplyWriter, sequences: int) -> None:
        """`sequences`: how many the answer has; a single one has nothing to wait for in a step."""
        self._answer, self._writer, self._at_once = answer, writer, sequences == 1
        self._length = 0
        self._timer: asyncio.Handle | None = None
        self._unsent = False

    def due(self) -> None:
        """There is something new to tell."""
        self._unsent = True
        if self._timer is not None:
            return
        if self._length > _LONG:
            self._timer = asyncio.get_running_loop().call_later(self._length / _BYTES_PER_SECOND, self._send)
        elif self._at_once:
            self._writer.write_latest(self._make)
        else:
            self._timer = asyncio.get_running_loop().call_soon(self._send)

    def last(self, *, changed: bool) -> bytes:
        """What is left to tell at the end, of which `due` has not heard if it was `changed` just now."""
        return self._make() if changed or self._unsent else b""

    def stop(self) -> None:
        """Nothing more is sent."""
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._timer = None
        self._writer.write_latest(self._make)

    def _make(self) -> bytes:
        self._unsent = False
        data = self._answer.latest()
        self._length = len(data)
        return data


SECONDS = 15.0
"""TGI's interval (contracts/tgi.md section 4)."""


class KeepAlive:
    """Writes a comment whenever a stream has said nothing from one tick to the next."""

    __slots__ = ("_comment", "_timer", "_write", "spoken")

    def __init__(self, comment: bytes, write: Callable[[bytes], None]) -> None:
        self._comment, self._write = comment, write
        self.spoken = True
        """Set by whoever writes to the stream: cheaper for each token than a look at the clock."""
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._tick)

    def _tick(self) -> None:
        if not self.spoken:
            self._write(self._comment)
        self.spoken = False
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._tick)

    def stop(self) -> None:
        """Nothing more is written."""
        self._timer.cancel()


_FORMATTED_PER_JOB = 16
"""Deltas; other requests' formatters have their turn after so many."""
_SUBMITS_PER_TURN = 16
"""After so many prompts of one call others get their turn on the event loop."""


class Desk(Protocol):
    """Where a call comes from: the engine, and the places in its queue."""

    @property
    def engine(self) -> Engine:
        """Generates."""

    open_sequences: int
    """Places that are taken."""

    def admit(self, sequences: int) -> None:
        """Take places; see `EngineHandler.admit`."""

    def forget(self, request_id: str, delivery: Delivery) -> None:
        """The call has ended."""


_Formatted = tuple[list[tuple[int, TokenDelta, bytes]], BaseException | None]
"""What became of some deltas, up to an error."""


class Delivery:
    """One call; see `handlers.reply.Running`."""

    __slots__ = (
        *("_aborted", "_answer", "_begun_at", "_closed", "_desk", "_exchange", "_generations", "_held", "_open"),
        *("_formatting", "_keep_alive", "_parts", "_request_id", "_started", "_thread", "_unformatted", "_writer"),
    )

    def __init__(
        self,
        desk: Desk,
        exchange: Exchange,
        writer: ReplyWriter,
        thread: FormatterThread | None,
        request_id: str,
    ) -> None:
        self._desk, self._exchange, self._writer, self._thread = desk, exchange, writer, thread
        self._answer, self._request_id = exchange.answer, request_id
        self._begun_at = time.monotonic()
        self._generations: list[Generation] = []
        self._open = len(exchange.requests)
        self._held = 0
        self._unformatted: deque[tuple[int, TokenDelta]] = deque()
        self._keep_alive: KeepAlive | None = None
        self._parts: Parts | None = None
        if exchange.cumulative is not None:
            sequences = sum(request.sequences for request in exchange.requests)
            self._parts = Parts(exchange.cumulative, writer, sequences)
        self._started = self._closed = self._aborted = self._formatting = False

    async def submit(self) -> None:
        """Give its prompts to the engine.

        Raises:
            RequestError: one of them is refused; those before it have to be cancelled.
        """
        requests, engine = self._exchange.requests, self._desk.engine
        sequences = sum(request.sequences_in_engine for request in requests)
        self._desk.admit(sequences)
        self._held = sequences
        for index, request in enumerate(requests):
            if index % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
                await asyncio.sleep(0)
            generation = await engine.submit(request, _Prompt(self, index))
            self._generations.append(generation)
            if self._aborted:
                generation.abort()
            if self._closed:  # an earlier prompt of this call has failed meanwhile
                generation.cancel()
                return
        if self._exchange.comment and not self._closed:
            self._begin()
            self._keep_alive = KeepAlive(self._exchange.comment, self._writer.write)

    @property
    def begun(self) -> bool:
        """Whether the reply has begun as a stream."""
        return self._started

    @property
    def answered(self) -> bool:
        """Whether the reply is complete."""
        return self._closed

    def deliver(self, prompt: int, delta: TokenDelta) -> None:
        """Take what a prompt's engine has made."""
        if self._closed:
            return
        if self._exchange.cumulative is not None and self._parts is not None:
            self._add(self._exchange.cumulative.add(prompt, delta), self._parts, prompt, delta)
        elif self._thread is None:
            try:
                data = self._answer.feed(prompt, delta)
            except RequestError as error:
                self.fail(error)
                return
            self._send(prompt, delta, data)
        else:
            self._unformatted.append((prompt, delta))
            self._have_formatted(self._thread)

    def _add(self, changed: bool, parts: Parts, prompt: int, delta: TokenDelta) -> None:
        """A cumulative answer has taken a delta."""
        if delta.last:
            self._ended(prompt)
        if self._open == 0:
            self._finish(parts.last(changed=changed))
        elif changed:
            self._begin()
            parts.due()

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
            self._ended(prompt)
        if self._open == 0:
            self._finish(data)
        elif data:
            self._begin()
            if self._keep_alive is not None:
                self._keep_alive.spoken = True
            self._writer.write(data)

    def _ended(self, prompt: int) -> None:
        self._open -= 1
        self._release(self._exchange.requests[prompt].sequences_in_engine)

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._writer.start(200, self._answer.content_type, self._answer.headers)

    def _finish(self, data: bytes) -> None:
        self._close(failed=False)
        if self._started:
            self._writer.end(data)
        else:
            self._writer.reply(Reply(200, self._answer.content_type, data, self._answer.headers))

    def _close(self, *, failed: bool) -> None:
        self._forget()
        self._desk.engine.meter.calls.count(time.monotonic() - self._begun_at, failed=failed)

    def abort(self) -> None:
        """Stop generating: every sequence that has not ended ends with what there is of it."""
        self._aborted = True
        for generation in list(self._generations):
            generation.abort()

    def fail(self, error: RequestError) -> None:
        """End the whole call with an error."""
        if self._closed:
            return
        self._close(failed=True)
        self.cancel()
        if self._started:
            self._writer.end(self._answer.fail_midway(error))
        else:
            self._writer.reply(self._answer.fail(error))

    def _forget(self) -> None:
        self._closed = True
        self._desk.forget(self._request_id, self)
        if self._keep_alive is not None:
            self._keep_alive.stop()
        if self._parts is not None:
            self._parts.stop()

    def cancel(self) -> None:
        self._forget()
        self._release(self._held)
        for generation in self._generations:
            generation.cancel()
        self._generations.clear()

    def _release(self, sequences: int) -> None:
        self._held -= sequences
        self._desk.open_sequences -= sequences


class _Prompt:
    """The sink for one prompt of a call."""

    __slots__ = ("_delivery", "_index")

    def __init__(self, delivery: Delivery, index: int) -> None:
        self._delivery, self._index = delivery, index

    def on_delta(self, delta: TokenDelta) -> None:
        self._delivery.deliver(self._index, delta)

    def on_error(self, error: RequestError) -> None:
        self._delivery.fail(error)


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
        return await self._handler.handle(self._contract, call, writer, self._thread, self._long_body)
