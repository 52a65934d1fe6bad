"""One call at a time, in the main thread. A second thread reads, so that a call can be cancelled while it runs."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from djl_python.outputs import Output

from .calling import Caller, logger, message_of, output_of, output_of_error
from .channel import Channel, end_process_group
from .frames import WINDOW, Frame, Kind, decode_credit
from .messages import OutputMessage, encode_output


class _Window:
    """How much of a call's stream may still be sent, and whether anybody wants it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = WINDOW
        self.cancelled = False

    def take(self, size: int) -> bool:
        """Wait until the client has taken enough; False if it has gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0 or self.cancelled)
            self._left -= size
            return not self.cancelled

    def give(self, size: int) -> None:
        with self._changed:
            self._left += size
            self._changed.notify()

    def cancel(self) -> None:
        with self._changed:
            self.cancelled = True
            self._changed.notify()


class SyncMode:
    """Serves calls one after another."""

    def __init__(self, channel: Channel, caller: Caller) -> None:
        self._channel, self._caller = channel, caller
        self._calls: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._windows: dict[int, _Window] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def initialize(self) -> Output:
        """Run the initializing call."""
        return output_of(self._settled(self._caller.initialize()))

    def serve(self, frames: Iterator[Frame]) -> None:
        """Answer calls until told to stop."""
        threading.Thread(target=self._read, args=(frames,), name="worker-reader", daemon=True).start()
        while (frame := self._calls.get()) is not None:
            self._answer(frame, self._windows[frame.call])
            del self._windows[frame.call]
        if self._loop is not None:
            self._loop.close()

    def _read(self, frames: Iterator[Frame]) -> None:
        for frame in frames:
            window = self._windows.get(frame.call)
            if frame.kind is Kind.CALL:
                self._windows[frame.call] = _Window()
                self._calls.put(frame)
            elif frame.kind is Kind.STOP:
                self._calls.put(None)
            elif frame.kind is Kind.CREDIT and window is not None:
                window.give(decode_credit(frame.body))
            elif frame.kind is Kind.CANCEL and window is not None:
                window.cancel()
        end_process_group()

    def _answer(self, frame: Frame, window: _Window) -> None:
        done = (Kind.DONE, frame.call, b"")
        if window.cancelled:
            self._channel.send(done)
            return
        output: Output | None = None
        try:
            output = output_of(self._settled(self._caller.call(frame.body)))
            message = message_of(output)
            body = encode_output(message)
        except (Exception, asyncio.CancelledError) as error:
            message = output_of_error(error)
            body = encode_output(message)
        head = (Kind.OUTPUT, frame.call, body)
        if output is None or not (message.streams or output.finalize_function):
            self._channel.send(head, done)
            return
        self._channel.send(head)
        if message.streams:
            self._stream(frame.call, output, window)
        self._finalize(output)
        self._channel.send(done)

    def _stream(self, call: int, output: Output, window: _Window) -> None:
        stream = output.stream_content
        failure: OutputMessage | None = None
        try:
            if hasattr(stream, "__aiter__"):
                output.stream_content = self._items(cast(AsyncIterator[Any], stream))
            for chunk in output.stream_chunks():
                if not self._send_chunk(call, bytes(chunk), window):
                    break
        except (Exception, asyncio.CancelledError) as error:
            failure = output_of_error(error)
        self._close(stream)
        self._channel.send((Kind.STREAM_END, call, b"" if failure is None else encode_output(failure)))

    def _send_chunk(self, call: int, chunk: bytes, window: _Window) -> bool:
        if not chunk:
            return not window.cancelled
        for start in range(0, len(chunk), WINDOW):
            piece = chunk[start : start + WINDOW]
            if not window.take(len(piece)):
                return False
            self._channel.send((Kind.CHUNK, call, piece))
        return True

    def _close(self, stream: Any) -> None:
        """Run the `finally` blocks of a generator that nobody reads any more."""
        try:
            if hasattr(stream, "aclose"):
                self._settled(stream.aclose())
            elif hasattr(stream, "close"):
                stream.close()
        except (Exception, asyncio.CancelledError):
            logger.exception("The stream failed while it was closed")

    def _finalize(self, output: Output) -> None:
        try:
            output.execute_finalize()
        except Exception:
            logger.exception("The finalize function failed")

    def _settled(self, result: Any) -> Any:
        """What an awaitable comes to; anything else as it is."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))

    def _items(self, stream: AsyncIterator[Any]) -> Iterator[Any]:
        iterator = aiter(stream)
        while True:
            try:
                yield self._settled(anext(iterator))
            except StopAsyncIteration:
                return


async def _awaited(result: Any) -> Any:
    return await result
