"""How a worker's requests become calls of its handler: one by one, several in one call, or all of them step by step."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Reply
from handlers.workers.reply import HandlerReply, decode_part, reply_of
from handlers.workers.runtime.channel import WINDOW, InputMessage, OutputMessage, Properties, data_of
from handlers.workers.worker import Receiver, Worker

logger = logging.getLogger("handlers.workers")

MAX_BATCH = 999
"""Entries are numbered with three digits, from 0."""

_KEY = re.compile(r"batch_([0-9]{1,9})\.(.*)", re.DOTALL)
_CREDIT_SIZE = WINDOW // 2
_CANCEL_PATIENCE = 5.0
"""Seconds in which an async handler has to end a cancelled call; after them the worker counts as hung."""


@dataclass(slots=True, eq=False)
class Request:
    """One request for a handler; implements `Running`."""

    message: InputMessage
    reply: HandlerReply
    priority: int
    """Lower ones leave the queue earlier."""
    number: int = 0
    """Order of arrival."""
    forget: Callable[[Request], None] | None = None
    """Takes the request out of the queue, or the call that it is in."""

    def cancel(self) -> None:
        if self.reply.open and self.forget is not None:
            self.reply.open = False
            self.forget(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How requests wait and become calls. Durations are in seconds."""

    queue_size: int
    """Requests that may wait while every worker is busy."""
    overload_status: int
    unavailable_status: int
    predict_timeout: float
    client_patience: float
    """Time for which a client may take nothing of its stream."""
    async_mode: bool
    concurrency: int
    """Calls that one worker has at a time."""
    batch_size: int
    max_batch_delay: float
    max_rolling_batch_size: int

    @property
    def overdue(self) -> str:
        """The end of a sentence about a handler that exceeded `predict_timeout`."""
        return f"did not answer within {self.predict_timeout:g} seconds (predict_timeout)"


class _Timed:
    """What both batchers have: a worker, and a timer."""

    def __init__(self, worker: Worker, settings: CallSettings, on_free: Callable[[], None]) -> None:
        """`on_free` is called when there is a place for a request, and when there is no request any more."""
        self.worker, self._settings, self._on_free = worker, settings, on_free
        self._timer: asyncio.TimerHandle | None = None

    def _start_timer(self, seconds: float, expired: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, expired)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CallBatcher(_Timed):
    """A call has one request, or those that come within `max_batch_delay`, up to `batch_size`.

    A worker has one call at a time, or `concurrency` of them in async mode. A batch of one runs as without batching.
    """

    def __init__(self, worker: Worker, settings: CallSettings, on_free: Callable[[], None]) -> None:
        super().__init__(worker, settings, on_free)
        self._gathered: list[Request] = []
        self._calls: dict[Request, _Call] = {}

    @property
    def free(self) -> bool:
        """Whether it takes another request now."""
        return len(self._calls) < self._settings.concurrency

    @property
    def busy(self) -> bool:
        """Whether it has any request."""
        return bool(self._calls or self._gathered)

    @property
    def rank(self) -> int:
        """The batcher with the lowest rank gets the next request: of those that gather a batch, the fullest."""
        return len(self._calls) - len(self._gathered)

    def take(self, request: Request) -> None:
        """Begin with a request."""
        self._gathered.append(request)
        if len(self._gathered) == self._settings.batch_size:
            self._begin()
        elif self._timer is None:
            self._start_timer(self._settings.max_batch_delay, self._begin)

    def cancel(self, request: Request) -> None:
        """Do without a request: its client has gone."""
        if request in self._calls:
            self._calls[request].cancel_if_unwanted()  # its place is free when the handler has ended the call
        elif request in self._gathered:
            self._gathered.remove(request)
            if not self._gathered:
                self._stop_timer()
                self._on_free()

    def recall(self) -> list[Request]:
        """Give back the requests that the worker has not been sent."""
        self._stop_timer()
        gathered, self._gathered = self._gathered, []
        return gathered

    def _begin(self) -> None:
        requests = self.recall()
        kind = _Call if len(requests) == 1 else _BatchCall
        call = kind(self.worker, requests, self._settings, lambda: self._finished(requests))
        self._calls.update(dict.fromkeys(requests, call))

    def _finished(self, requests: list[Request]) -> None:
        for request in requests:
            del self._calls[request]
        self._on_free()


