"""Custom rolling batches: the handler is called again and again, each time with all active requests."""

from __future__ import annotations

import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Reply
from handlers.workers.batching import MAX_BATCH, Batcher, CallSettings, Request, joined, prefixed
from handlers.workers.reply import decode_part
from handlers.workers.runtime.channel import InputMessage, OutputMessage, Properties, data_of
from handlers.workers.worker import Receiver, Worker

logger = logging.getLogger("handlers.workers")

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


class RollingBatcher(Batcher, Receiver):
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


def _headers_by_request(properties: Properties) -> dict[int, Properties]:
    """The properties `batch_<i>_<Header-Name>`, by request."""
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}
