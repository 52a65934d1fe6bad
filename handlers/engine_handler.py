"""From a call to an engine and back: each call goes to the engine at once, which batches by itself.

`EngineHandler` understands a call by its contract and begins it. A `RunningCall` is the sink of what the engine makes
of it. One `EngineQueue` counts the places of all calls of an engine, whatever their contract.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from engines.errors import GenerationFailed, InternalError, InvalidRequest, Overloaded, RequestError
from engines.interface import Engine, Generation
from engines.request import TokenDelta
from handlers.contract import (
    LONG_BODY,
    Call,
    Contract,
    ContractError,
    CumulativeAnswer,
    Exchange,
    Reply,
    ReplyWriter,
)
from handlers.custom.formatter_thread import FormatterQueue, FormatterThread
from handlers.lmi.errors import failed_dependency

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0  # Between the comments of a stream that has nothing to say; TGI's interval.
_SUBMITS_PER_TURN = 16  # After so many prompts of one call others get their turn on the event loop.
_LONG = 64 * 1024  # Bytes; parts of a cumulative answer up to this length come as often as there is something new.
_BYTES_PER_SECOND = 32 * 1024 * 1024  # What one cumulative answer makes of longer parts.


class EngineQueue:
    """The calls of one engine. At most `limit` sequences are in the engine at a time, running or waiting; further calls
    are refused at once."""

    def __init__(self, engine: Engine, limit: int, overload_status: int = 503) -> None:
        """`overload_status`: what LMI's clients get where there is no place."""
        self.engine, self.limit, self.overload_status = engine, limit, overload_status
        self.open_sequences = 0  # Places that are taken.
        self.running: dict[str, RunningCall] = {}  # By their ids.

    def admit(self, sequences: int) -> None:
        """Take places for a call. Raises InvalidRequest: the call would never fit; Overloaded: there are not enough
        now."""
        if sequences > self.limit:
            raise InvalidRequest(f"the request asks for {sequences} sequences; at most {self.limit} can be served")
        if self.open_sequences + sequences > self.limit:
            raise self.overloaded()
        self.open_sequences += sequences

    def check_place(self) -> None:
        """Raise Overloaded if there is no place at all; the call is counted as one that has failed."""
        if self.open_sequences >= self.limit:
            self.engine.meter.calls.count(0.0, failed=True)
            raise self.overloaded()

    def overloaded(self) -> Overloaded:
        """What a call is refused with that gets no place."""
        message = f"the queue is full: {self.open_sequences} of {self.limit} places are taken; try again later"
        return Overloaded(message, self.overload_status)

    def abort(self, request_id: str) -> None:
        """End the call with this id, if it is running: its client gets what there is of the answer, as aborted."""
        if (running := self.running.get(request_id)) is not None:
            running.abort()


class EngineHandler:
    """Implements `Handler`: one contract on one engine."""

    def __init__(
        self,
        queue: EngineQueue,
        contract: Contract,
        thread: FormatterThread | None = None,
        long_body: int = LONG_BODY,
        refuse_unread: Callable[[Overloaded], Reply] | None = None,
    ) -> None:
        """`thread`: where LMI's contract runs, if a customer's formatters are part of it; others understand a body of
        `long_body` bytes and more in a thread. `refuse_unread`: the reply to a call where the queue has no place at
        all, so that its body need not be understood; None where the body says what form a refusal has."""
        self._queue, self._contract, self._thread, self._long_body = queue, contract, thread, long_body
        self._refuse_unread = refuse_unread

    async def handle(self, call: Call, writer: ReplyWriter) -> RunningCall:
        queue = self._queue
        if self._refuse_unread is not None:
            try:
                queue.check_place()
            except Overloaded as full:
                raise ContractError(self._refuse_unread(full), full.message) from None
        if self._thread is None and len(call.body) < self._long_body:
            exchange = self._contract.parse(call)
        else:
            exchange = await self._parse_in_thread(call)
        exchange = exchange.traced_as(call)
        for note in exchange.notes:
            logger.info("%s", note, extra={"request_id": call.request_id})
        if exchange.cumulative is not None:
            running: RunningCall = _CumulativeCall(queue, exchange, writer, call.request_id, exchange.cumulative)
        elif self._thread is not None:
            running = _FormattedCall(queue, exchange, writer, call.request_id, self._thread)
        else:
            running = RunningCall(queue, exchange, writer, call.request_id)
        try:
            await running.submit()
        except RequestError as error:
            if isinstance(error, Overloaded):  # the engine may have no place for something else
                error = Overloaded(error.message, queue.overload_status)
            queue.engine.meter.calls.count(0.0, failed=True)
            raise ContractError(exchange.answer.fail(error), error.message) from None
        return running

    async def _parse_in_thread(self, call: Call) -> Exchange:
        if self._thread is None:
            return await asyncio.to_thread(self._contract.parse, call)
        try:
            return await self._thread.run(partial(self._contract.parse, call))
        except RequestError as error:
            raise failed_dependency(error.message) from None