class _Call(Receiver):
    """A call for one request."""

    def __init__(
        self, worker: Worker, requests: list[Request], settings: CallSettings, on_finished: Callable[[], None]
    ) -> None:
        self._worker, self._requests, self._settings = worker, requests, settings
        self._on_finished = on_finished
        self._reply = requests[0].reply
        self._cancelled = False
        self._uncredited = 0
        """Bytes that the worker has sent and has got no credit for."""
        self._draining: asyncio.Task[None] | None = None
        self._call = worker.call(self._message(), self)
        self._timeout = IdleTimeout(settings.predict_timeout, self._on_timeout, self._waits_for_client)

    def cancel_if_unwanted(self) -> None:
        """Have the handler end the call once no client waits for it any more."""
        if not any(request.reply.open for request in self._requests):
            self._cancelled = True
            self._worker.cancel(self._call)

    def on_output(self, output: OutputMessage, size: int) -> None:
        self._timeout.restart()
        part = None
        if self._settings.async_mode:
            self._received(size)
            part = decode_part(output.data) if output.code == 200 else None
        if output.error is not None:
            self._reply.reply(reply_of(output), self._midway(output.code, output.error))
        elif part is not None:
            self._reply.accept(part, output.properties)
        elif output.streams:
            self._reply.prepare(output)
        elif self._reply.started:
            self._reply.write(output.data)
        else:
            self._reply.reply(reply_of(output))

    def on_chunk(self, chunk: bytes) -> None:
        self._timeout.restart()
        self._reply.write(chunk)
        self._received(len(chunk))

    def on_stream_end(self) -> None:
        self._reply.end()

    def on_done(self) -> None:
        if self._reply.started:
            self._reply.end()
        self._fail(FAILED_DEPENDENCY, "the handler ended without an answer")  # unless it has answered
        self._close()

    def on_lost(self, reason: str) -> None:
        self._fail(self._settings.unavailable_status, f"the handler's worker {reason} during the request")
        self._close()

    def _message(self) -> InputMessage:
        return self._requests[0].message

    def _received(self, size: int) -> None:
        """Count received bytes; from time to time the worker gets credit for them."""
        self._uncredited += size
        if self._uncredited >= _CREDIT_SIZE and self._draining is None and not self._cancelled:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._uncredited >= _CREDIT_SIZE:
                size, self._uncredited = self._uncredited, 0
                async with asyncio.timeout(self._settings.client_patience):
                    await self._reply.writer.drain()
                self._worker.credit(self._call, size)
        except TimeoutError:
            # A client that does not read must not keep the worker from others.
            message = f"the client took nothing for {self._settings.client_patience:g} seconds"
            logger.warning("%s: %s", self._worker.name, message, extra={"worker": self._worker.name})
            self._fail(self._settings.unavailable_status, message)
            self.cancel_if_unwanted()
        finally:
            self._draining = None

    def _waits_for_client(self) -> bool:
        return self._draining is not None and not self._cancelled

    def _on_timeout(self) -> None:
        overdue = self._settings.overdue
        self._fail(self._settings.unavailable_status, f"the handler {overdue}")
        logger.warning("%s: a call %s", self._worker.name, overdue, extra={"worker": self._worker.name})
        if self._settings.async_mode and not self._cancelled:
            # The worker's other calls go on, unless the handler's event loop itself hangs.
            self.cancel_if_unwanted()
            self._timeout = IdleTimeout(_CANCEL_PATIENCE, self._end_worker)
        else:
            self._end_worker()

    def _end_worker(self) -> None:
        self._worker.end(f"was ended because it {self._settings.overdue}")

    def _fail(self, status: int, message: str, kind: str = "EngineException") -> None:
        for request in self._requests:
            request.reply.reply(front_end_reply(status, kind, message), self._midway(status, message))

    def _midway(self, status: int, message: str) -> bytes:
        """The last bytes of a body that has begun: text, or in async mode, whose streams are JSON lines, an object."""
        return payload_error(message, status) if self._settings.async_mode else message.encode("utf-8", "replace")

    def _close(self) -> None:
        self._timeout.stop()
        if self._draining is not None:
            self._draining.cancel()
        self._on_finished()


