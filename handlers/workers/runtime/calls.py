"""Calls of the customer's function, one at a time or many on one event loop, and its own calls to the engine."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import queue
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.service_loader import find_decorated_function
from djl_python.wire import sendable

from .channel import (
    WINDOW,
    Channel,
    Contents,
    Frame,
    InputMessage,
    Kind,
    LoadOrder,
    OutputMessage,
    decode_message,
    encode_message,
    end_process_group,
)

logger = logging.getLogger("djl_python")

_FORMATTERS = {"input_formatter": "is_input_formatter", "output_formatter": "is_output_formatter"}
_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY_TEXTS = ("No available memory for the cache blocks", "CUDA error: out of memory")


class Caller:
    """Makes an `Input` of a message and calls the function that it names. The result may be an awaitable."""

    def __init__(self, module: ModuleType, order: LoadOrder) -> None:
        self._module = module
        self._order = order
        found = {key: find_decorated_function(module, marker) for key, marker in _FORMATTERS.items()}
        self._formatters = {key: formatter for key, formatter in found.items() if formatter is not None}

    def initialize(self) -> Any:
        """The result of the first call, which loads the model."""
        return self._call(self._order.properties, ())

    def call(self, body: bytes) -> Any:
        """The function's result for a CALL frame."""
        message = decode_message(InputMessage, body)
        return self._call(dict(message.properties), message.contents)

    def _call(self, properties: Mapping[str, str], contents: Contents) -> Any:
        inputs = Input()
        function = properties.get("handler", self._order.function)
        standing = {"handler": function, "model_dir": self._order.model_dir, "device_id": self._order.device_id}
        inputs.properties.update({**properties, **standing, **self._formatters})
        for name, value in contents:
            inputs.content.add(name, value)
        inputs.function_name = function
        return getattr(self._module, function)(inputs)


def output_of(result: Any) -> Output:
    """The output that a function's result stands for."""
    if result is None:
        return Output(204, "No content")
    if isinstance(result, Output):
        return result
    return Output().error(f"Invalid output type: {type(result)}")


def _message_of(output: Output, error: str | None = None) -> OutputMessage:
    """An output as the server gets it.

    Raises:
        TypeError, ValueError: the handler has put something into it that cannot be sent.
    """
    streams = output.stream_content is not None
    pairs = () if streams else zip(output.content.get_keys(), output.content.get_values(), strict=True)
    return OutputMessage(
        code=int(output.code),
        message=sendable(str(output.message)),
        properties=tuple((sendable(str(name)), sendable(str(value))) for name, value in output.properties.items()),
        contents=tuple((key, output.encode_value(value)) for key, value in pairs),
        streams=streams,
        error=error,
    )


def _failure(error: BaseException) -> bytes:
    """The message for an exception; only the log gets its traceback."""
    logger.error("The handler failed", exc_info=error)
    text = _text_of(error)
    if is_out_of_memory(error):
        return encode_message(OutputMessage(code=507, message=text or "out of memory", error=text or "out of memory"))
    return encode_message(_message_of(Output().error(text), text))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by LMI's rule."""
    text = _text_of(error)
    return type(error).__name__ in _OUT_OF_MEMORY_TYPES or any(sign in text for sign in _OUT_OF_MEMORY_TEXTS)


def _text_of(error: BaseException) -> str:
    """The exception's text; its type's name if a customer's `__str__` fails."""
    try:
        return sendable(str(error))
    except Exception:
        return type(error).__name__