class RunningCall:
    """One call in the engine: the sink of its first prompt, and what cancels it (`Running`)."""

    def __init__(self, queue: EngineQueue, exchange: Exchange, writer: ReplyWriter, request_id: str) -> None:
        self._queue, self._exchange, self._writer, self._request_id = queue, exchange, writer, request_id
        self._answer = exchange.answer
        self._begun_at = time.monotonic()
        self._generations: list[Generation] = []
        self._open_prompts = len(exchange.requests)
        self._places = 0  # Of the queue, that the call still has.
        self._keep_alive: _KeepAlive | None = None
        self._aborted = False
        self.begun = False  # The reply has begun as a stream.
        self.answered = False  # The reply is complete.
        queue.running[request_id] = self

    async def submit(self) -> None:
        """Give its prompts to the engine. Raises RequestError: one of them is refused before anything has been
        answered. The call has ended."""
        requests, engine = self._exchange.requests, self._queue.engine
        places = sum([request.sequences_in_engine for request in requests])
        try:
            self._queue.admit(places)
            self._places = places
            for prompt, request in enumerate(requests):
                if prompt % _SUBMITS_PER_TURN == _SUBMITS_PER_TURN - 1:
                    await asyncio.sleep(0)
                generation = await engine.submit(request, _FurtherPrompt(self, prompt) if prompt else self)
                self._generations.append(generation)
                if self._aborted:
                    generation.abort()
                if self.answered:  # an earlier prompt of this call has failed meanwhile
                    generation.cancel()
                    return
        except RequestError as error:
            if self.begun:  # with what an earlier prompt has made
                self.on_error(error)
            if not self.answered:  # nor before, as an earlier prompt has failed
                self.cancel()
                raise
        except BaseException:
            self.cancel()
            raise
        if self._exchange.comment and not self.answered:
            self._begin()
            self._keep_alive = _KeepAlive(self._exchange.comment, self._writer)

    def on_delta(self, delta: TokenDelta, prompt: int = 0) -> None:
        if self.answered:
            return
        try:
            data = self._answer.feed(prompt, delta)
        except RequestError as error:
            self.on_error(error)
            return
        self._write(prompt, delta, data)

    def on_error(self, error: RequestError) -> None:
        if self.answered:
            return
        self._end(failed=True)
        self.cancel()
        if self.begun:
            self._writer.end(self._answer.fail_midway(error))
        else:
            self._writer.reply(self._answer.fail(error))

    def abort(self) -> None:
        """Stop generating: every sequence that has not ended ends with what there is of it."""
        self._aborted = True
        for generation in list(self._generations):
            generation.abort()

    def cancel(self) -> None:
        self._close()
        self._release(self._places)
        for generation in self._generations:
            generation.cancel()
        self._generations.clear()

    def _write(self, prompt: int, delta: TokenDelta, data: bytes) -> None:
        if delta.last:
            self._prompt_ended(prompt)
            if self._open_prompts == 0:
                self._finish(data)
                return
        if data:
            if not self.begun:
                self._begin()
            if self._keep_alive is not None:
                self._keep_alive.spoken = True
            self._writer.write(data)

    def _prompt_ended(self, prompt: int) -> None:
        self._open_prompts -= 1
        self._release(self._exchange.requests[prompt].sequences_in_engine)

    def _begin(self) -> None:
        self.begun = True
        self._writer.start(200, self._answer.content_type, self._answer.headers)

    def _finish(self, data: bytes) -> None:
        self._end(failed=False)
        if self.begun:
            self._writer.end(data)
        else:
            self._writer.reply(Reply(200, self._answer.content_type, data, self._answer.headers))

    def _end(self, *, failed: bool) -> None:
        self._close()
        self._queue.engine.meter.calls.count(time.monotonic() - self._begun_at, failed=failed)

    def _close(self) -> None:
        """Nothing more is written but what ends the reply."""
        self.answered = True
        if self._queue.running.get(self._request_id) is self:  # ids are the clients', who may use one twice
            del self._queue.running[self._request_id]
        if self._keep_alive is not None:
            self._keep_alive.stop()

    def _release(self, places: int) -> None:
        self._places -= places
        self._queue.open_sequences -= places


