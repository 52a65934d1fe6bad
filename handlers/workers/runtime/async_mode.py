"""Many calls at once, on one event loop in the main thread. Source: contracts/lmi.md section 7.1."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

from djl_python.outputs import Output

from .calling import Caller, logger, message_of, output_of, output_of_error
from .channel import Channel, end_process_group
from .frames import WINDOW, Frame, Kind, decode_credit
from .messages import OutputMessage, encode_output

_EXHAUSTED = object()


class _Window:
    """How much of a call's stream may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._open = asyncio.Event()
        self._open.set()
        self.cancelled = False

    async def take(self, size: int) -> None:
        """Wait until the client has taken enough."""
        await self._open.wait()
        self._left -= size
        if self._left <= 0:
            self._open.clear()

    def give(self, size: int) -> None:
        self._left += size
        if self._left > 0:
            self._open.set()


class AsyncMode:
    """Serves calls together; a slow client holds up its own call alone."""

    def __init__(self, channel: Channel, caller: Caller) -> None:
        self._channel, self._caller = channel, caller
        self._tasks: dict[int, tuple[asyncio.Task[None], _Window]] = {}
        self._stopped = asyncio.Event()

    async def initialize(self) -> Output:
        """Run the initializing call."""
        return output_of(await _settled(self._caller.initialize()))

    async def serve(self, frames: Iterator[Frame]) -> None:
        """Answer calls until told to stop, then finish those that run."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(frames, loop), name="worker-reader", daemon=True).start()
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait([task for task, _ in self._tasks.values()])

    def _read(self, frames: Iterator[Frame], loop: asyncio.AbstractEventLoop) -> None:
        for frame in frames:
            try:
                loop.call_soon_threadsafe(self._take, frame)
            except RuntimeError:  # the loop has ended, and the process with it
                return
        end_process_group()

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.CALL:
            self._begin(frame)
        elif frame.kind is Kind.STOP:
            self._stopped.set()
        elif frame.call in self._tasks:
            task, window = self._tasks[frame.call]
            if frame.kind is Kind.CREDIT:
                window.give(decode_credit(frame.body))
            elif frame.kind is Kind.CANCEL:
                window.cancelled = True
                task.cancel()

    def _begin(self, frame: Frame) -> None:
        window = _Window()
        task = asyncio.get_running_loop().create_task(self._answer(frame, window))
        self._tasks[frame.call] = (task, window)
        # Not in the coroutine: one that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._finish(frame.call))

    def _finish(self, call: int) -> None:
        del self._tasks[call]
        self._channel.send((Kind.DONE, call, b""))

    async def _answer(self, frame: Frame, window: _Window) -> None:
        try:
            await self._run(frame, window)
        except (SystemExit, KeyboardInterrupt) as error:
            end_at_once(error)
        except (Exception, asyncio.CancelledError) as error:
            if not window.cancelled:
                self._channel.send((Kind.STREAM_END, frame.call, encode_output(output_of_error(error))))

    async def _run(self, frame: Frame, window: _Window) -> None:
        result = await _settled(self._caller.call(frame.body))
        if not hasattr(result, "__aiter__"):
            await self._send_output(frame.call, output_of(result), window)
            return
        try:
            async for output in result:
                await self._send_output(frame.call, output_of(output), window)
        finally:
            await _close(result)

    async def _send_output(self, call: int, output: Output, window: _Window) -> None:
        message = message_of(output)
        await self._send(Kind.OUTPUT, call, encode_output(message), window)
        if message.streams:
            await self._stream(call, output, window)
        output.execute_finalize()

    async def _stream(self, call: int, output: Output, window: _Window) -> None:
        stream, output.stream_content = output.stream_content, None
        formatter = Output().add_stream_content((), output.stream_output_formatter)
        failure: OutputMessage | None = None
        try:
            async for item in _items(stream):
                formatter.stream_content = [item]
                for chunk in formatter.stream_chunks():
                    for start in range(0, len(chunk), WINDOW):
                        await self._send(Kind.CHUNK, call, bytes(chunk[start : start + WINDOW]), window)
        except Exception as error:
            failure = output_of_error(error)
        finally:
            await _close(stream)
        self._channel.send((Kind.STREAM_END, call, b"" if failure is None else encode_output(failure)))

    async def _send(self, kind: Kind, call: int, body: bytes, window: _Window) -> None:
        await window.take(len(body))
        self._channel.send((kind, call, body))


def end_at_once(error: BaseException) -> NoReturn:
    """End the process, as the handler has asked for, without a word on any call; the server tells their clients."""
    logger.error("The handler has ended its process", exc_info=error)
    logging.shutdown()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


async def _close(stream: Any) -> None:
    """Run the `finally` blocks of a generator that nobody reads any more."""
    try:
        if hasattr(stream, "aclose"):
            await stream.aclose()
        elif hasattr(stream, "close"):
            stream.close()
    except Exception:
        logger.exception("The stream failed while it was closed")


async def _settled(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def _items(stream: Any) -> AsyncIterator[Any]:
    """The items of either kind of iterator; one that blocks runs in a thread."""
    if hasattr(stream, "__aiter__"):
        async for item in stream:
            yield item
        return
    iterator = iter(stream)
    while (item := await asyncio.to_thread(next, iterator, _EXHAUSTED)) is not _EXHAUSTED:
        yield item