class SyncMode:
    """Serves calls one after another in the main thread; a second thread reads, so that a call can be cancelled."""

    def __init__(self, channel: Channel, caller: Caller) -> None:
        self._channel, self._caller = channel, caller
        self._calls: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._windows: dict[int, _SyncWindow] = {}

    def serve(self, frames: Iterator[Frame]) -> None:
        """Answer calls until told to stop."""
        threading.Thread(target=self._read, args=(frames,), name="worker-reader", daemon=True).start()
        while (frame := self._calls.get()) is not None:
            self._answer(frame, self._windows[frame.call])
            del self._windows[frame.call]

    def _read(self, frames: Iterator[Frame]) -> None:
        for frame in frames:
            window = self._windows.get(frame.call)
            if frame.kind is Kind.CALL:
                self._windows[frame.call] = _SyncWindow()
                self._calls.put(frame)
            elif frame.kind is Kind.STOP:
                self._calls.put(None)
            elif frame.kind is Kind.CREDIT and window is not None:
                window.give(int(frame.body))
            elif frame.kind is Kind.CANCEL and window is not None:
                window.cancel()
        end_process_group()

    def _answer(self, frame: Frame, window: _SyncWindow) -> None:
        done = Frame(Kind.DONE, frame.call)
        if window.cancelled:
            self._channel.send(done)
            return
        try:
            output = output_of(self._caller.call(frame.body))
            body = encode_message(_message_of(output))
        except (Exception, asyncio.CancelledError) as error:
            output, body = Output(), _failure(error)
        head = Frame(Kind.OUTPUT, frame.call, body)
        if output.stream_content is None and output.finalize_function is None:
            self._channel.send(head, done)  # together, so that the worker is free once its client has the answer
            return
        self._channel.send(head)
        if output.stream_content is not None:
            self._stream(frame.call, output, window)
        try:
            output.execute_finalize()
        except Exception:
            logger.exception("The finalize function failed")
        self._channel.send(done)

    def _stream(self, call: int, output: Output, window: _SyncWindow) -> None:
        try:
            for chunk in output.stream_chunks():
                if not self._send_chunk(call, chunk, window):
                    break
        except (Exception, asyncio.CancelledError) as error:
            self._channel.send(Frame(Kind.OUTPUT, call, _failure(error)))
        try:
            # The `finally` blocks of a generator that was not read to its end.
            if (close := getattr(output.stream_content, "close", None)) is not None:
                close()
        except (Exception, asyncio.CancelledError):
            logger.exception("The stream failed while it was closed")
        self._channel.send(Frame(Kind.STREAM_END, call))

    def _send_chunk(self, call: int, chunk: bytes, window: _SyncWindow) -> bool:
        """Send a chunk; False if the client has gone."""
        for start in range(0, len(chunk), WINDOW):
            piece = chunk[start : start + WINDOW]
            if not window.take(len(piece)):
                return False
            self._channel.send(Frame(Kind.CHUNK, call, piece))
        return not window.cancelled


class _SyncWindow:
    """How much of a call's stream may still be sent, and whether its client has gone."""

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


class AsyncMode:
    """Serves many calls on one event loop in the main thread; a slow client holds up its own call alone."""

    def __init__(self, channel: Channel, caller: Caller, engine: ServerEngine) -> None:
        self._channel, self._caller, self._engine = channel, caller, engine
        self._tasks: dict[int, tuple[asyncio.Task[None], _AsyncWindow]] = {}
        self._stopped = asyncio.Event()

    def begin(self, frames: Iterator[Frame]) -> None:
        """Begin to read: the initializing call may need the engine."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(frames, loop), name="worker-reader", daemon=True).start()

    async def serve(self) -> None:
        """Answer calls until told to stop, then finish those that run."""
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait([task for task, _ in self._tasks.values()])

    def _read(self, frames: Iterator[Frame], loop: asyncio.AbstractEventLoop) -> None:
        for frame in frames:
            try:
                loop.call_soon_threadsafe(self._take, frame)
            except RuntimeError:  # the loop is closed: the process is ending
                return
        end_process_group()

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.CALL:
            self._begin(frame)
        elif frame.kind is Kind.STOP:
            self._stopped.set()
        elif frame.kind in FRAMES:
            self._engine.take(frame)
        elif frame.call in self._tasks:
            task, window = self._tasks[frame.call]
            if frame.kind is Kind.CREDIT:
                window.give(int(frame.body))
            elif frame.kind is Kind.CANCEL:
                window.cancelled = True
                task.cancel()

    def _begin(self, frame: Frame) -> None:
        window = _AsyncWindow()
        task = asyncio.get_running_loop().create_task(self._answer(frame, window))
        self._tasks[frame.call] = (task, window)
        # In a callback, because a coroutine that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._finish(frame.call))

    def _finish(self, call: int) -> None:
        del self._tasks[call]
        self._channel.send(Frame(Kind.DONE, call))

    async def _answer(self, frame: Frame, window: _AsyncWindow) -> None:
        try:
            await self._run(frame, window)
        except (SystemExit, KeyboardInterrupt) as error:
            end_at_once(error)
        except (Exception, asyncio.CancelledError) as error:
            if not window.cancelled:
                self._channel.send(Frame(Kind.OUTPUT, frame.call, _failure(error)))

    async def _run(self, frame: Frame, window: _AsyncWindow) -> None:
        result = await settled(self._caller.call(frame.body))
        if not hasattr(result, "__aiter__"):
            await self._send(frame.call, output_of(result), window)
            return
        try:
            async for output in result:
                await self._send(frame.call, output_of(output), window)
        finally:
            await _close(result)

    async def _send(self, call: int, output: Output, window: _AsyncWindow) -> None:
        if output.stream_content is not None:
            raise TypeError("async mode does not read stream content: return an async generator of Outputs instead")
        body = encode_message(_message_of(output))
        await window.take(len(body))
        self._channel.send(Frame(Kind.OUTPUT, call, body))
        output.execute_finalize()


class _AsyncWindow:
    """How much of a call's answer may still be sent, and whether its client has gone."""

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


