"""Calls of the customer's function, one at a time or many on one event loop, and its own calls to the engine."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import queue
import threading
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.service_loader import find_decorated_function
from djl_python.wire import sendable

from .channel import CREDIT, CREDITS, Channel, Kind, LoadOrder, Message

logger = logging.getLogger("djl_python")

Credits = TypeVar("Credits", threading.Semaphore, asyncio.Semaphore)

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

    def call(self, message: Message) -> Any:
        """The function's result; without content it is that of the first call, which loads the model."""
        inputs = Input()
        properties = dict(message.properties)
        function = properties.get("handler", self._order.function)
        standing = {"handler": function, "model_dir": self._order.model_dir, "device_id": self._order.device_id}
        inputs.properties.update({**properties, **standing, **self._formatters})
        for name, value in message.contents:
            inputs.content.add(name, value)
        inputs.function_name = function
        return getattr(self._module, function)(inputs)

    def initialize(self) -> Any:
        return self.call(Message(properties=tuple(self._order.properties.items())))


def output_of(result: Any) -> Output:
    """The output that a function's result stands for."""
    if result is None:
        return Output(204, "No content")
    if isinstance(result, Output):
        return result
    return Output().error(f"Invalid output type: {type(result)}")


def _message_of(call: int, output: Output, error: str | None = None) -> Message:
    """An output as the server gets it. Raises TypeError, ValueError: the handler has put something into it that cannot
    be sent."""
    streams = output.stream_content is not None
    pairs = () if streams else zip(output.content.get_keys(), output.content.get_values(), strict=True)
    return Message(
        call=call,
        code=int(output.code),
        message=sendable(str(output.message)),
        properties=tuple((sendable(str(name)), sendable(str(value))) for name, value in output.properties.items()),
        contents=tuple((key, output.encode_value(value)) for key, value in pairs),
        streams=streams,
        error=error,
    )


def _failure(call: int, error: BaseException) -> Message:
    """The message for an exception; only the log gets its traceback."""
    logger.error("The handler failed", exc_info=error)
    text = _text_of(error)
    if is_out_of_memory(error):
        return Message(call=call, code=507, message=text or "out of memory", error=text or "out of memory")
    return _message_of(call, Output().error(text), text)


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


class _Window(Generic[Credits]):
    """How much of a call's answer may still be sent, and whether its client has gone."""

    def __init__(self, credits: Credits) -> None:
        self.credits: Credits = credits
        self.cancelled = False
        self._sent = 0

    def due(self, size: int) -> range:
        """The credits to be taken before `size` more bytes are sent: those that the bytes before them have used up."""
        used, self._sent = divmod(self._sent, CREDIT)
        self._sent += size
        return range(used)


class SyncMode:
    """Serves calls one after another in the main thread; the channel's thread can cancel them."""

    def __init__(self, channel: Channel, caller: Caller) -> None:
        self._channel, self._caller = channel, caller
        self._calls: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._windows: dict[int, _Window[threading.Semaphore]] = {}

    def serve(self) -> None:
        while (message := self._calls.get()) is not None:
            self._answer(message, self._windows[message.call])
            del self._windows[message.call]

    def take(self, message: Message) -> None:
        """Take a message of the server's, in the channel's thread."""
        window = self._windows.get(message.call)
        if message.kind is Kind.CALL:
            self._windows[message.call] = _Window(threading.Semaphore(CREDITS))
            self._calls.put(message)
        elif message.kind is Kind.STOP:
            self._calls.put(None)
        elif window is not None:
            window.cancelled = window.cancelled or message.kind is Kind.CANCEL
            window.credits.release()

    def _answer(self, message: Message, window: _Window[threading.Semaphore]) -> None:
        call, done = message.call, Message(kind=Kind.DONE, call=message.call)
        if window.cancelled:
            self._channel.send(done)
            return
        try:
            output = output_of(self._caller.call(message))
            head = _message_of(call, output)
        except (Exception, asyncio.CancelledError) as error:
            output, head = Output(), _failure(call, error)
        if output.stream_content is None and output.finalize_function is None:
            self._channel.send(head, done)  # together, so that the worker is free once its client has the answer
            return
        self._channel.send(head)
        if output.stream_content is not None:
            self._stream(call, output, window)
        try:
            output.execute_finalize()
        except Exception:
            logger.exception("The finalize function failed")
        self._channel.send(done)

    def _stream(self, call: int, output: Output, window: _Window[threading.Semaphore]) -> None:
        try:
            for chunk in output.stream_chunks():
                self._send_chunk(call, chunk, window)
                if window.cancelled:
                    break
        except (Exception, asyncio.CancelledError) as error:
            self._channel.send(_failure(call, error))
        try:
            # The `finally` blocks of a generator that was not read to its end.
            if (close := getattr(output.stream_content, "close", None)) is not None:
                close()
        except (Exception, asyncio.CancelledError):
            logger.exception("The stream failed while it was closed")
        self._channel.send(Message(kind=Kind.STREAM_END, call=call))

    def _send_chunk(self, call: int, chunk: bytes, window: _Window[threading.Semaphore]) -> None:
        for start in range(0, len(chunk), CREDIT):
            piece = chunk[start : start + CREDIT]
            for _ in window.due(len(piece)):
                window.credits.acquire()
            if window.cancelled:
                return
            self._channel.send(Message(kind=Kind.CHUNK, call=call, contents=((None, piece),)))


