"""What a worker's handler asks of the model's engine: the server's end of `djl_python.lmi_vllm`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlencode

from handlers.contracts.lmi.errors import JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Call, ContractError, Handler, Reply, Running
from handlers.engines.protocol import EngineStartError
from handlers.errors import RequestError
from handlers.workers.runtime.channel import (
    Frame,
    InputMessage,
    Kind,
    OutputMessage,
    data_of,
    decode_message,
    encode_message,
)

logger = logging.getLogger("handlers.workers")

LoadedEngine = Callable[[], Awaitable[Handler]]
"""What answers a call; loads the engine if that is not loaded, and may raise EngineStartError."""
_NO_ENGINE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service puts an engine behind a handler; this has none"
_TEXT, _FORM = "text/plain", "application/x-www-form-urlencoded"
_NO_HEADERS = frozenset({"content-type", "requestid", "handler", "model_dir", "device_id"})


class EngineCalls:
    """The calls of one worker to the engine."""

    def __init__(self, engine: LoadedEngine | None, send: Callable[[Kind, int, bytes], None]) -> None:
        """`engine`: None where the model has none. `send`: sends a frame to the worker."""
        self._engine, self._send = engine, send
        self._open: dict[int, asyncio.Task[None]] = {}
        """Calls that have not reached the engine."""
        self._running: dict[int, Running] = {}

    def take(self, frame: Frame) -> None:
        """Take a frame: a call, or the cancellation of one."""
        if frame.kind is Kind.CALL:
            task = asyncio.create_task(self._answer(frame.call, decode_message(InputMessage, frame.body)))
            self._open[frame.call] = task
            task.add_done_callback(lambda _: self._open.pop(frame.call, None))
        else:
            self._cancel(frame.call)

    def stop(self) -> None:
        """Cancel all calls: the worker has ended."""
        for number in (*self._open, *self._running):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if (task := self._open.get(number)) is not None:
            task.cancel()
        if (running := self._running.pop(number, None)) is not None:
            running.cancel()

    async def _answer(self, number: int, message: InputMessage) -> None:
        writer = _FrameWriter(
            lambda kind, body: self._send(kind, number, body), lambda: self._running.pop(number, None)
        )
        try:
            if self._engine is None:
                raise EngineStartError(_NO_ENGINE)
            handler = await self._engine()
            if not message.contents:
                writer.reply(Reply(200, "", b""))
                return
            running = await handler.handle(_call_of(message), writer)
            if running is not None and not writer.ended:
                self._running[number] = running
        except ContractError as error:
            writer.reply(error.reply)
        except (RequestError, EngineStartError) as error:
            text = str(error)
            loading = not message.contents
            writer.reply(Reply(424, _TEXT, text.encode()) if loading else Reply(424, JSON, payload_error(text)))
        except Exception as error:
            logger.exception("a handler's call to the engine failed")
            writer.reply(front_end_reply(500, "InternalServerException", f"internal error: {error}"))


class _FrameWriter:
    """Implements `ReplyWriter`: sends a reply to the worker.

    A handler that reads its stream slowly holds back nobody; what waits for it is at most one answer.
    """

    def __init__(self, send: Callable[[Kind, bytes], None], on_end: Callable[[], object]) -> None:
        self._send, self._on_end = send, on_end
        self.ended = False

    def reply(self, reply: Reply) -> None:
        contents = (("data", reply.body),)
        self._head(OutputMessage(code=reply.status, contents=contents), reply.content_type, reply.headers)
        self._end()

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._head(OutputMessage(code=status, streams=True), content_type, headers)

    def write(self, data: bytes) -> None:
        self._send(Kind.CHUNK, data)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self._send(Kind.STREAM_END, data)
        self._end()

    async def drain(self) -> None:
        return

    def _head(self, output: OutputMessage, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        properties = (*headers, ("Content-Type", content_type)) if content_type else headers
        self._send(Kind.OUTPUT, encode_message(replace(output, properties=properties)))

    def _end(self) -> None:
        self.ended = True
        self._on_end()


def _call_of(message: InputMessage) -> Call:
    """The call that an `Input` stands for: its properties are headers, and content beside the body is the query."""
    named = {name.lower(): value for name, value in message.properties}
    fields = tuple((key or "data", value.decode("utf-8", "replace")) for key, value in message.contents)
    query = tuple(field for field in fields if field[0] != "data")
    body, content_type = data_of(message.contents), named.get("content-type", "")
    if query == fields:  # those of a form, which has no body of its own
        body, content_type, query = urlencode(fields).encode(), _FORM, ()
    return Call(
        body=body,
        content_type=content_type,
        request_id=named.get("requestid") or str(uuid.uuid4()),
        headers=tuple((name, value) for name, value in message.properties if name.lower() not in _NO_HEADERS),
        query=query,
    )