class _FurtherPrompt:
    """The sink for a prompt of a call that is not its first."""

    __slots__ = ("_prompt", "_running")

    def __init__(self, running: RunningCall, prompt: int) -> None:
        self._running, self._prompt = running, prompt

    def on_delta(self, delta: TokenDelta) -> None:
        self._running.on_delta(delta, self._prompt)

    def on_error(self, error: RequestError) -> None:
        self._running.on_error(error)


class _KeepAlive:
    """Writes a comment whenever a stream has said nothing from one tick to the next."""

    __slots__ = ("_comment", "_timer", "_writer", "spoken")

    def __init__(self, comment: bytes, writer: ReplyWriter) -> None:
        self._comment, self._writer = comment, writer
        self.spoken = True  # Set by whoever writes to the stream: cheaper for each token than a look at the clock.
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._tick)

    def _tick(self) -> None:
        if not self.spoken:
            self._writer.write(self._comment)
        self.spoken = False
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._tick)

    def stop(self) -> None:
        self._timer.cancel()


class _CumulativeCall(RunningCall):
    """A call whose answer repeats all before it in each part. Short parts come at once, or for several sequences once
    for each step of the engine. Long ones come as often as `_BYTES_PER_SECOND` allows."""

    def __init__(
        self, queue: EngineQueue, exchange: Exchange, writer: ReplyWriter, request_id: str, answer: CumulativeAnswer
    ) -> None:
        super().__init__(queue, exchange, writer, request_id)
        self._cumulative = answer
        self._single = sum([request.sequences for request in exchange.requests]) == 1
        self._timer: asyncio.Handle | None = None
        self._length = 0  # Of the last part, in bytes.
        self._unsent = False

    def on_delta(self, delta: TokenDelta, prompt: int = 0) -> None:
        if self.answered:
            return
        changed = self._cumulative.add(prompt, delta)
        self._unsent = self._unsent or changed
        if delta.last:
            self._prompt_ended(prompt)
        if self._open_prompts == 0:
            self._finish(self._part() if self._unsent else b"")
        elif changed:
            if not self.begun:
                self._begin()
            self._send_soon()

    def _send_soon(self) -> None:
        if self._timer is not None:
            return
        if self._length > _LONG:
            self._timer = asyncio.get_running_loop().call_later(self._length / _BYTES_PER_SECOND, self._send)
        elif self._single:
            self._writer.write_latest(self._part)
        else:
            self._timer = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._timer = None
        try:
            self._writer.write_latest(self._part)
        except Exception:
            logger.exception("request %s: a part of the answer cannot be made", self._request_id)
            self.on_error(InternalError())

    def _part(self) -> bytes:
        self._unsent = False
        data = self._cumulative.latest()
        self._length = len(data)
        return data

    def _close(self) -> None:
        super()._close()
        if self._timer is not None:
            self._timer.cancel()


class _FormattedCall(RunningCall):
    """A call whose answer may block, as customers' formatters may: it is fed in a thread, in order."""

    def __init__(
        self, queue: EngineQueue, exchange: Exchange, writer: ReplyWriter, request_id: str, thread: FormatterThread
    ) -> None:
        super().__init__(queue, exchange, writer, request_id)
        self._deltas: FormatterQueue[tuple[int, TokenDelta]] = FormatterQueue(
            thread, lambda item: self._answer.feed(*item), self._take
        )

    def on_delta(self, delta: TokenDelta, prompt: int = 0) -> None:
        if not self.answered:
            self._deltas.put((prompt, delta))

    def _take(self, done: list[tuple[tuple[int, TokenDelta], bytes]], error: Exception | None) -> None:
        for (prompt, delta), data in done:
            if not self.answered:
                self._write(prompt, delta, data)
        if error is not None:
            self.on_error(error if isinstance(error, RequestError) else GenerationFailed(f"internal error: {error}"))

    def _close(self) -> None:
        super()._close()
        self._deltas.close()
