"""The HTTP reply to one request. Each part is sent immediately, without a task or a wait."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

from container.http.custom_attributes import with_attributes
from container.http.uvicorn_protocol import CorkedTransport, chunked_connection
from handlers.contract import WITHOUT_BODY, Reply
from handlers.deadline import REACHED

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]

# The maximum number of bytes of a stream that wait here because its client reads slowly. The connection has its own
# buffer in addition. A single part may be larger than this limit.
MAX_UNSENT = 16 * 1024 * 1024

OVERLOADED = (429, 503)
_COME_AGAIN = 64  # The number of refused clients that may retry per second. More retries would slow down the engine.
_MOST_SECONDS = 30


class RetryAfter:
    """The time after which a refused client may retry: one second, or more if many clients are refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds, self._refused, self._since = 1, 0, clock()

    def header(self) -> tuple[bytes, bytes]:
        """Count a refusal and return its `retry-after` header."""
        now = self._clock()
        if (passed := now - self._since) >= self._seconds:
            crowd = self._refused * self._seconds / passed
            self._seconds = min(max(1, math.ceil(crowd / _COME_AGAIN)), _MOST_SECONDS)
            self._since, self._refused = now, 0
        self._refused += 1
        return (b"retry-after", b"%d" % self._seconds)


class HttpReply:
    """A `ReplyWriter` that writes to ASGI's `send`."""

    def __init__(
        self,
        send: Send,
        headers: Headers,
        retry_after: RetryAfter,
        break_off: Callable[[], None] | None = None,
    ) -> None:
        """Create the writer.

        Args:
            send: ASGI's callable.
            headers: Headers of every reply. A reply's headers replace headers of the same name.
            retry_after: Creates the server's `retry-after` headers.
            break_off: Closes the connection at once.
        """
        self._send, self.headers, self._break_off = send, headers, break_off
        self._retry_after = retry_after
        self._connection: CorkedTransport | None = None  # The connection for chunks. If None, parts go to `send`.
        self._broken = False
        self._resuming: asyncio.Task[None] | None = None  # Sends the backlog. None if there is no backlog.
        self._backlog = bytearray()
        self._backlog_last = False
        self._latest: Callable[[], bytes] | None = None
        self.status = 0  # 0 until the reply has begun.
        self.finished = False  # Whether the whole reply has been written.
        self.bytes_sent = 0
        self.ended_at_deadline = False  # Whether the deadline ended the answer or caused the error.
        self.request_id: str | None = None  # The id in the reply's own headers. It overrides the call's id.

    def reply(self, reply: Reply) -> None:
        framing: Headers = []
        if reply.status not in WITHOUT_BODY:
            if reply.content_type:
                framing.append((b"content-type", reply.content_type.encode("latin-1")))
            framing.append((b"content-length", str(len(reply.body)).encode()))
        self.ended_at_deadline = REACHED[0] in reply.headers
        if (
            reply.status in OVERLOADED
            and not self.ended_at_deadline
            and not any(name == b"retry-after" for name, _ in self.headers)
        ):
            # `self.headers` has a `retry-after` header if the model is not ready. A `retry-after` header in
            # `reply.headers` replaces the header that is added here.
            self.headers = [*self.headers, self._retry_after.header()]
        self._start(reply.status, framing, reply.headers)
        self.end(b"" if reply.status in WITHOUT_BODY else reply.body)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin a reply of unknown length. The body is sent in chunks."""
        self._start(status, [(b"content-type", content_type.encode("latin-1"))] if content_type else [], headers)
        self._connection = chunked_connection(self._send)

    def _start(self, status: int, framing: Headers, more: tuple[tuple[str, str], ...]) -> None:
        self.status = status
        headers = self.headers
        if more:
            own = with_attributes([(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in more])
            names = {name for name, _ in own}
            self.request_id = next((value for name, value in more if name == "x-request-id"), None)
            headers = [*own, *(pair for pair in headers if pair[0] not in names)]
        self._push({"type": "http.response.start", "status": status, "headers": [*framing, *headers]})

    def write(self, data: bytes) -> None:
        """Add a part to the body."""
        if self._broken:
            return
        self.bytes_sent += len(data)
        if self._resuming is not None:
            self._keep(data)
        elif (connection := self._connection) is not None and data and not connection.paused:
            connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._push({"type": "http.response.body", "body": data, "more_body": True})

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """Add the result of `part` to the body. `part` is called once the client has read all earlier parts."""
        if self._resuming is None:
            self.write(part())
        else:
            self._latest = part

    def end(self, data: bytes) -> None:
        """Finish the reply with these bytes."""
        self._latest = None
        if self._broken:
            return
        self.finished = True
        self.bytes_sent += len(data)
        if self._resuming is not None:
            self._keep(data)
            self._backlog_last = not self._broken
        else:
            self._push({"type": "http.response.body", "body": data, "more_body": False})

    async def drain(self) -> None:
        """Wait until this object holds no unsent bytes. The connection may still hold some."""
        while self._resuming is not None and not self._resuming.done():
            await asyncio.wait({self._resuming})

    def _push(self, message: Message) -> None:
        """Send a message now, without a task. If the server has to wait for the client, a task sends the rest."""
        sending = self._send(message)
        try:
            waiting_for = sending.send(None)
        except StopIteration:
            return
        self._resuming = asyncio.create_task(self._resume(_rest(sending, waiting_for)))

    def _keep(self, data: bytes) -> None:
        if self._backlog and len(self._backlog) + len(data) > MAX_UNSENT:
            logger.warning("a client does not read: its connection is broken off with %d bytes unsent", MAX_UNSENT)
            self._give_up()
            return
        self._backlog += data

    async def _resume(self, sending: Awaitable[None]) -> None:
        """Send the backlog until the client keeps up again."""
        try:
            await sending
            last = False
            while not last and (self._backlog or self._backlog_last or self._latest is not None):
                if self._latest is not None:
                    part, self._latest = self._latest(), None
                    self._backlog += part
                    self.bytes_sent += len(part)
                data, last = bytes(self._backlog), self._backlog_last
                self._backlog.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        except Exception:
            logger.exception("a reply cannot be continued: its connection is broken off")
            self._give_up()
        self._resuming = None

    def _give_up(self) -> None:
        """Close the connection. The request's task then finds that the client has left."""
        self.finished, self._broken = False, True
        self._backlog.clear()
        self._latest = None
        if self._break_off is not None:
            self._break_off()


@types.coroutine
def _rest(steps: Coroutine[Any, Any, None], waiting_for: Any) -> Generator[Any, Any, None]:
    """Continue a coroutine, in a task. The coroutine has already run until it awaited the future `waiting_for`."""
    yield waiting_for
    yield from steps.__await__()
