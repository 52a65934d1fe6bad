"""The model's engine, which runs in the server: calls of a handler to it, over the worker's connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

from djl_python.inputs import Input
from djl_python.outputs import Output

from .channel import Channel, Frame, InputMessage, Kind, OutputMessage, decode_message, encode_message

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
        self._channel.send(Frame(Kind.CALL, number, encode_message(_message_of(inputs))))
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


def _message_of(inputs: Input) -> InputMessage:
    properties = [(name, value) for name, value in inputs.properties.items() if isinstance(value, str)]
    pairs = zip(inputs.content.get_keys(), inputs.content.get_values(), strict=True)
    return InputMessage(tuple(properties), tuple((key, _bytes_of(value)) for key, value in pairs))


def _bytes_of(value: object) -> bytes:
    """Content that the handler has put into an input may be what `Output` takes."""
    return Output().encode_value(value)


def _part(head: OutputMessage, data: bytes, *, last: bool) -> Output:
    """A part of an answer, as LMI's handlers of async mode return it."""
    output = Output().add(Output.binary_encode({"data": data.decode("utf-8", "replace"), "last": last}))
    output.properties.update(head.properties)
    return output
