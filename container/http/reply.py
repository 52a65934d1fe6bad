"""Headers of replies: those that LMI's routes carry, and CORS. Source: contracts/lmi.md sections 1.5 and 1.12."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Generic, TypeVar

from container.http.protocol import Cork
from container.settings.settings import ServerSettings
from handlers.contracts.protocol import WITHOUT_BODY, Reply

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

MAX_UNSENT = 16 * 1024 * 1024
"""Bytes of a stream that wait for its client, beside as many in the connection; a single part may be larger."""


class StreamCork(Cork):
    """Joins what one turn of the event loop writes to a stream into one part, once many streams are open.

    A turn holds several parts of one stream only where the engine's steps come faster than they are sent, and then
    fewer and larger parts are what saves time. Nothing waits for a clock.
    """

    def __init__(self, crowd: int) -> None:
        """`crowd`: so many open streams are many; 0: no number is."""
        super().__init__()
        self._crowd = crowd
        self.open_streams = 0

    @property
    def crowded(self) -> bool:
        """Whether many streams are open now."""
        return 0 < self._crowd <= self.open_streams


class PushedReply:
    """One HTTP reply; implements `handlers.reply.ReplyWriter`."""

    __slots__ = (
        "_abandoned",
        "_backlog",
        "_backlog_last",
        "_backlog_size",
        "_cork",
        "_give_up",
        "_headers",
        "_held",
        "_latest",
        "_resume",
        "_send",
        "_streaming",
        "bytes_sent",
        "finished",
        "status",
    )

    def __init__(
        self, send: Send, headers: Headers, cork: StreamCork, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """`give_up`: breaks the connection off, which the request's own task then finds."""
        self._send = send
        self._give_up = give_up
        self._headers = headers
        self._cork = cork
        self._held: list[bytes] = []
        self._streaming = False
        self._resume: asyncio.Task[None] | None = None
        self._backlog: list[bytes] = []
        self._backlog_size = 0
        self._backlog_last = False
        self._latest: Callable[[], bytes] | None = None
        self._abandoned = False
        self.status = 0
        """0 until the reply has begun."""
        self.finished = False
        self.bytes_sent = 0

    def reply(self, reply: Reply) -> None:
        """Send a whole reply, with its length."""
        if reply.status in WITHOUT_BODY:
            self._start(reply.status, "", [], reply.headers)
            self.end(b"")
            return
        length = str(len(reply.body)).encode()
        self._start(reply.status, reply.content_type, [(b"content-length", length)], reply.headers)
        self.end(reply.body)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin a reply whose length is not known; it goes out in chunks."""
        self._start(status, content_type, [], headers)
        self._streaming = True
        self._cork.open_streams += 1

    def _start(self, status: int, content_type: str, framing: Headers, more: tuple[tuple[str, str], ...]) -> None:
        self.status = status
        headers = [(b"content-type", content_type.encode("latin-1"))] if content_type else []
        headers += framing
        if more:
            own = _own(more)
            names = {name for name, _ in own}
            headers += own
            headers += [pair for pair in self._headers if pair[0] not in names]
        else:
            headers += self._headers
        self._push({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        """Go on with it."""
        # What is held goes first, also when the crowd has thinned. What waits for the client is joined anyway.
        if self._held or (self._resume is None and self._cork.crowded):
            if not self._held:
                self._cork.add(self)
            self._held.append(data)
            return
        self._body(data, False)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        """Go on with what `part` gives, once there is room for it; see `ReplyWriter.write_latest`."""
        if self._resume is None:
            self.write(part())
        else:
            self._latest = part

    def flush(self) -> None:
        """Send what this turn of the event loop has written."""
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._body(data, False)

    def end(self, data: bytes) -> None:
        """Finish it with these last bytes."""
        self._latest = None
        if self._held:
            data = b"".join([*self._held, data])
            self._held.clear()
        self.finished = not self._abandoned
        self._body(data, True)
        self.close()

    def close(self) -> None:
        """Nothing more comes, for whatever reason. May be called again."""
        self.flush()
        if self._streaming:
            self._streaming = False
            self._cork.open_streams -= 1
        self._latest = None

    def _body(self, data: bytes, last: bool) -> None:
        if self._abandoned:
            return
        self.bytes_sent += len(data)
        if self._resume is not None:
            self._keep(data, last)
            return
        self._push({"type": "http.response.body", "body": data, "more_body": not last})

    def _keep(self, data: bytes, last: bool) -> None:
        """Have it wait until the client has taken what was sent before."""
        self._backlog_size += len(data)
        if self._backlog_size > MAX_UNSENT and self._backlog:
            logger.warning("a client does not read: its connection is broken off with %d bytes unsent", MAX_UNSENT)
            self._backlog.clear()
            self.finished, self._abandoned = False, True
            self._give_up()
            return
        self._backlog.append(data)
        self._backlog_last = last

    def _push(self, message: Message) -> None:
        coroutine = self._send(message)
        steps = coroutine.__await__()
        try:
            waiting_for = next(steps)
        except StopIteration:
            return
        self._resume = asyncio.ensure_future(self._finish(steps, waiting_for))

    async def drain(self) -> None:
        """Wait until no more than what the connection itself holds is unsent."""
        self.flush()
        while self._resume is not None and not self._resume.done():
            await asyncio.wait({self._resume})

    async def _finish(self, steps: Generator[Any, None, None], waiting_for: Any) -> None:
        await Continued(steps, waiting_for)
        while self._backlog or self._latest is not None:
            data, last = self._waiting()
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._resume = None

    def _waiting(self) -> tuple[bytes, bool]:
        """All that the client could not be sent yet, and whether it is the end."""
        if self._latest is not None:
            part, self._latest = self._latest, None
            data = part()
            self.bytes_sent += len(data)
            self._backlog.append(data)
        data = b"".join(self._backlog)
        self._backlog.clear()
        self._backlog_size = 0
        return data, self._backlog_last


class Continued(Generic[T]):
    """Awaits the rest of a coroutine whose first step was done by hand."""

    __slots__ = ("_handed_over", "_steps", "_waiting_for")

    def __init__(self, steps: Generator[Any, Any, T], waiting_for: Any) -> None:
        """`waiting_for`: the future that its first step ended with, which the task is to wait for."""
        self._steps, self._waiting_for = steps, waiting_for
        self._handed_over = False

    def __await__(self) -> Generator[Any, Any, T]:
        value: T = yield from self
        return value

    def __iter__(self) -> Continued[T]:
        return self

    def __next__(self) -> Any:
        if self._handed_over:
            return next(self._steps)
        self._handed_over = True
        return self._waiting_for

    def throw(self, *error: Any) -> Any:
        """Where the task is cancelled, the coroutine hears of it."""
        return self._steps.throw(*error)


def _own(headers: tuple[tuple[str, str], ...]) -> Headers:
    """Headers that a handler has set; it has seen to it that they can be sent."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


NO_CACHE: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]


def cors_headers(settings: ServerSettings) -> Headers:
    """The CORS headers that the settings ask for."""
    cors = {
        b"access-control-allow-origin": settings.cors_allowed_origin,
        b"access-control-allow-methods": settings.cors_allowed_methods,
        b"access-control-allow-headers": settings.cors_allowed_headers,
    }
    return [(name, value.encode("latin-1")) for name, value in cors.items() if value]
