"""How a worker's requests become calls of its handler: one by one, several in one call, or all of them step by step."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from handlers.contract import Reply
from handlers.custom.reply import HandlerReply, decode_part, reply_of
from handlers.custom.runtime.channel import CREDIT, Contents, Kind, Message, Properties
from handlers.custom.worker import Worker
from handlers.djl_errors import FAILED_DEPENDENCY, JSON, front_end_reply, payload_error

logger = logging.getLogger("handlers.custom")

MAX_BATCH = 999  # Entries are numbered with three digits, from 0.

_KEY = re.compile(r"batch_([0-9]{1,9})\.(.*)", re.DOTALL)
CLIENT_PATIENCE = 120.0  # Seconds for which a client may take nothing of its stream; then its call is cancelled.
# Seconds in which an async handler has to end a cancelled call; after them the worker counts as hung.
_CANCEL_PATIENCE = 5.0


@dataclass(slots=True, eq=False)
class Request:
    """One request for a handler; implements `Running`."""

    message: Message
    reply: HandlerReply
    priority: int  # Lower ones leave the queue earlier.
    number: int = 0  # Order of arrival.
    arrived_at: float = 0.0  # On the event loop's clock.
    # Takes the request out of the queue, or the call that it is in; None where it runs on.
    forget: Callable[[Request], None] | None = None

    def cancel(self) -> None:
        if self.reply.open:
            self.reply.open = False
            if self.forget is not None:
                self.forget(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How requests wait and become calls. Durations are in seconds."""

    queue_size: int  # Requests that may wait while every worker is busy.
    overload_status: int
    unavailable_status: int
    predict_timeout: float
    async_mode: bool
    concurrency: int  # Calls that one worker has at a time.
    batch_size: int
    max_batch_delay: float
    max_rolling_batch_size: int

    @property
    def overdue(self) -> str:
        """The end of a sentence about a handler that exceeded `predict_timeout`."""
        return f"did not answer within {self.predict_timeout:g} seconds (predict_timeout)"


class CallBatcher:
    """A call has one request, or up to `batch_size`. A worker has one call at a time, in async mode `concurrency`. A
    batch of one runs as without batching."""

    def __init__(self, worker: Worker, settings: CallSettings, on_free: Callable[[], None]) -> None:
        """`on_free` is called when a call or a step has ended."""
        self.worker, self._settings, self._on_free = worker, settings, on_free
        self._calls: set[_Call] = set()

    @property
    def load(self) -> int:
        """Calls, or requests, that it has; the batcher with the fewest gets the next request."""
        return len(self._calls)

    @property
    def room(self) -> int:
        return self._settings.batch_size if len(self._calls) < self._settings.concurrency else 0

    places = room  # How many requests it takes now or with its next step.

    def begin(self, requests: list[Request]) -> None:
        """Begin with requests, at most as many as there is room for."""
        kind = _Call if len(requests) == 1 else _BatchCall
        self._calls.add(kind(self.worker, requests, self._settings, self._finished))

    def _finished(self, call: _Call) -> None:
        self._calls.discard(call)
        self._on_free()


class _Call:
    """A call for one request."""

    def __init__(
        self, worker: Worker, requests: list[Request], settings: CallSettings, on_finished: Callable[[_Call], None]
    ) -> None:
        self._worker, self._requests, self._settings = worker, requests, settings
        self._on_finished = on_finished
        self._reply = requests[0].reply
        self._cancelled = False
        self._uncredited = 0  # Bytes that the worker has sent and has got no credit for.
        self._draining: asyncio.Task[None] | None = None
        self._call = worker.call(self._message(), self)
        self._timeout = IdleTimeout(settings.predict_timeout, self._on_timeout, self._waits_for_client)
        for request in requests:
            request.forget = lambda _: self._cancel_if_unwanted()

    def _cancel_if_unwanted(self) -> None:
        """Have the handler end the call once no client waits for it any more."""
        if not any(request.reply.open for request in self._requests):
            self._cancelled = True
            self._worker.cancel(self._call)

    def on_message(self, message: Message) -> None:
        self._timeout.restart()
        if message.kind is Kind.OUTPUT:
            self._on_output(message)
        elif message.kind is Kind.CHUNK:
            self._reply.write(message.data)
        elif message.kind is Kind.STREAM_END or self._reply.started:
            self._reply.end()
        if message.kind is Kind.DONE:
            self._fail(FAILED_DEPENDENCY, "the handler ended without an answer")  # unless it has answered
            self._close()
        else:
            self._received(message.size)

    def _on_output(self, output: Message) -> None:
        part = decode_part(output.data) if self._settings.async_mode and output.code == 200 else None
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

    def on_lost(self, reason: str) -> None:
        self._fail(self._settings.unavailable_status, f"the handler's worker {reason} during the request")
        self._close()

    def _message(self) -> Message:
        return self._requests[0].message

    def _received(self, size: int) -> None:
        """Count received bytes; as its client takes them, the worker gets credit for more."""
        self._uncredited += size
        if self._uncredited >= CREDIT and self._draining is None and not self._cancelled:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._uncredited >= CREDIT:
                async with asyncio.timeout(CLIENT_PATIENCE):
                    await self._reply.writer.drain()
                self._uncredited -= CREDIT
                self._worker.credit(self._call)
        except TimeoutError:
            # A client that does not read must not keep the worker from others.
            message = f"the client took nothing for {CLIENT_PATIENCE:g} seconds"
            logger.warning("%s: %s", self._worker.name, message, extra={"worker": self._worker.name})
            self._fail(self._settings.unavailable_status, message)
            self._cancel_if_unwanted()
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
            self._cancel_if_unwanted()
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
        self._on_finished(self)


