"""A call that is running in an engine: takes the engine's deltas, and writes the reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from engines.errors import DeadlineExceeded, GenerationFailed, InternalError, InvalidParameter, RequestError
from engines.interface import Generation, give_turn
from engines.request import DEADLINE, FinishReason, TokenDelta
from handlers.contract import Call, Exchange, Reply, ReplyWriter, ended_at_deadline, not_held_header
from handlers.deadline import REACHED, Deadline
from handlers.formatter_thread import FormatterQueue, FormatterThread
from handlers.queue import EngineQueue

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0  # The interval of comments in an idle stream, as in TGI.
_LONG = 64 * 1024  # Bytes. Until a cumulative answer is this long, it is sent after each addition.
_BYTES_PER_SECOND = 32 * 1024 * 1024  # The maximum rate of writing a cumulative answer that is longer than `_LONG`.


class RunningCall:
    """One call in the engine. It is the sink of the call's first prompt, and implements `Running`."""

    def __init__(
        self,
        queue: EngineQueue,
        exchange: Exchange,
        writer: ReplyWriter,
        call: Call,
        thread: FormatterThread | None = None,
    ) -> None:
        self._queue, self._exchange, self._writer, self.request_id = queue, exchange, writer, call.request_id
        self._answer = exchange.answer
        self._begun_at = time.monotonic()
        self._generations: list[Generation] = []
        self._open_prompts = len(exchange.requests)
        self._places = 0  # The number of the queue's places that the call still holds.
        # The timer for the next comment, or for the next part of a cumulative answer.
        self._timer: asyncio.Handle | None = None
        self._spoken = True  # Whether data was written since the last tick. A flag is cheaper than reading the clock.
        self._length = 0  # The length of the last part of a cumulative answer, in bytes.
        self._aborted = False
        self._not_held: tuple[tuple[str, str], ...] = ()  # The header that `not_held_header` returns.
        self._reached: tuple[tuple[str, str], ...] = ()  # The header of an answer that ended at its deadline.
        self._deadline: Deadline | None = None
        if call.time_limit is not None or queue.sets_deadlines:
            self._deadline = queue.deadline_of(exchange, call)
        self._deadline_timer: asyncio.Handle | None = None
        self._formatting: FormatterQueue[tuple[int, TokenDelta]] | None = None  # Deltas that wait for a formatter.
        if thread is not None and exchange.answer.blocks:
            self._formatting = FormatterQueue(thread, lambda item: exchange.answer.feed(*item), self._take)
        self.begun = False  # Whether the reply has begun as a stream.
        self.answered = False  # Whether the reply is complete.
        queue.running[call.request_id] = self.abort

    async def submit(self) -> None:
        """Pass the call's prompts to the engine.

        Raises:
            RequestError: A prompt is refused before the reply has begun. The call has ended.
        """
        places = 0
        for request in self._exchange.requests:
            places += request.sequences_in_engine
        try:
            self._queue.admit(places)
            self._places = places
            if self._deadline is None:
                await self._submit()
            else:
                await self._deadline.limit(self._submit())
        except DeadlineExceeded as error:
            self._end_at_deadline(error)
            return
        except RequestError as error:
            if isinstance(error, InvalidParameter):
                error = error.renamed(self._exchange.names)
            if self.begun:  # an earlier prompt has begun the reply
                self.on_error(error)
            if not self.answered:  # The client has not got an error yet.
                self.cancel()
                raise error from None
        except BaseException:
            self.cancel()
            raise
        if self.answered:
            return
        if self._deadline is not None:
            self._deadline_timer = self._deadline.call(self._end_at_deadline)
        if self._exchange.comment:
            self._begin()
            self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._tick)

    async def _submit(self) -> None:
        for prompt, request in enumerate(self._exchange.requests):
            if prompt:
                await give_turn(prompt)
            generation = await self._queue.engine.submit(request, _FurtherPrompt(self, prompt) if prompt else self)
            self._generations.append(generation)
            if self._aborted:
                generation.abort()
            if self.answered:  # an earlier prompt of this call has failed
                generation.cancel()
                return

    def on_not_held(self, places: Sequence[str]) -> None:
        if self._not_held:  # The prompts of a call have the same schema.
            return
        logger.info("%d parts of the JSON schema are not held", len(places), extra={"request_id": self.request_id})
        self._not_held = not_held_header(places)

    def on_delta(self, delta: TokenDelta, prompt: int = 0) -> None:
        if self.answered:
            return
        if self._formatting is not None:
            self._formatting.put((prompt, delta))
            return
        try:
            data = self._answer.feed(prompt, delta)
        except RequestError as error:
            self.on_error(error)
            return
        if data and self.begun and delta.finish_reason is None and not delta.last:
            self._spoken = True
            self._writer.write(data)
        else:
            self._write(prompt, delta, data)

    def on_error(self, error: RequestError) -> None:
        if self.answered:
            return
        self.cancel()
        self._queue.statistics.calls.count(time.monotonic() - self._begun_at, failed=True)
        reached = isinstance(error, DeadlineExceeded)
        if reached:
            self._queue.count_deadline(self.request_id, begun=False)
        if self.begun:
            self._writer.end(self._answer.fail_midway(error))
        else:
            reply = self._answer.fail(error)
            self._writer.reply(ended_at_deadline(reply) if reached else reply)

    def abort(self) -> None:
        """Stop generating: every unfinished sequence ends with its text so far."""
        self._aborted = True
        for generation in list(self._generations):
            generation.abort()

    def _end_at_deadline(self, error: DeadlineExceeded) -> None:
        """End the call: with an answer if a sequence has a token, otherwise with the error."""
        generations, requests = list(self._generations), self._exchange.requests
        if not any(generation.begun for generation in generations):
            self.on_error(error)
            return
        for generation in generations:
            generation.abort(at_deadline=True)
        for prompt in range(len(generations), len(requests)):  # The engine has not received these prompts.
            request = requests[prompt]
            # The count is 0 for a prompt that is still a text, because no contract shows this count.
            prompt_tokens = 0 if isinstance(request.prompt, str) else len(request.prompt)
            for sequence in range(request.sequences):
                last = sequence == request.sequences - 1
                end = TokenDelta("", [], sequence, FinishReason.LENGTH, prompt_tokens, last=last, stop_reason=DEADLINE)
                self.on_delta(end, prompt)

    def cancel(self) -> None:
        if self.answered and not self._generations:
            return
        self._close()
        for generation in self._generations:
            generation.cancel()
        self._generations.clear()

    def _take(self, done: list[tuple[tuple[int, TokenDelta], bytes]], error: GenerationFailed | None) -> None:
        for (prompt, delta), data in done:
            if not self.answered:
                self._write(prompt, delta, data)
        if error is not None:
            self.on_error(error)

    def _write(self, prompt: int, delta: TokenDelta, data: bytes) -> None:
        if delta.stop_reason == DEADLINE and delta.finish_reason is FinishReason.LENGTH and not self._reached:
            self._queue.count_deadline(self.request_id, begun=True)
            self._reached = REACHED
        if delta.last:
            self._open_prompts -= 1
            if self._open_prompts == 0:
                self._finish(data)
                return
            places = self._exchange.requests[prompt].sequences_in_engine
            self._places -= places
            self._queue.open_sequences -= places
        if not (data or self._answer.cumulative):
            return
        if not self.begun:
            self._begin()
        if data:
            self._spoken = True
            self._writer.write(data)
        else:
            self._write_latest_soon()

    def _begin(self) -> None:
        self.begun = True
        self._writer.start(200, self._answer.content_type, (*self._answer.headers, *self._not_held))

    def _finish(self, data: bytes) -> None:
        self._close()
        self._generations.clear()
        self._queue.statistics.calls.count(time.monotonic() - self._begun_at, failed=False)
        if self.begun:
            self._writer.end(data)
        else:
            headers = (*self._answer.headers, *self._not_held, *self._reached)
            self._writer.reply(Reply(200, self._answer.content_type, data, headers))

    def _close(self) -> None:
        """Return the call's places to the queue. From now on, only the end of the reply is written."""
        self.answered = True
        self._queue.open_sequences -= self._places
        self._places = 0
        if self._queue.running.get(self.request_id) == self.abort:  # a client may use one id twice
            del self._queue.running[self.request_id]
        if self._timer is not None:
            self._timer.cancel()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if self._formatting is not None:
            self._formatting.close()
            self._formatting = None  # Breaks a reference cycle: the formatter queue holds the call.

    def _tick(self) -> None:
        """Write a comment if nothing was written since the last tick."""
        if not self._spoken:
            self._writer.write(self._exchange.comment)
        self._spoken = False
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._tick)

    def _write_latest_soon(self) -> None:
        """Schedule the write of the latest part of a cumulative answer.

        A short part is written immediately, or once for each step of the engine if the call has several sequences. Long
        parts are written as often as `_BYTES_PER_SECOND` allows.
        """
        if self._timer is not None:
            return
        if self._length > _LONG:
            seconds = self._length / _BYTES_PER_SECOND
            self._timer = asyncio.get_running_loop().call_later(seconds, self._write_latest)
        elif len(self._exchange.requests) == 1 and self._exchange.requests[0].sequences == 1:
            self._writer.write_latest(self._latest)
        else:
            self._timer = asyncio.get_running_loop().call_soon(self._write_latest)

    def _write_latest(self) -> None:
        self._timer = None
        try:
            self._writer.write_latest(self._latest)
        except Exception:
            logger.exception("request %s: a part of the answer cannot be made", self.request_id)
            self.on_error(InternalError())

    def _latest(self) -> bytes:
        data = self._answer.latest()
        self._length = len(data)
        return data


class _FurtherPrompt:
    """The sink for a second or later prompt of a call."""

    __slots__ = ("_prompt", "_running")

    def __init__(self, running: RunningCall, prompt: int) -> None:
        self._running, self._prompt = running, prompt

    def on_not_held(self, places: Sequence[str]) -> None:
        self._running.on_not_held(places)

    def on_delta(self, delta: TokenDelta) -> None:
        self._running.on_delta(delta, self._prompt)

    def on_error(self, error: RequestError) -> None:
        self._running.on_error(error)
