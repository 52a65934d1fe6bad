"""One call's reply on its way to the client."""

from __future__ import annotations

from collections.abc import Callable

from handlers.contracts.protocol import WITHOUT_BODY, Reply
from handlers.reply import ReplyWriter
from handlers.workers.errors import invalid_status, is_status
from handlers.workers.parts import Part, failure_of
from handlers.workers.response_headers import response_headers
from handlers.workers.runtime.messages import OutputMessage, Properties


def reply_of(output: OutputMessage, body: bytes | None = None) -> Reply:
    """The reply that an output is: its code, its properties as headers, its content as the body."""
    if not is_status(output.code):
        return invalid_status(output.code)
    content_type, headers = response_headers(output.properties)
    data = output.data if body is None else body
    return Reply(output.code, content_type, b"" if output.code in WITHOUT_BODY else data, headers)


class Delivery:
    """Passes bytes to the writer. Status and headers go out with the first of them, so that they may still change."""

    __slots__ = ("_head", "open", "started", "writer")

    def __init__(self, writer: ReplyWriter) -> None:
        self.writer = writer
        self.open = True
        """The client waits for more."""
        self.started = False
        self._head = OutputMessage()

    def prepare(self, head: OutputMessage) -> None:
        """Status and headers of a reply that comes in parts; without effect once it has begun."""
        self._head = head
        if not is_status(head.code):
            self.reply(invalid_status(head.code))

    @property
    def head(self) -> OutputMessage:
        """What `prepare` was given."""
        return self._head

    def reply(self, reply: Reply) -> None:
        """The whole reply; what has begun is ended with its body."""
        if not self.open:
            return
        self.open = False
        if self.started:
            self.writer.end(reply.body)
        else:
            self.writer.reply(reply)

    def write(self, data: bytes) -> None:
        """A part of the body."""
        if not self.open or not data or self._head.code in WITHOUT_BODY:
            return
        if not self.started:
            self.started = True
            reply = reply_of(self._head, b"")
            self.writer.start(reply.status, reply.content_type, reply.headers)
        self.writer.write(data)

    def accept(self, part: Part, properties: Properties, write: Callable[[bytes], None]) -> None:
        """A part of an answer; one that has nothing to send adds headers only. `write` sends what is not the last."""
        if not self.started:
            merged = dict(self._head.properties) | dict(properties)
            self.prepare(OutputMessage(properties=tuple(merged.items())))
        if not part.data and not part.last:
            return
        if part.code is not None:
            self.fail(failure_of(part, self._head.properties), part.failure)
        elif part.last:
            self.end(part.data.encode())
        else:
            write(part.data.encode())

    def end(self, data: bytes = b"") -> None:
        """The last part of the body."""
        self.reply(reply_of(self._head, data))

    def fail(self, reply: Reply, midway: bytes) -> None:
        """The call has failed: `reply` if nothing was sent yet, else the body ends with `midway`."""
        if self.open and self.started:
            self.open = False
            self.writer.end(midway)
        else:
            self.reply(reply)

    def drop(self) -> None:
        """The client has gone."""
        self.open = False
