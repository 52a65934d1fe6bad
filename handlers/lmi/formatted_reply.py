"""A writer that passes vLLM's replies through an output formatter of the asynchronous mode."""

from __future__ import annotations

from engines.errors import GenerationFailed
from handlers.contract import JSON, Reply, ReplyWriter, Running
from handlers.custom.formatter_thread import FormatterQueue
from handlers.djl_errors import FAILED_DEPENDENCY, payload_error
from handlers.lmi.answer_forms import AsyncForm
from handlers.lmi.async_formatters import AsyncFormatters
from handlers.lmi.shaped_reply import ShapedReply, error_of, is_error

_END = b""  # Stands for the end of the stream among its events.


class FormattedReply(ShapedReply):
    """Passes vLLM's replies to another writer after a customer's output formatter has changed them.

    The formatter gets vLLM's object for a whole answer, or each event of a stream as vLLM sends it. It does not get
    errors.
    """

    def __init__(self, writer: ReplyWriter, formatters: AsyncFormatters, form: AsyncForm, path: str) -> None:
        super().__init__(writer, form)
        self._formatters, self._path = formatters, path
        self._queue: FormatterQueue[Reply | bytes] = FormatterQueue(formatters.thread, self._format, self._take)
        self.running: Running | None = None  # The call, which is cancelled if the formatter fails.

    def end(self, data: bytes) -> None:
        self.write(data)
        self._event(_END)

    async def drain(self) -> None:
        await self._queue.drain()
        await super().drain()

    def _whole(self, reply: Reply) -> None:
        self._queue.put(reply)

    def _event(self, event: bytes) -> None:
        if not self._ended:
            self._queue.put(event)

    def _format(self, item: Reply | bytes) -> bytes:
        """Return the line for a whole answer or for an event. Runs on the formatters' thread."""
        if isinstance(item, Reply):
            return self._formatters.written_answer(self._path, item.body)
        if item == _END:
            return b"\n"
        if is_error(item):
            raise _VllmFailed(item)
        return self._formatters.written(f"data: {item.decode()}\n\n")

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
            refusal = self._shape.refusal(Reply(error_of(error.event).code, JSON, error.event))
            last = self._shape.event(error.event)
        else:
            last = payload_error(error.message if isinstance(error, GenerationFailed) else f"internal error: {error}")
            refusal = Reply(FAILED_DEPENDENCY, JSON, last)
        if self._started:
            self._writer.end(last)
        else:
            self._writer.reply(refusal)


class _VllmFailed(Exception):
    """An error event of vLLM."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event)
        self.event = event
