"""Replies of vLLM's front end on their way to clients of LMI: in LMI's shape, or through a customer's formatters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engines.errors import GenerationFailed, RequestError
from handlers.contract import Call, Reply, ReplyWriter, Running
from handlers.custom.formatter_thread import FormatterQueue, FormatterThread
from handlers.djl_errors import FAILED_DEPENDENCY, JSON, failed_dependency, payload_error
from handlers.lmi.chat import AsyncShape, Shape, error_of, events, is_error
from handlers.lmi.formatters import PayloadFormatters

_END = b""  # In the place of an event: none follow.


class ShapedReply:
    """Implements `ReplyWriter`: passes vLLM's replies on to another writer in LMI's shape."""

    def __init__(self, writer: ReplyWriter, shape: Shape) -> None:
        self._writer, self.shape = writer, shape
        self._headers: tuple[tuple[str, str], ...] = ()
        self._status = 0
        self._started = self._ended = False

    def reply(self, reply: Reply) -> None:
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):  # a stream that came whole
            self.start(reply.status, reply.content_type, reply.headers)
            self.end(reply.body)
        else:
            self._writer.reply(self.shape.reply(reply))

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Wait for the first event: if that is an error, the reply is no stream."""
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        for event in events(data):
            self._event(event)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self.write(data)
        if self._ended:
            return
        if not self._started:
            self._begin()
        self._ended = True
        self._writer.end(b"")

    async def drain(self) -> None:
        await self._writer.drain()

    def _event(self, event: bytes) -> None:
        if self._ended:
            return
        if not self._started and is_error(event):
            self._ended = True
            self._writer.reply(self.shape.reply(Reply(error_of(event).code, JSON, event)))
            return
        if data := self.shape.event(event):
            if not self._started:
                self._begin()
            self._writer.write(data)

    def _begin(self) -> None:
        self._started = True
        self._writer.start(self._status, self.shape.stream_type, self._headers)


@dataclass(frozen=True, slots=True)
class Formatting:
    """A customer's formatters of LMI's asynchronous mode, and the thread on which they run."""

    formatters: PayloadFormatters
    thread: FormatterThread
    # vLLM's object for the body of an answer on a path of its front end; needed with an output formatter.
    answer_object: Callable[[str, bytes], Any] | None = None

    async def of_call(self, change: Callable[[Call], Call], call: Call) -> Call:
        """Return the call as one of the formatters' methods changes it.

        Raises:
            ContractError: The call is refused.
        """
        try:
            return await self.thread.run(partial(change, call))
        except RequestError as error:
            raise failed_dependency(error.message) from None


class FormattedReply(ShapedReply):
    """Passes vLLM's replies on as a customer's output formatter has them.

    The formatter gets vLLM's object for a whole answer, and each event of a stream as vLLM has sent it. Errors are not
    the formatter's.
    """

    def __init__(self, writer: ReplyWriter, formatting: Formatting, shape: AsyncShape, path: str) -> None:
        super().__init__(writer, shape)
        self._formatting, self._path = formatting, path
        self._queue: FormatterQueue[Reply | bytes] = FormatterQueue(formatting.thread, self._format, self._take)
        self.running: Running | None = None  # Ends the generation if the formatter fails.

    def reply(self, reply: Reply) -> None:
        if reply.status >= 400:
            self._ended = True
            super().reply(reply)
        else:
            self._queue.put(reply)

    def end(self, data: bytes) -> None:
        self.write(data)
        self._event(_END)

    async def drain(self) -> None:
        await self._queue.drain()
        await super().drain()

    def _event(self, event: bytes) -> None:
        if not self._ended:
            self._queue.put(event)

    def _format(self, item: Reply | bytes) -> bytes:
        """On the formatters' thread: the line of a whole answer or of an event."""
        written = self._formatting.formatters.written
        if isinstance(item, Reply):
            assert self._formatting.answer_object is not None
            return written(self._formatting.answer_object(self._path, item.body))
        if item == _END:
            return b"\n"
        if is_error(item):
            raise _VllmFailed(item)
        return written(f"data: {item.decode()}\n\n")

    def _take(self, done: list[tuple[Reply | bytes, bytes]], error: Exception | None) -> None:
        if self._ended:
            return
        for item, line in done:
            if isinstance(item, Reply):
                self._ended = True
                self._writer.reply(Reply(item.status, JSON, line, item.headers))
                return
            if not self._started:
                self._begin()
            if item == _END:
                self._ended = True
                self._writer.end(line)
                return
            self._writer.write(line)
        if error is not None:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._ended = True
        self._queue.close()
        if self.running is not None:
            self.running.cancel()
        if isinstance(error, _VllmFailed):
            refusal = self.shape.reply(Reply(error_of(error.event).code, JSON, error.event))
            last = self.shape.event(error.event)
        else:
            last = payload_error(error.message if isinstance(error, GenerationFailed) else f"internal error: {error}")
            refusal = Reply(FAILED_DEPENDENCY, JSON, last)
        if self._started:
            self._writer.end(last)
        else:
            self._writer.reply(refusal)


class _VllmFailed(Exception):
    def __init__(self, event: bytes) -> None:
        super().__init__(event)
        self.event = event
