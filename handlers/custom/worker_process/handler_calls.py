"""Calls the handler function: one call at a time, or in async mode many calls on one event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import threading
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.service_loader import find_decorated_function
from djl_python.wire import sendable

from .remote_engine import RemoteEngine
from .script_mode import SageMakerScript
from .socket_protocol import CREDIT_BYTES, INITIAL_CREDITS, LoadRequest, Message, MessageKind, ServerConnection

logger = logging.getLogger("djl_python")

Credits = TypeVar("Credits", threading.Semaphore, asyncio.Semaphore)

_OUTPUT = "output_formatter"
_FORMATTERS = {"input_formatter": "is_input_formatter", _OUTPUT: "is_output_formatter"}
_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY_TEXTS = ("No available memory for the cache blocks", "CUDA error: out of memory")


class HandlerCaller:
    """Makes the `Input` from a message and calls the handler function."""

    def __init__(self, module: ModuleType, request: LoadRequest) -> None:
        self._module = module
        self._request = request
        found = {key: find_decorated_function(module, marker) for key, marker in _FORMATTERS.items()}
        self._formatters = {key: formatter for key, formatter in found.items() if formatter is not None}

    @property
    def takes_batches(self) -> bool:
        """False for a script. Each of its answers has its own status and content type, which a batch does not allow."""
        return not isinstance(getattr(self._module, self._request.function), SageMakerScript)

    def call(self, message: Message) -> Any:
        """Return the function's result, which may be an awaitable.

        Args:
            message: The call. Its property `handler` may name another function. A call without content initializes
                the handler.
        """
        inputs = Input()
        properties = dict(message.properties)
        function = properties.get("handler", self._request.function)
        reserved = {"handler": function, "model_dir": self._request.model_dir, "device_id": self._request.device_id}
        inputs.properties.update({**properties, **reserved, **self._formatters})
        if _OUTPUT in properties:  # As in LMI, the setting takes precedence over the decorated function.
            inputs.properties[_OUTPUT] = properties[_OUTPUT]
        for name, value in message.contents:
            inputs.content.add(name, bytearray(value))  # Handlers may change the bytes, as in LMI.
        inputs.function_name = function
        target = getattr(self._module, function)
        return target(inputs, message.headers) if isinstance(target, SageMakerScript) else target(inputs)

    def initialize(self) -> Any:
        return self.call(Message(properties=tuple(self._request.properties.items())))


def output_of(result: Any) -> Output:
    """Return the output for a function's result: 204 for None, and 424 for a type other than `Output`."""
    if result is None:
        return Output(204, "No content")
    if isinstance(result, Output):
        return result
    if inspect.iscoroutine(result):
        result.close()
        return Output().error("The handler's function is async, which needs option.async_mode=true")
    return Output().error(f"Invalid output type: {type(result)}")