class _BatchCall(_Call):
    """A call for several requests, which is not answered with a stream."""

    def on_output(self, output: OutputMessage, size: int) -> None:
        try:
            answers = split_output(output, len(self._requests))
        except BatchMismatch as error:
            self._fail(400, str(error), "TranslateException")
            self.cancel_if_unwanted()
            return
        for request, answer in zip(self._requests, answers, strict=True):
            request.reply.reply(reply_of(answer))

    def _message(self) -> InputMessage:
        entries = (prefixed(index, request.message) for index, request in enumerate(self._requests))
        return joined(entries, len(self._requests))


class IdleTimeout:
    """Calls `expired` once `seconds` have passed since the last `restart`, not counting pauses.

    A restart costs an assignment, so that it can be done for every part of a stream.
    """

    def __init__(self, seconds: float, expired: Callable[[], None], paused: Callable[[], bool] = lambda: False) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._expired, self._paused = seconds, expired, paused
        self._started = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def restart(self) -> None:
        """Count from now."""
        self._started = self._loop.time()

    def stop(self) -> None:
        """Never expire."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._paused():
            self.restart()
        left = self._started + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._expired()


class BatchMismatch(Exception):
    """The handler did not answer each request of a batch once."""


def prefixed(index: int, message: InputMessage) -> InputMessage:
    """One request's entries as they appear in a batch."""
    prefix = f"batch_{index:03d}."
    return InputMessage(
        tuple((prefix + name, value) for name, value in message.properties),
        tuple((prefix + (key or "data"), value) for key, value in message.contents),
    )


def joined(messages: Iterable[InputMessage], size: int, *more: tuple[str, str]) -> InputMessage:
    """One message of several, with properties of the whole batch."""
    parts = list(messages)
    properties = [pair for part in parts for pair in part.properties]
    contents = [pair for part in parts for pair in part.contents]
    return InputMessage((*more, ("batch_size", str(size)), *properties), tuple(contents))


def split_output(output: OutputMessage, size: int) -> list[OutputMessage]:
    """One output for each request. An error, and an output without content, is the answer to all of them.

    Raises:
        BatchMismatch: it does not answer each request once.
    """
    if output.streams:
        raise BatchMismatch("a batch of requests cannot be answered with a stream")
    if output.code >= 300 or output.code == 204:
        return [output] * size
    if len(output.contents) != size:
        raise BatchMismatch(f"Batch output size mismatch, expected: {size}, actual: {len(output.contents)}")
    answers: dict[int, OutputMessage] = {}
    for key, value in output.contents:
        match = _KEY.fullmatch(key or "")
        index = int(match[1]) if match else -1
        if match is None or index >= size or index in answers:
            raise BatchMismatch(f"Unexpected batch output key: {key}")
        answers[index] = OutputMessage(
            code=output.code, message=output.message, properties=output.properties, contents=((match[2], value),)
        )
    return [answers[index] for index in range(size)]


_HEADER = re.compile(r"batch_([0-9]{1,9})_(.+)", re.DOTALL)
_RESET = ("reset_rollingbatch", "true")
_BATCH_FAILED = (
    '{"code":CODE,"message":"Batch inference failed","properties":{},"content":{"keys":[],"values":[]},'
    '"cancelled":false}'
)
"""LMI's body for a rolling batch that has failed as a whole."""


@dataclass(slots=True)
class _Active:
    """A request from its first step to its last."""

    request: Request
    seen: bool = False
    """A step has answered it."""
    last: bool = False
    """The answer is complete."""
    seed: str = field(default_factory=lambda: str(random.getrandbits(31)))

    def entry(self, index: int) -> InputMessage:
        """Its entries in a step's input: all of them the first time, empty data later."""
        if self.seen:
            return prefixed(index, InputMessage((), (("data", b""),)))
        message = self.request.message
        contents = (("data", data_of(message.contents)), ("seed", self.seed.encode()))
        return prefixed(index, InputMessage(message.properties, contents))


