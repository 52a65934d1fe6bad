"""A call of a customer's handler to the engine. The worker process sends it to the server."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from engines.errors import RequestError
from engines.interface import EngineStartError
from handlers.contract import JSON, Call, ContractError, Handler, Reply, Running, read_steering
from handlers.custom.worker_process.socket_protocol import Message, MessageKind
from handlers.deadline import read_time_limit
from handlers.djl_errors import front_end_reply, payload_error

logger = logging.getLogger("handlers.custom")

# Returns the handler that calls the engine. Loads the engine first if it is not loaded. May raise EngineStartError.
EngineLoader = Callable[[], Awaitable[Handler]]
_NO_ENGINE = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service puts an engine behind a handler; this has none"
_TEXT, _FORM = "text/plain", "application/x-www-form-urlencoded"
_NO_HEADERS = frozenset({"content-type", "requestid", "handler", "model_dir", "device_id"})


@dataclass(frozen=True, slots=True)
class Origin:
    """The client's call during which the handler calls the engine."""

    key_salt: str = ""  # A text that differs for each API key. Empty if the server has no keys.
    arrived_at: float = 0.0  # See `Call.arrived_at`. 0 if the handler calls the engine outside a client's call.
    time_limit: float | None = None  # See `Call.time_limit`.


NO_ORIGIN = Origin()


class EngineCall:
    """A call of a customer's handler to the engine.

    Implements `ReplyWriter`: the reply goes to the worker. A handler that reads its stream slowly delays no other call:
    the unread rest of the answer is buffered in the worker's memory.
    """

    def __init__(
        self,
        load_engine: EngineLoader | None,
        message: Message,
        origin: Origin,
        send: Callable[[Message], None],
        on_end: Callable[[], object],
    ) -> None:
        """Start the call.

        Args:
            load_engine: None if the model has no engine.
            message: The call as the worker sent it.
            origin: The client's call during which the handler makes this call.
            send: Sends a message to the worker.
            on_end: Called when the call has its full answer.
        """
        self._message, self._origin = message, origin
        self._send_message, self._on_end = send, on_end
        self._running: Running | None = None
        self._task = asyncio.create_task(self._answer(load_engine))

    def cancel(self) -> None:
        self._task.cancel()
        if self._running is not None:
            self._running.cancel()

    async def _answer(self, load_engine: EngineLoader | None) -> None:
        loading = not self._message.contents  # A call without content only loads the engine.
        try:
            if load_engine is None:
                raise EngineStartError(_NO_ENGINE)
            handler = await load_engine()
            if loading:
                self.reply(Reply(200, "", b""))
                return
            self._running = await handler.handle(_call_of(self._message, self._origin), self)
        except ContractError as error:
            self.reply(error.reply)
        except (RequestError, EngineStartError) as error:
            text = str(error)
            self.reply(Reply(424, _TEXT, text.encode()) if loading else Reply(424, JSON, payload_error(text)))
        except Exception as error:
            logger.exception("a handler's call to the engine failed")
            self.reply(front_end_reply(500, "InternalServerException", f"internal error: {error}"))

    def reply(self, reply: Reply) -> None:
        self._head(Message(code=reply.status, contents=(("data", reply.body),)), reply.content_type, reply.headers)
        self._on_end()

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._head(Message(code=status, streams=True), content_type, headers)

    def write(self, data: bytes) -> None:
        self._send(Message(kind=MessageKind.CHUNK, contents=(("data", data),)))

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self._send(Message(kind=MessageKind.STREAM_END, contents=(("data", data),)))
        self._on_end()

    async def drain(self) -> None:
        return

    def _head(self, head: Message, content_type: str, headers: tuple[tuple[str, str], ...]) -> None:
        properties = (*headers, ("Content-Type", content_type)) if content_type else headers
        self._send(replace(head, properties=properties))

    def _send(self, message: Message) -> None:
        self._send_message(replace(message, call=self._message.call))


def _call_of(message: Message, origin: Origin) -> Call:
    """Return the call for an `Input`.

    The properties become headers. The content `data` becomes the body. All other contents become the query.
    """
    named = {name.lower(): value for name, value in message.properties}
    fields = tuple((key or "data", value.decode("utf-8", "replace")) for key, value in message.contents)
    query = tuple(field for field in fields if field[0] != "data")
    body, content_type = message.data, named.get("content-type", "")
    # An `Input` that was made from a form has no `data`. So without `data`, the contents are the fields of a form.
    if query == fields:
        body, content_type, query = urlencode(fields).encode(), _FORM, ()
    headers = {
        name.encode("latin-1", "replace"): value.encode("latin-1", "replace")
        for name, value in named.items()
        if name not in _NO_HEADERS
    }
    steering, fault = read_steering(headers, origin.key_salt)
    own, wrong = read_time_limit(headers, ())
    limits = [seconds for seconds in (own, origin.time_limit) if seconds is not None]
    return Call(
        body=body,
        content_type=content_type,
        request_id=named.get("requestid") or str(uuid.uuid4()),
        headers=headers,
        query=query,
        key_salt=origin.key_salt,
        steering=steering,
        steering_fault=fault or wrong,
        arrived_at=origin.arrived_at or time.monotonic(),
        time_limit=min(limits, default=None),
        from_handler=True,
    )
