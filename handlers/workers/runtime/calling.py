"""Calling the customer's function, and what its result or exception means. Source: contracts/lmi.md 1.6, 7.1."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.wire import sendable

from .loading import find_formatters
from .messages import Contents, InputMessage, LoadOrder, OutputMessage, decode_input

logger = logging.getLogger("djl_python")

_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY_TEXTS = ("No available memory for the cache blocks", "CUDA error: out of memory")


class Caller:
    """Makes an `Input` of a message and calls the function that it names."""

    def __init__(self, module: ModuleType, order: LoadOrder) -> None:
        self._module = module
        self._order = order
        self._formatters = find_formatters(module)

    def initialize(self) -> Any:
        """The first call, which loads the model."""
        return self._call(InputMessage(self._order.properties, ()))

    def call(self, body: bytes) -> Any:
        """The function's result for a CALL frame; may be an awaitable."""
        return self._call(decode_input(body))

    def _call(self, message: InputMessage) -> Any:
        inputs = Input()
        inputs.properties.update(message.properties)
        inputs.properties.setdefault("handler", self._order.function)
        inputs.properties.update(self._order.standing_properties)
        inputs.properties.update(self._formatters)
        for name, value in message.contents:
            inputs.content.add(name, value)
        inputs.function_name = inputs.properties["handler"]
        return getattr(self._module, inputs.properties["handler"])(inputs)


def output_of(result: Any) -> Output:
    """The answer that a result stands for."""
    if result is None:
        return Output(204, "No content")
    if isinstance(result, Output):
        return result
    return Output().error(f"Invalid output type: {type(result)}")


def output_of_error(error: BaseException) -> OutputMessage:
    """The answer to an exception; its traceback goes to the log only."""
    logger.error("The handler failed", exc_info=error)
    text = _text_of(error)
    if is_out_of_memory(error):
        return OutputMessage(code=507, message=text or "out of memory", error=text or "out of memory")
    return _message(Output().error(text), False, text)


def _text_of(error: BaseException) -> str:
    """The exception's own text, whatever the customer has made of it, as far as it can be sent."""
    try:
        return sendable(str(error))
    except Exception:
        return type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by LMI's rule."""
    text = _text_of(error)
    return type(error).__name__ in _OUT_OF_MEMORY_TYPES or any(sign in text for sign in _OUT_OF_MEMORY_TEXTS)


def message_of(output: Output) -> OutputMessage:
    """What the server is told of an output.

    Raises:
        TypeError, ValueError: the handler has put something into it that cannot be sent.
    """
    return _message(output, output.stream_content is not None, "")


def _message(output: Output, streams: bool, error: str) -> OutputMessage:
    contents = () if streams else _contents(output)
    return OutputMessage(
        code=int(output.code),
        message=sendable(str(output.message)),
        properties=tuple((sendable(str(name)), sendable(str(value))) for name, value in output.properties.items()),
        contents=contents,
        streams=streams,
        error=error,
    )


def _contents(output: Output) -> Contents:
    pairs = zip(output.content.get_keys(), output.content.get_values(), strict=True)
    return tuple((key, output.encode_value(value)) for key, value in pairs)