def _message_of(call: int, output: Output, error: str | None = None) -> Message:
    """Return the message for an output.

    Raises:
        TypeError: The output holds a value that JSON cannot hold.
        ValueError: The output holds a value that UTF-8 or JSON cannot hold.
    """
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
    """Return the message for an exception. Only the log gets the traceback."""
    logger.error("The handler failed", exc_info=error)
    text = _text_of(error)
    if is_out_of_memory(error):
        return Message(call=call, code=507, message=text or "out of memory", error=text or "out of memory")
    return _message_of(call, Output().error(text), text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if LMI would treat the exception as a lack of memory."""
    text = _text_of(error)
    return type(error).__name__ in _OUT_OF_MEMORY_TYPES or any(sign in text for sign in _OUT_OF_MEMORY_TEXTS)


def _text_of(error: BaseException) -> str:
    """Return the exception's text, or the name of its type if its `__str__` fails."""
    try:
        return sendable(str(error))
    except Exception:
        return type(error).__name__


class _SendWindow(Generic[Credits]):
    """The flow control of one call: its credits and its cancellation."""

    def __init__(self, credits: Credits) -> None:
        self.credits: Credits = credits
        self.cancelled = False
        self._sent = 0

    def due(self, size: int) -> range:
        """Return a range with one item for each credit to acquire before the next `size` bytes are sent.

        Each credit pays for CREDIT_BYTES that were sent earlier.
        """
        used, self._sent = divmod(self._sent, CREDIT_BYTES)
        self._sent += size
        return range(used)


class SyncMode:
    """Serves calls one after another in the main thread. The thread that reads the connection can cancel calls."""

    def __init__(self, connection: ServerConnection, caller: HandlerCaller) -> None:
        self._connection, self._caller = connection, caller
        self._calls: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._windows: dict[int, _SendWindow[threading.Semaphore]] = {}

    def serve(self) -> None:
        while (message := self._calls.get()) is not None:
            self._answer(message, self._windows[message.call])
            del self._windows[message.call]

    def take(self, message: Message) -> None:
        """Handle a message from the server, in the thread that reads the connection."""
        window = self._windows.get(message.call)
        if message.kind is MessageKind.CALL:
            self._windows[message.call] = _SendWindow(threading.Semaphore(INITIAL_CREDITS))
            self._calls.put(message)
        elif message.kind is MessageKind.STOP:
            self._calls.put(None)
        elif window is not None:
            window.cancelled = window.cancelled or message.kind is MessageKind.CANCEL
            window.credits.release()

    def _answer(self, message: Message, window: _SendWindow[threading.Semaphore]) -> None:
        call, done = message.call, Message(kind=MessageKind.DONE, call=message.call)
        if window.cancelled:
            self._connection.send(done)
            return
        try:
            output = output_of(self._caller.call(message))
            head = _message_of(call, output)
        except (Exception, asyncio.CancelledError) as error:
            output, head = Output(), _failure(call, error)
        if output.stream_content is None and output.finalize_function is None:
            # Both messages are sent together, so that the worker is free by the time the client has the answer.
            self._connection.send(head, done)
            return
        self._connection.send(head)
        if output.stream_content is not None:
            self._stream(call, output, window)
        try:
            output.execute_finalize()
        except Exception:
            logger.exception("The finalize function failed")
        self._connection.send(done)

    def _stream(self, call: int, output: Output, window: _SendWindow[threading.Semaphore]) -> None:
        try:
            for chunk in output.stream_chunks():
                self._send_chunk(call, chunk, window)
                if window.cancelled:
                    break
        except (Exception, asyncio.CancelledError) as error:
            self._connection.send(_failure(call, error))
        try:
            # This runs the `finally` blocks of a generator that was not read to its end.
            if (close := getattr(output.stream_content, "close", None)) is not None:
                close()
        except (Exception, asyncio.CancelledError):
            logger.exception("The stream raised an exception when it was closed")
        self._connection.send(Message(kind=MessageKind.STREAM_END, call=call))

    def _send_chunk(self, call: int, chunk: bytes, window: _SendWindow[threading.Semaphore]) -> None:
        for start in range(0, len(chunk), CREDIT_BYTES):
            piece = chunk[start : start + CREDIT_BYTES]
            for _ in window.due(len(piece)):
                window.credits.acquire()
            if window.cancelled:
                return
            self._connection.send(Message(kind=MessageKind.CHUNK, call=call, contents=((None, piece),)))


class AsyncMode:
    """Serves many calls on one event loop in the main thread. A slow client delays only its own call."""

    def __init__(self, connection: ServerConnection, caller: HandlerCaller) -> None:
        self._connection, self._caller = connection, caller
        self.engine = RemoteEngine(connection)
        self._tasks: dict[int, tuple[asyncio.Task[None], _SendWindow[asyncio.Semaphore]]] = {}
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Wait for STOP, then wait until the running calls have ended."""
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait([task for task, _ in self._tasks.values()])

    def take(self, message: Message) -> None:
        """Handle a message from the server, on the event loop."""
        if message.kind is MessageKind.CALL:
            self._begin(message)
        elif message.kind is MessageKind.STOP:
            self._stopped.set()
        elif message.kind in (MessageKind.OUTPUT, MessageKind.CHUNK, MessageKind.STREAM_END):
            self.engine.take(message)
        elif message.call in self._tasks:
            task, window = self._tasks[message.call]
            if message.kind is MessageKind.CANCEL:
                window.cancelled = True
                task.cancel()
            else:
                window.credits.release()

    def _begin(self, message: Message) -> None:
        window = _SendWindow(asyncio.Semaphore(INITIAL_CREDITS))
        task = asyncio.get_running_loop().create_task(self._answer(message, window))
        self._tasks[message.call] = (task, window)
        self.engine.tasks[task] = message.call
        # `_answer` cannot do this: if its task is cancelled before its first step, none of its code runs.
        task.add_done_callback(lambda _: self._finish(message.call))

    def _finish(self, call: int) -> None:
        del self._tasks[call]
        self._connection.send(Message(kind=MessageKind.DONE, call=call))

    async def _answer(self, message: Message, window: _SendWindow[asyncio.Semaphore]) -> None:
        try:
            result = await awaited(self._caller.call(message))
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
                self._connection.send(_failure(message.call, error))

    async def _send(self, call: int, output: Output, window: _SendWindow[asyncio.Semaphore]) -> None:
        if output.stream_content is not None:
            raise TypeError("async mode does not read stream content: return an async generator of Outputs instead")
        message = _message_of(call, output)
        for _ in window.due(message.size):
            await window.credits.acquire()
        self._connection.send(message)
        output.execute_finalize()


def end_at_once(error: BaseException) -> NoReturn:
    """End the process, as the handler requested. The server answers the waiting clients."""
    logger.error("The handler ended its process", exc_info=error)
    logging.shutdown()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


async def _close(outputs: Any) -> None:
    """Run the `finally` blocks of a generator that was not read to its end."""
    try:
        if hasattr(outputs, "aclose"):
            await outputs.aclose()
    except Exception:
        logger.exception("The generator raised an exception when it was closed")


async def first_output(result: Any) -> Any:
    """Return the first output of an async generator and close it. Return any other result unchanged."""
    if not hasattr(result, "__aiter__"):
        return result
    try:
        return await anext(aiter(result), None)
    finally:
        await _close(result)


async def awaited(result: Any) -> Any:
    """Return the value of an awaitable. Return any other result unchanged."""
    return await result if inspect.isawaitable(result) else result