def end_at_once(error: BaseException) -> NoReturn:
    """End the process, as the handler has asked for, and send nothing more; the server answers the clients."""
    logger.error("The handler has ended its process", exc_info=error)
    logging.shutdown()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


async def _close(outputs: Any) -> None:
    """Run the `finally` blocks of a generator that is not read to its end."""
    try:
        if hasattr(outputs, "aclose"):
            await outputs.aclose()
    except Exception:
        logger.exception("The generator failed while it was closed")


async def first_of(result: Any) -> Any:
    """The first output of an async generator, which is read no further; anything else as it is."""
    if not hasattr(result, "__aiter__"):
        return result
    try:
        return await anext(aiter(result), None)
    finally:
        await _close(result)


async def settled(result: Any) -> Any:
    """The value of an awaitable; anything else as it is."""
    return await result if inspect.isawaitable(result) else result


FRAMES = frozenset({Kind.OUTPUT, Kind.CHUNK, Kind.STREAM_END})
"""Kinds of frames that the server answers such a call with."""


class ServerEngine:
    """Implements `djl_python.lmi_vllm.vllm_async_service.Engine`; for the event loop that `take` is called on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._frames: dict[int, asyncio.Queue[Frame]] = {}
        """Of the calls that are not answered yet."""

    async def call(self, inputs: Input) -> Output | AsyncGenerator[Output, None]:
        """The engine's answer to a request; an input without content loads the engine."""
        number = next(self._numbers)
        frames = self._frames[number] = asyncio.Queue()
        self._channel.send(Frame(Kind.CALL, number, encode_message(_input_message(inputs))))
        try:
            head = decode_message(OutputMessage, (await frames.get()).body)
        except BaseException:
            self._cancel(number)
            raise
        if head.streams:
            return self._stream(number, head, frames)
        del self._frames[number]
        if head.code == 200:
            return _part(head, head.data, last=True)
        output = Output(head.code, head.message).add(head.data)
        output.properties.update(head.properties)
        return output

    def take(self, frame: Frame) -> None:
        """Take a frame of an answer."""
        if (frames := self._frames.get(frame.call)) is None:
            return
        frames.put_nowait(frame)
        if frame.kind is Kind.STREAM_END:
            del self._frames[frame.call]

    async def _stream(
        self, number: int, head: OutputMessage, frames: asyncio.Queue[Frame]
    ) -> AsyncGenerator[Output, None]:
        try:
            while (frame := await frames.get()).kind is not Kind.STREAM_END:
                yield _part(head, frame.body, last=False)
            yield _part(head, frame.body, last=True)
        finally:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Have the server end a call that nobody waits for any more; nothing if it has been answered."""
        if self._frames.pop(number, None) is not None:
            self._channel.send(Frame(Kind.CANCEL, number))


def _input_message(inputs: Input) -> InputMessage:
    properties = [(name, value) for name, value in inputs.properties.items() if isinstance(value, str)]
    pairs = zip(inputs.content.get_keys(), inputs.content.get_values(), strict=True)
    # Content that the handler itself has put into the input may be whatever `Output` takes.
    return InputMessage(tuple(properties), tuple((key, Output().encode_value(value)) for key, value in pairs))


def _part(head: OutputMessage, data: bytes, *, last: bool) -> Output:
    """A part of an answer, as LMI's handlers of async mode return it."""
    output = Output().add(Output.binary_encode({"data": data.decode("utf-8", "replace"), "last": last}))
    output.properties.update(head.properties)
    return output