class _BatchCall(_Call):
    """A call for several requests, which is not answered with a stream."""

    def _on_output(self, output: Message) -> None:
        try:
            answers = split_output(output, len(self._requests))
        except BatchMismatch as error:
            self._fail(400, str(error), "TranslateException")
            self._cancel_if_unwanted()
            return
        for request, answer in zip(self._requests, answers, strict=True):
            request.reply.reply(reply_of(answer))

    def _message(self) -> Message:
        messages = (request.message for request in self._requests)
        return joined([prefixed(i, message.properties, message.contents) for i, message in enumerate(messages)])


class IdleTimeout:
    """Calls `expired` once `seconds` have passed since the last `restart`, not counting pauses. A restart costs an
    assignment, so that it can be done for every part of a stream."""

    def __init__(self, seconds: float, expired: Callable[[], None], paused: Callable[[], bool] = lambda: False) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._expired, self._paused = seconds, expired, paused
        self._started = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)

    def restart(self) -> None:
        self._started = self._loop.time()

    def stop(self) -> None:
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


def prefixed(index: int, properties: Properties, contents: Contents) -> Message:
    """One request's entries as they appear in a batch."""
    prefix = f"batch_{index:03d}."
    return Message(
        properties=tuple((prefix + name, value) for name, value in properties),
        contents=tuple((prefix + (key or "data"), value) for key, value in contents),
    )


def joined(messages: Sequence[Message], *more: tuple[str, str]) -> Message:
    """One message of several, with properties of the whole batch."""
    properties = [pair for message in messages for pair in message.properties]
    contents = [pair for message in messages for pair in message.contents]
    whole = (*more, ("batch_size", str(len(messages))), *properties)
    return Message(properties=whole, contents=tuple(contents))


def split_output(output: Message, size: int) -> list[Message]:
    """One output for each request. An error, and an output without content, is the answer to all of them. Raises
    BatchMismatch: it does not answer each request once."""
    if output.streams:
        raise BatchMismatch("a batch of requests cannot be answered with a stream")
    if output.code >= 300 or output.code == 204:
        return [output] * size
    if len(output.contents) != size:
        raise BatchMismatch(f"Batch output size mismatch, expected: {size}, actual: {len(output.contents)}")
    answers: dict[int, Message] = {}
    for key, value in output.contents:
        match = _KEY.fullmatch(key or "")
        index = int(match[1]) if match else -1
        if match is None or index >= size or index in answers:
            raise BatchMismatch(f"Unexpected batch output key: {key}")
        answers[index] = replace(output, contents=((match[2], value),))
    return [answers[index] for index in range(size)]


_HEADER = re.compile(r"batch_([0-9]{1,9})_(.+)", re.DOTALL)
_RESET = ("reset_rollingbatch", "true")
# LMI's body for a rolling batch that has failed as a whole.
_BATCH_FAILED = (
    '{"code":CODE,"message":"Batch inference failed","properties":{},"content":{"keys":[],"values":[]},'
    '"cancelled":false}'
)


