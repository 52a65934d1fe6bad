"""A reply that is pushed into the connection from callbacks, over plain ASGI.

An ASGI server's `send` is a coroutine function, but one that waits only when the client's socket is full. So each
message is sent by running the coroutine to its end right where the bytes are made, in the engine's output loop: no
task, no queue and no wake-up for each token. If `send` does wait, a task takes the started coroutine over, and what is
written meanwhile is merged into one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

from handlers.contracts.protocol import WITHOUT_BODY, Reply

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Pacer:
    """Spares system calls when many streams are open: their middle parts go out once every few milliseconds.

    With few streams every token goes out at once, and the first and the last part of a stream always do. It only
    matters where an engine's step is shorter than the interval, which is where sending costs most.
    """

    INTERVAL = 0.01
    """Seconds that a token may wait."""

    def __init__(self, crowd: int) -> None:
        self._crowd = crowd
        self._holding: list[PushedReply] = []
        self.open_streams = 0

    @property
    def crowded(self) -> bool:
        """Whether parts are held back now. `crowd` 0 means never."""
        return 0 < self._crowd <= self.open_streams

    def hold(self, reply: PushedReply) -> None:
        """Have `reply.release` called soon."""
        if not self._holding:
            asyncio.get_running_loop().call_later(self.INTERVAL, self._release)
        self._holding.append(reply)

    def _release(self) -> None:
        holding, self._holding = self._holding, []
        for reply in holding:
            reply.release()


class PushedReply:
    """One HTTP reply; implements `handlers.reply.ReplyWriter`."""

    __slots__ = (
        "_backlog",
        "_backlog_last",
        "_headers",
        "_held",
        "_pacer",
        "_resume",
        "_send",
        "_streaming",
        "bytes_sent",
        "finished",
        "status",
    )

    def __init__(self, send: Send, headers: Headers, pacer: Pacer) -> None:
        self._send = send
        self._headers = headers
        self._pacer = pacer
        self._held: list[bytes] = []
        self._streaming = False
        self._resume: asyncio.Task[None] | None = None
        self._backlog: list[bytes] = []
        self._backlog_last = False
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
        self._pacer.open_streams += 1

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
        # What is held goes first, also when the crowd has thinned meanwhile.
        if self._held or (self.bytes_sent and self._pacer.crowded):
            if not self._held:
                self._pacer.hold(self)
            self._held.append(data)
            return
        self._body(data, False)

    def release(self) -> None:
        """Send what was held back."""
        if self._held and not self.finished:
            data = b"".join(self._held)
            self._held.clear()
            self._body(data, False)

    def end(self, data: bytes) -> None:
        """Finish it with these last bytes."""
        if self._held:
            data = b"".join([*self._held, data])
            self._held.clear()
        self.finished = True
        self._body(data, True)
        self.close()

    def close(self) -> None:
        """Nothing more comes, for whatever reason. May be called again."""
        if self._streaming:
            self._streaming = False
            self._pacer.open_streams -= 1
        self._held.clear()

    def _body(self, data: bytes, last: bool) -> None:
        self.bytes_sent += len(data)
        if self._resume is not None:
            self._backlog.append(data)
            self._backlog_last = last
            return
        self._push({"type": "http.response.body", "body": data, "more_body": not last})

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
        while self._resume is not None and not self._resume.done():
            await asyncio.wait({self._resume})

    async def _finish(self, steps: Generator[Any, None, None], waiting_for: Any) -> None:
        await _Continued(steps, waiting_for)
        while self._backlog:
            data, last = b"".join(self._backlog), self._backlog_last
            self._backlog.clear()
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._resume = None


class _Continued:
    """Awaits the rest of a coroutine that was begun outside any task."""

    __slots__ = ("_steps", "_waiting_for")

    def __init__(self, steps: Generator[Any, None, None], waiting_for: Any) -> None:
        self._steps, self._waiting_for = steps, waiting_for

    def __await__(self) -> Generator[Any, None, None]:
        yield self._waiting_for  # the future that the coroutine waits for; now the task does
        yield from self._steps


def _own(headers: tuple[tuple[str, str], ...]) -> Headers:
    """Headers that a handler has set; it has seen to it that they can be sent."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
