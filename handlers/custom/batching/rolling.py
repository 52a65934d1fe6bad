"""Rolling batches of a handler that generates step by step: each step is one call for all active requests."""

from __future__ import annotations

import logging
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from handlers.contract import JSON, Reply
from handlers.custom.batching.format import MAX_BATCH, joined, prefixed
from handlers.custom.batching.idle_timeout import IdleTimeout
from handlers.custom.handler_reply import decode_part
from handlers.custom.request import CallLimits, Request
from handlers.custom.worker import Worker
from handlers.custom.worker_process.socket_protocol import Message, MessageKind, Properties
from handlers.djl_errors import FAILED_DEPENDENCY, front_end_reply, payload_error

logger = logging.getLogger("handlers.custom")

_HEADER = re.compile(r"batch_([0-9]{1,9})_(.+)", re.DOTALL)
_RESET = ("reset_rollingbatch", "true")
# LMI's body when a whole rolling batch has failed.
_BATCH_FAILED = (
    '{"code":CODE,"message":"Batch inference failed","properties":{},"content":{"keys":[],"values":[]},'
    '"cancelled":false}'
)


@dataclass(slots=True)
class _ActiveRequest:
    """A request of the batch, from its first step to its last."""

    request: Request
    seen: bool = False  # Whether the handler has answered the request in a step.
    seed: str = field(default_factory=lambda: str(random.getrandbits(31)))

    def entry(self, index: int) -> Message:
        """Return the request's entries for a step: the whole request at first, and empty data in later steps."""
        if self.seen:
            return prefixed(index, (), (("data", b""),))
        message = self.request.message
        return prefixed(index, message.properties, (("data", message.data), ("seed", self.seed.encode())))


class RollingBatcher:
    """Calls the handler of one worker step by step.

    New requests join the batch between two steps. A request stays in the handler's batch until the handler marks its
    last part, and cannot be removed earlier. So the request of a client that disconnects continues until its last part,
    or until all clients of the batch have disconnected. The batch does not wait for slow clients.
    """

    def __init__(self, worker: Worker, limits: CallLimits, on_free: Callable[[], None]) -> None:
        self.worker, self._limits, self._on_free = worker, limits, on_free
        self._most = min(limits.max_rolling_batch_size, MAX_BATCH)
        self._active: list[_ActiveRequest] = []
        self._step: int | None = None  # The call number of the running step.
        self._timeout: IdleTimeout | None = None
        self._answered = False  # Whether the running step has an output.
        self._reset = False  # If True, the next step tells the handler to drop all requests.

    @property
    def load(self) -> int:
        return max(len(self._active), self._step is not None)

    @property
    def room(self) -> int:
        return self.places if self._step is None else 0

    @property
    def places(self) -> int:
        return self._most - len(self._active)

    def begin(self, requests: list[Request]) -> None:
        for request in requests:
            request.forget = None  # The handler's batch cannot drop a single request.
            self._active.append(_ActiveRequest(request))
        more = (_RESET,) if self._reset else ()
        entries = [active.entry(index) for index, active in enumerate(self._active)]
        self._answered = self._reset = False
        self._step = self.worker.call(joined(entries, *more), self)
        self._timeout = IdleTimeout(self._limits.predict_timeout, self._on_timeout)

    def on_message(self, message: Message) -> None:
        if message.kind is MessageKind.OUTPUT:
            self._on_output(message)
        elif message.kind is MessageKind.DONE:
            self._on_done()

    def _on_output(self, output: Message) -> None:
        self._answered = True
        parts = [part for _, content in output.contents if (part := decode_part(content)) is not None]
        if output.code != 200 or output.streams or not len(parts) == len(output.contents) == len(self._active):
            self._fail_step(output)
            return
        headers = _headers_by_request(output.properties)
        for index, (active, part) in enumerate(zip(self._active, parts, strict=True)):
            active.seen = True
            named = (("Content-Type", part.content_type),) if part.content_type else ()
            active.request.reply.accept(part, (*named, *headers.get(index, ())))
        self._active = [active for active, part in zip(self._active, parts, strict=True) if not part.last]

    def _on_done(self) -> None:
        if not self._answered:
            self._fail_step(Message(code=FAILED_DEPENDENCY, message="no answer"))
        self._end()
        if self._active and not any(active.request.reply.open for active in self._active):
            self._active.clear()
            self._reset = True  # The handler drops the requests in the next step.
        self._on_free()
        if self._step is None and self._active:
            self.begin([])

    def on_lost(self, reason: str) -> None:
        self._end()
        status = self._limits.unavailable_status
        message = f"the handler's worker {reason} during the request"
        self._fail(front_end_reply(status, "EngineException", message), payload_error(message, status))

    def _end(self) -> None:
        self._step = None
        if self._timeout is not None:
            self._timeout.stop()

    def _on_timeout(self) -> None:
        failure = payload_error(f"the handler {self._limits.overdue}")
        self._fail(Reply(FAILED_DEPENDENCY, JSON, failure), failure)
        self.worker.end_hung(f"was ended because it {self._limits.overdue}")

    def _fail_step(self, output: Message) -> None:
        """Fail all requests, because the step's output does not have a part for each request."""
        logger.error(
            "%s: the rolling batch failed with code %s and %s entries for %s requests: %s",
            *(self.worker.name, output.code, len(output.contents), len(self._active), output.message),
            extra={"worker": self.worker.name},
        )
        if output.streams and self._step is not None:
            self.worker.cancel(self._step)  # The stream is not read.
        code = output.code if output.code >= 300 else FAILED_DEPENDENCY
        body = _BATCH_FAILED.replace("CODE", str(code)).encode()
        self._fail(Reply(code, "", body), body)

    def _fail(self, reply: Reply, midway: bytes) -> None:
        for active in self._active:
            active.request.reply.reply(reply, midway)
        self._active.clear()
        self._reset = True


def _headers_by_request(properties: Properties) -> dict[int, Properties]:
    headers: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, value in properties:
        if match := _HEADER.fullmatch(name):
            headers[int(match[1])].append((match[2], value))
    return {index: tuple(pairs) for index, pairs in headers.items()}