class AsyncMode:
    """Serves many calls on one event loop in the main thread; a slow client holds up its own call alone."""

    def __init__(self, channel: Channel, caller: Caller) -> None:
        self._channel, self._caller = channel, caller
        self.engine = ServerEngine(channel)
        self._tasks: dict[int, tuple[asyncio.Task[None], _Window[asyncio.Semaphore]]] = {}
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Answer calls until told to stop, then finish those that run."""
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait([task for task, _ in self._tasks.values()])

    def take(self, message: Message) -> None:
        """Take a message of the server's, on the event loop."""
        if message.kind is Kind.CALL:
            self._begin(message)
        elif message.kind is Kind.STOP:
            self._stopped.set()
        elif message.kind in (Kind.OUTPUT, Kind.CHUNK, Kind.STREAM_END):
            self.engine.take(message)
        elif message.call in self._tasks:
            task, window = self._tasks[message.call]
            if message.kind is Kind.CANCEL:
                window.cancelled = True
                task.cancel()
            else:
                window.credits.release()

    def _begin(self, message: Message) -> None:
        window = _Window(asyncio.Semaphore(CREDITS))
        task = asyncio.get_running_loop().create_task(self._answer(message, window))
        self._tasks[message.call] = (task, window)
        # In a callback, because a coroutine that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._finish(message.call))

    def _finish(self, call: int) -> None:
        del self._tasks[call]
        self._channel.send(Message(kind=Kind.DONE, call=call))

    async def _answer(self, message: Message, window: _Window[asyncio.Semaphore]) -> None:
        try:
            result = await settled(self._caller.call(message))
            if not hasattr(result, "__aiter__"):
                await self._send(message.call, output_of(result), window)
                return
            try:
                async for output in result:
                    await self._send(message.call, output_of(output), window)
            finally:
                await _close(result)
        except (SystemExit, KeyboardInterrupt) as error:
            end_at_once(error)
        except (Exception, asyncio.CancelledError) as error:
            if not window.cancelled:
                self._channel.send(_failure(message.call, error))

    async def _send(self, call: int, output: Output, window: _Window[asyncio.Semaphore]) -> None:
        if output.stream_content is not None:
            raise TypeError("async mode does not read stream content: return an async generator of Outputs instead")
        message = _message_of(call, output)
        for _ in window.due(message.size):
            await window.credits.acquire()
        self._channel.send(message)
        output.execute_finalize()


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


class ServerEngine:
    """Implements `djl_python.lmi_vllm.vllm_async_service.Engine`; for the event loop that `take` is called on."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._messages: dict[int, asyncio.Queue[Message]] = {}  # Of the calls that are not answered yet.

    async def call(self, inputs: Input) -> Output | AsyncGenerator[Output, None]:
        number = next(self._numbers)
        messages = self._messages[number] = asyncio.Queue()
        properties = tuple((name, value) for name, value in inputs.properties.items() if isinstance(value, str))
        pairs = zip(inputs.content.get_keys(), inputs.content.get_values(), strict=True)
        # Content that the handler itself has put into the input may be whatever `Output` takes.
        contents = tuple((key, Output().encode_value(value)) for key, value in pairs)
        self._channel.send(Message(kind=Kind.CALL, call=number, properties=properties, contents=contents))
        try:
            head = await messages.get()
        except BaseException:
            self._cancel(number)
            raise
        if head.streams:
            return self._stream(head, messages)
        del self._messages[number]
        if head.code == 200:
            return _part(head, head.data, last=True)
        output = Output(head.code, head.message).add(head.data)
        output.properties.update(head.properties)
        return output

    def take(self, message: Message) -> None:
        if (messages := self._messages.get(message.call)) is None:
            return
        messages.put_nowait(message)
        if message.kind is Kind.STREAM_END:
            del self._messages[message.call]

    async def _stream(self, head: Message, messages: asyncio.Queue[Message]) -> AsyncGenerator[Output, None]:
        try:
            while (message := await messages.get()).kind is not Kind.STREAM_END:
                yield _part(head, message.data, last=False)
            yield _part(head, message.data, last=True)
        finally:
            self._cancel(head.call)

    def _cancel(self, number: int) -> None:
        """Have the server end a call that nobody waits for any more; nothing if it has been answered."""
        if self._messages.pop(number, None) is not None:
            self._channel.send(Message(kind=Kind.CANCEL, call=number))


def _part(head: Message, data: bytes, *, last: bool) -> Output:
    """A part of an answer, as LMI's handlers of async mode return it."""
    output = Output().add(Output.binary_encode({"data": data.decode("utf-8", "replace"), "last": last}))
    output.properties.update(head.properties)
    return output