class RollingBatcher(_Timed, Receiver):
    """Each step is a call.

    A request stays in the handler's batch until the handler marks its last part; it cannot be taken out earlier. So the
    requests of clients that have gone run on, until all clients of the batch have gone. The batch waits for no client.
    """

    def __init__(self, worker: Worker, settings: CallSettings, on_free: Callable[[], None]) -> None:
        super().__init__(worker, settings, on_free)
        self._limit = min(settings.max_rolling_batch_size, MAX_BATCH)
        self._active: list[_Active] = []
        self._call: int | None = None
        """The running step."""
        self._in_step = 0
        """How many of the active requests the step has, the first ones."""
        self._answered = False
        self._reset = False
        """The next step tells the handler to forget all requests."""

    @property
    def free(self) -> bool:
        return len(self._active) < self._limit

    @property
    def busy(self) -> bool:
        return bool(self._active) or self._call is not None

    @property
    def rank(self) -> int:
        return len(self._active)

    def take(self, request: Request) -> None:
        self._active.append(_Active(request))
        self._step()

    def cancel(self, request: Request) -> None:
        if self._call is None:
            self._forget_if_unwanted()

    def recall(self) -> list[Request]:
        self._stop_timer()
        waiting, self._active = self._active[self._in_step :], self._active[: self._in_step]
        return [active.request for active in waiting]

    def on_output(self, output: OutputMessage, size: int) -> None:
        self._answered = True
        parts = [part for _, content in output.contents if (part := decode_part(content)) is not None]
        if output.code != 200 or output.streams or not len(parts) == len(output.contents) == self._in_step:
            self._fail_step(output)
            return
        headers = _headers_by_request(output.properties)
        for index, (active, part) in enumerate(zip(self._active[: self._in_step], parts, strict=True)):
            active.seen, active.last = True, part.last
            named = (("Content-Type", part.content_type),) if part.content_type else ()
            active.request.reply.accept(part, (*named, *headers.get(index, ())))
        unfinished = [active for active in self._active[: self._in_step] if not active.last]
        self._active[: self._in_step] = unfinished
        self._in_step = len(unfinished)

    def on_done(self) -> None:
        if not self._answered:
            self._fail_step(OutputMessage(code=FAILED_DEPENDENCY, message="no answer"))
        self._stop_timer()
        self._in_step = 0
        self._forget_if_unwanted()
        self._on_free()  # requests that come in here join the next step
        self._call = None
        self._step()
        if not self.busy:
            self._on_free()  # once more, now that it is idle

    def on_lost(self, reason: str) -> None:
        status = self._settings.unavailable_status
        message = f"the handler's worker {reason} during the request"
        self._end_step(front_end_reply(status, "EngineException", message), payload_error(message, status))

    def _step(self) -> None:
        if self._call is not None or not self._active:
            return
        more = (_RESET,) if self._reset else ()
        entries = (active.entry(index) for index, active in enumerate(self._active))
        self._in_step, self._answered, self._reset = len(self._active), False, False
        self._call = self.worker.call(joined(entries, self._in_step, *more), self)
        self._start_timer(self._settings.predict_timeout, self._on_timeout)

    def _on_timeout(self) -> None:
        failure = payload_error(f"the handler {self._settings.overdue}")
        self._end_step(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        self.worker.end(f"was ended because it {self._settings.overdue}")

    def _fail_step(self, output: OutputMessage) -> None:
        """Fail all requests of the step: the handler has given up on the batch."""
        logger.error(
            "%s: the rolling batch failed with code %s and %s entries for %s requests: %s",
            *(self.worker.name, output.code, len(output.contents), self._in_step, output.message),
            extra={"worker": self.worker.name},
        )
        if output.streams and self._call is not None:
            self.worker.cancel(self._call)  # nobody reads the stream
        code = output.code if output.code >= 300 else FAILED_DEPENDENCY
        body = _BATCH_FAILED.replace("CODE", str(code)).encode()
        self._end_step(Reply(code, "", body), body)

    def _end_step(self, reply: Reply, midway: bytes) -> None:
        for active in self._active[: self._in_step]:
            active.request.reply.reply(reply, midway)
        self._active = self._active[self._in_step :]
        self._in_step = 0
        self._reset = True

    def _forget_if_unwanted(self) -> None:
        """Drop all requests once all their clients have gone; the handler forgets them with the next step."""
        if self._active and not any(active.request.reply.open for active in self._active):
            self._reset = self._reset or any(active.seen for active in self._active)
            self._active.clear()
            self._on_free()


Batcher = CallBatcher | RollingBatcher
"""Turns the requests of one worker into calls."""


def _headers_by_request(properties: Properties) -> dict[int, Properties]:
    """The properties `batch_<i>_<Header-Name>`, by request."""
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}
