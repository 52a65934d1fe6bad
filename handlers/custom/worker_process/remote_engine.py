"""Lets a handler in a worker process call the engine in the server's process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from weakref import WeakKeyDictionary

from djl_python.inputs import Input
from djl_python.outputs import Output

from .socket_protocol import Message, MessageKind, ServerConnection


class RemoteEngine:
    """Implements `djl_python.lmi_vllm.vllm_async_service.Engine` over the connection to the server.

    Its methods must run on one event loop.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        # The messages for each unfinished call, keyed by the call's number.
        self._messages: dict[int, asyncio.Queue[Message]] = {}
        # The number of the server's call that each task answers, keyed by the task. Tasks that the handler starts are
        # not included, because they may serve several calls.
        self.tasks: WeakKeyDictionary[asyncio.Task[None], int] = WeakKeyDictionary()

    async def call(self, inputs: Input) -> Output | AsyncGenerator[Output, None]:
        number = next(self._numbers)
        messages = self._messages[number] = asyncio.Queue()
        properties = tuple((name, value) for name, value in inputs.properties.items() if isinstance(value, str))
        pairs = zip(inputs.content.get_keys(), inputs.content.get_values(), strict=True)
        # The handler may have put its own content into the input: any value that `Output` accepts.
        contents = tuple((key, Output().encode_value(value)) for key, value in pairs)
        task = asyncio.current_task()
        within = 0 if task is None else self.tasks.get(task, 0)
        self._connection.send(
            Message(kind=MessageKind.CALL, call=number, within=within, properties=properties, contents=contents)
        )
        try:
            head = await messages.get()
        except BaseException:
            self._cancel(number)
            raise
        if head.streams:
            stream = self._stream(head, messages)
            # Begin the generator. If the handler drops it unread, its `finally` block runs only if it has begun.
            await anext(stream)
            return stream
        del self._messages[number]
        if head.code == 200:
            return _answer_part(head, head.data, last=True)
        output = Output(head.code, head.message).add(head.data)
        output.properties.update(head.properties)
        return output

    def take(self, message: Message) -> None:
        """Handle a message from the server."""
        if (messages := self._messages.get(message.call)) is None:
            return
        messages.put_nowait(message)
        if message.kind is MessageKind.STREAM_END:
            del self._messages[message.call]

    async def _stream(self, head: Message, messages: asyncio.Queue[Message]) -> AsyncGenerator[Output, None]:
        try:
            yield Output()  # `call` reads this output.
            while (message := await messages.get()).kind is not MessageKind.STREAM_END:
                yield _answer_part(head, message.data, last=False)
            yield _answer_part(head, message.data, last=True)
        finally:
            self._cancel(head.call)

    def _cancel(self, number: int) -> None:
        """Ask the server to end a call. Do nothing if the call already has its full answer."""
        if self._messages.pop(number, None) is not None:
            self._connection.send(Message(kind=MessageKind.CANCEL, call=number))


def _answer_part(head: Message, data: bytes, *, last: bool) -> Output:
    """Return a part of an answer in the form that LMI's handlers in async mode return."""
    output = Output().add(Output.binary_encode({"data": data.decode("utf-8", "replace"), "last": last}))
    output.properties.update(head.properties)
    return output