@dataclass(slots=True)
class _Active:
    """A request from its first step to its last."""

    request: Request
    seen: bool = False  # A step has answered it.
    last: bool = False  # The answer is complete.
    seed: str = field(default_factory=lambda: str(random.getrandbits(31)))

    def entry(self, index: int) -> Message:
        """Its entries in a step's input: all of them the first time, empty data later."""
        if self.seen:
            return prefixed(index, (), (("data", b""),))
        message = self.request.message
        return prefixed(index, message.properties, (("data", message.data), ("seed", self.seed.encode())))


class RollingBatcher:
    """Each step is a call for all active requests; new ones come in between two steps.

    A request stays in the handler's batch until the handler marks its last part; it cannot be taken out earlier. So the
    requests of clients that have gone run on, until all clients of the batch have gone. The batch waits for no client.
    """

    def __init__(self, worker: Worker, settings: CallSettings, on_free: Callable[[], None]) -> None:
        self.worker, self._settings, self._on_free = worker, settings, on_free
        self._limit = min(settings.max_rolling_batch_size, MAX_BATCH)
        self._active: list[_Active] = []
        self._step: int | None = None  # The call of the running step.
        self._timeout: IdleTimeout | None = None
        self._answered = False
        self._reset = False  # The next step tells the handler to forget all requests.

    @property
    def load(self) -> int:
        return max(len(self._active), self._step is not None)

    @property
    def room(self) -> int:
        return self.places if self._step is None else 0

    @property
    def places(self) -> int:
        return self._limit - len(self._active)

    def begin(self, requests: list[Request]) -> None:
        for request in requests:
            request.forget = None  # it runs on
            self._active.append(_Active(request))
        more = (_RESET,) if self._reset else ()
        entries = [active.entry(index) for index, active in enumerate(self._active)]
        self._answered = self._reset = False
        self._step = self.worker.call(joined(entries, *more), self)
        self._timeout = IdleTimeout(self._settings.predict_timeout, self._on_timeout)

    def on_message(self, message: Message) -> None:
        if message.kind is Kind.OUTPUT:
            self._on_output(message)
        elif message.kind is Kind.DONE:
            self._on_done()

    def _on_output(self, output: Message) -> None:
        self._answered = True
        parts = [part for _, content in output.contents if (part := decode_part(content)) is not None]
        if output.code != 200 or output.streams or not len(parts) == len(output.contents) == len(self._active):
            self._fail_step(output)
            return
        headers = _headers_by_request(output.properties)
        for index, (active, part) in enumerate(zip(self._active, parts, strict=True)):
            active.seen, active.last = True, part.last
            named = (("Content-Type", part.content_type),) if part.content_type else ()
            active.request.reply.accept(part, (*named, *headers.get(index, ())))
        self._active = [active for active in self._active if not active.last]

    def _on_done(self) -> None:
        if not self._answered:
            self._fail_step(Message(code=FAILED_DEPENDENCY, message="no answer"))
        self._end()
        if self._active and not any(active.request.reply.open for active in self._active):
            self._active.clear()
            self._reset = True  # the handler forgets them with the next step
        self._on_free()
        if self._step is None and self._active:
            self.begin([])

    def on_lost(self, reason: str) -> None:
        self._end()
        status = self._settings.unavailable_status
        message = f"the handler's worker {reason} during the request"
        self._fail(front_end_reply(status, "EngineException", message), payload_error(message, status))

    def _end(self) -> None:
        self._step = None
        if self._timeout is not None:
            self._timeout.stop()

    def _on_timeout(self) -> None:
        failure = payload_error(f"the handler {self._settings.overdue}")
        self._fail(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        self.worker.end(f"was ended because it {self._settings.overdue}")

    def _fail_step(self, output: Message) -> None:
        """Fail all requests: the handler has given up on the batch."""
        logger.error(
            "%s: the rolling batch failed with code %s and %s entries for %s requests: %s",
            *(self.worker.name, output.code, len(output.contents), len(self._active), output.message),
            extra={"worker": self.worker.name},
        )
        if output.streams and self._step is not None:
            self.worker.cancel(self._step)  # nobody reads the stream
        code = output.code if output.code >= 300 else FAILED_DEPENDENCY
        body = _BATCH_FAILED.replace("CODE", str(code)).encode()
        self._fail(Reply(code, "", body), body)

    def _fail(self, reply: Reply, midway: bytes) -> None:
        for active in self._active:
            active.request.reply.reply(reply, midway)
        self._active.clear()
        self._reset = True


Batcher = CallBatcher | RollingBatcher  # Turns the requests of one worker into calls.


def _headers_by_request(properties: Properties) -> dict[int, Properties]:
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}
