"""Custom rolling batches: the handler is called again and again with all active requests.

Source: contracts/lmi.md sections 1.6 (E4), 1.8 and 7.7.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Reply
from handlers.workers.batch_messages import MAX_BATCH, joined, prefixed
from handlers.workers.job import Job
from handlers.workers.lanes import LaneSettings, Watch
from handlers.workers.reply import Part, batch_failure, decode_part
from handlers.workers.runtime.messages import InputMessage, OutputMessage, Properties, data_of
from handlers.workers.worker import Worker

logger = logging.getLogger("handlers.workers")

_MAX_UNREAD = 4 * 1024 * 1024
"""Bytes that a client may leave unread. The batch waits for no client, so one beyond this is cut off."""

_ENOUGH = 128 * 1024
"""Bytes after which it is asked how far the client has come."""

_HEADER = re.compile(r"batch_([0-9]{1,9})_(.+)", re.DOTALL)


def headers_by_request(properties: Properties) -> dict[int, Properties]:
    """Properties `batch_<i>_<Header-Name>`, by request."""
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}


class RollingRequest:
    """A request from the first step that has it to the last."""

    __slots__ = ("_draining", "_seed", "_unread", "job", "last", "seen")

    def __init__(self, job: Job, seed: str) -> None:
        self.job = job
        self._seed = seed
        self.seen = False
        """A step has answered for it."""
        self.last = False
        self._unread = 0
        self._draining: asyncio.Task[None] | None = None

    def entry(self, index: int) -> InputMessage:
        """Its part of a step's input: all of it the first time, empty data later."""
        if self.seen:
            return prefixed(index, InputMessage((), (("data", b""),)))
        message = self.job.message
        contents = (("data", data_of(message.contents)), ("seed", self._seed.encode()))
        return prefixed(index, InputMessage(message.properties, contents))

    def accept(self, part: Part, headers: Properties) -> None:
        """What a step has answered for it."""
        self.seen, self.last = True, part.last
        named = (("Content-Type", part.content_type),) if part.content_type else ()
        self.job.delivery.accept(part, (*named, *headers), self._write)

    def _write(self, data: bytes) -> None:
        delivery = self.job.delivery
        if self._unread > _MAX_UNREAD:
            logger.warning("a client left %s bytes unread and is cut off", self._unread)
            failure = payload_error("the client has left too much of the answer unread")
            delivery.fail(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        delivery.write(data)
        self._unread += len(data)
        if self._unread > _ENOUGH and self._draining is None and delivery.open:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self.job.delivery.writer.drain()
        self._unread = 0
        self._draining = None


_RESET = ("reset_rollingbatch", "true")


class RollingLane:
    """Implements `handlers.workers.job.Lane` and `handlers.workers.worker.Receiver`; one step is one call.

    A request stays in the handler's batch until the handler says that it is the last: there is no way to take it out
    before. So a client that has gone is served on without anybody to read it, unless all have gone.
    """

    def __init__(self, worker: Worker, settings: LaneSettings, on_free: Callable[[], None]) -> None:
        self.worker = worker
        self._settings = settings
        self._limit = min(settings.max_rolling_batch_size, MAX_BATCH)
        self._on_free = on_free
        self._active: list[RollingRequest] = []
        self._call: int | None = None
        """The running step."""
        self._in_step = 0
        """How many of the active requests it has."""
        self._answered = False
        self._reset = False
        self._watch: Watch | None = None

    @property
    def free(self) -> int:
        """Places in the batch."""
        return self._limit - len(self._active)

    @property
    def busy(self) -> bool:
        """Whether it has any request."""
        return bool(self._active) or self._call is not None

    @property
    def reluctance(self) -> int:
        """The smallest batch is the best."""
        return len(self._active)

    def take(self, job: Job) -> None:
        """Add a request; it joins the next step."""
        self._active.append(RollingRequest(job, str(random.getrandbits(31))))
        self._step()

    def cancel(self, job: Job) -> None:
        """Nobody waits for a request any more."""
        job.delivery.drop()
        if self._call is None:
            self._forget_if_unwanted()

    def recall(self) -> list[Job]:
        """The requests that joined after the last step had begun."""
        self._stop_watch()
        waiting, self._active = self._active[self._in_step :], self._active[: self._in_step]
        return [request.job for request in waiting]

    def on_output(self, output: OutputMessage, size: int) -> None:
        """Called by the worker: the result of a step."""
        self._answered = True
        if output.streams and self._call is not None:
            self.worker.cancel(self._call)
        parts = [decode_part(content) for _, content in output.contents]
        if output.code != 200 or output.streams or len(parts) != self._in_step or None in parts:
            self._fail_step(output)
            return
        headers = headers_by_request(output.properties)
        for index, part in enumerate(parts):
            if part is not None:
                self._active[index].accept(part, headers.get(index, ()))
        rest = self._active[self._in_step :]
        going_on = [request for request in self._active[: self._in_step] if not request.last]
        self._active, self._in_step = going_on + rest, len(going_on)

    def on_chunk(self, chunk: bytes) -> None:
        """Called by the worker: rest of a stream that was refused."""

    def on_stream_end(self, failure: OutputMessage | None) -> None:
        """Called by the worker: end of a stream that was refused."""

    def on_done(self) -> None:
        """Called by the worker: the step has ended."""
        if not self._answered:
            self._fail_step(OutputMessage(code=FAILED_DEPENDENCY, message="no answer"))
        self._stop_watch()
        self._in_step = 0
        self._forget_if_unwanted()
        self._on_free()  # what comes in here joins the next step
        self._call = None
        self._step()
        if not self.busy:
            self._on_free()  # now that it is idle, for as long as a surplus worker may be

    def on_lost(self, reason: str) -> None:
        """Called by the worker."""
        status = self._settings.unavailable_status
        message = f"the handler's worker {reason} during the request"
        self._end_step(front_end_reply(status, "EngineException", message), payload_error(message, status))

    def _step(self) -> None:
        if self._call is not None or not self._active:
            return
        size = len(self._active)
        more: tuple[tuple[str, str], ...] = ()
        if self._reset:
            more, self._reset = (_RESET,), False
        entries = (request.entry(index) for index, request in enumerate(self._active))
        self._in_step, self._answered = size, False
        self._call = self.worker.call(joined(entries, size, *more), self)
        self._watch = Watch(self._settings.predict_timeout, self._expired)

    def _expired(self) -> None:
        reason = f"did not answer within {self._settings.predict_timeout:g} seconds (predict_timeout)"
        failure = payload_error(f"the handler {reason}")
        self._end_step(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        self.worker.end(f"was ended because it {reason}")

    def _fail_step(self, output: OutputMessage) -> None:
        """The handler gave up on the batch: all its requests fail, and it is to start anew."""
        logger.error(
            "%s: the rolling batch failed with code %s and %s entries for %s requests: %s",
            *(self.worker.name, output.code, len(output.contents), self._in_step, output.message),
            extra={"worker": self.worker.name},
        )
        code = output.code if output.code >= 300 else FAILED_DEPENDENCY
        body = batch_failure(code)
        self._end_step(Reply(code, "", body), body)

    def _end_step(self, reply: Reply, midway: bytes) -> None:
        for request in self._active[: self._in_step]:
            request.job.delivery.fail(reply, midway)
        self._active = self._active[self._in_step :]
        self._in_step = 0
        self._reset = True

    def _forget_if_unwanted(self) -> None:
        """Once all clients of a batch have gone the handler is to start anew with the next one."""
        if self._active and not any(request.job.delivery.open for request in self._active):
            self._reset = self._reset or any(request.seen for request in self._active)
            self._active.clear()
            self._on_free()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
