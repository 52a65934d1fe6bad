"""One call of an endpoint: to the container's own routes and back, whole or as AWS's event stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from struct import pack
from zlib import crc32

from starlette.types import Message, Receive, Scope, Send

from container.http.uvicorn_protocol import BREAK_OFF
from deploy.local.errors import (
    ACCOUNT,
    NO_RESPONSE,
    TIMED_OUT,
    RuntimeApiError,
    model_error,
    no_answer,
    validation_error,
)
from deploy.local.parameters import VARIANT, Headers, Parameters, check_endpoint_name, reply_headers

MEBIBYTE = 1 << 20
_ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)
_NOT_READY = "Model for endpoint {} is not ready for inference yet. Please retry."
_UNAVAILABLE = 503
_LOADING = frozenset({207, _UNAVAILABLE})
"""What /ping answers while a model loads."""
_MAX_ERROR = 65536
"""Bytes that are read of an error."""
_LAST_WORD_SECONDS = 5.0
"""Time in which the caller has to take the message that ends a failed stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """The endpoints, and their limits, by default those of the platform."""

    endpoints: tuple[str, ...]
    components: frozenset[str] = frozenset()
    """Inference components that are the base model. If there are any, each call has to name one, as on the platform."""
    adapters: frozenset[str] = frozenset()
    """Inference components that are adapters of the container."""
    max_payload: int = 25 * MEBIBYTE
    """Bytes of a request, and of an answer that is not streamed."""
    answer_timeout: float = 60.0
    """Seconds until an answer is complete, or until the first byte of a stream."""
    stream_timeout: float = 480.0
    """Seconds until a stream is complete."""

    def check_name(self, name: str) -> None:
        """Raise RuntimeApiError for the name of an endpoint that is malformed or unknown."""
        check_endpoint_name(name)
        if name not in self.endpoints:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")

    def container_headers(self, name: str, parameters: Parameters) -> Headers:
        """The container's headers for a call of an endpoint.

        Raises RuntimeApiError where something that the call names does not exist.
        """
        variant = parameters.values.get("TargetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.values.get("TargetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        component = parameters.values.get("InferenceComponentName")
        if component is None and self.components:
            raise validation_error(_COMPONENT_MISSING, "INFERENCE_COMPONENT_NAME_MISSING")
        if component is None or component in self.components:
            return parameters.forwarded
        if component in self.adapters:
            return [*parameters.forwarded, (_ADAPTER_HEADER, component.encode())]
        raise validation_error(f"Inference component {component} of account {ACCOUNT} not found.")


class ClientGone(Exception):
    """The client left before its request was answered."""


class Invocation:
    """A call that has been read and checked, and what comes of it from the container's own routes, over ASGI."""

    def __init__(
        self, scope: Scope, receive: Receive, settings: LocalSettings, name: str, parameters: Parameters, body: bytes
    ) -> None:
        """`receive` tells when the client has left; `name`: of the endpoint.

        Raises RuntimeApiError where something that the call names does not exist.
        """
        self._receive, self._settings, self._name, self._parameters = receive, settings, name, parameters
        path = {"path": "/invocations", "raw_path": b"/invocations", "query_string": b""}
        self._scope = {**scope, **path, "headers": settings.container_headers(name, parameters)}
        self._request: list[Message] = [{"type": "http.request", "body": body}]
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self._on_piece: Callable[[bytes], Awaitable[None]] | None = None
        """Takes what comes of a successful reply, instead of `body`."""
        self._complete = self._too_large = self._left = False
        self._ended = asyncio.Event()

    async def whole(self) -> None:
        """Have the container answer; its reply is in `headers` and `body`.

        Raises RuntimeApiError where the call fails, and ClientGone.
        """
        try:
            async with asyncio.timeout(self._settings.answer_timeout):
                await self._run()
        except TimeoutError:
            raise no_answer(self._name, TIMED_OUT) from None
        await self._check()

    async def stream(self, common: Headers, send: Send) -> None:
        """Send the reply as an event stream while it comes. `common`: headers that every reply has.

        It begins with the first bytes of the container's; a later failure is the stream's last message. Where the
        caller does not take that message, its connection is dropped. Raises RuntimeApiError where the call fails before
        the first bytes, and ClientGone.
        """
        begun, last = False, b""
        seconds = self._settings.stream_timeout
        deadline = asyncio.get_running_loop().time() + seconds

        async def begin() -> None:
            nonlocal begun
            begun = True
            headers = [*common, *reply_headers(self._parameters.api, self.headers)]
            headers.insert(0, (b"content-type", b"application/vnd.amazon.eventstream"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def forward(piece: bytes) -> None:
            if not begun:
                limit.reschedule(deadline)
                await begin()
            await send({"type": "http.response.body", "body": payload_part(piece), "more_body": True})

        self._on_piece = forward
        try:
            async with asyncio.timeout(min(self._settings.answer_timeout, seconds)) as limit:
                await self._run()
        except TimeoutError:
            if not begun:
                raise no_answer(self._name, TIMED_OUT) from None
            text = f"The model did not finish its response within {seconds:g} seconds."
            last = model_stream_error("ModelInvocationTimeExceeded", text)
        else:
            if not begun:
                await self._check()
                await begin()
            elif not self._complete:
                text = "The connection between the endpoint and the model was reset or closed."
                last = model_stream_error("StreamBroken", text)
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS if last else None):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            self._scope["extensions"][BREAK_OFF]()

    async def _run(self) -> None:
        try:
            await self._scope["app"](self._scope, self._next, self._send)
        finally:
            self._ended.set()
        if self._left:
            raise ClientGone

    async def _next(self) -> Message:
        if self._request:
            return self._request.pop()
        leaving = asyncio.ensure_future(self._receive())
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
            self._left = not self._ended.is_set()
        finally:
            leaving.cancel()
            ending.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._ended.is_set():
            return  # it was given up
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
            return
        piece: bytes = message.get("body", b"")
        succeeded = 200 <= self.status < 300
        if self._on_piece is None or not succeeded:
            limit = self._settings.max_payload if succeeded else _MAX_ERROR
            self._too_large = len(self.body) + len(piece) > limit
            self.body += b"" if self._too_large else piece
        elif piece:
            await self._on_piece(piece)
        self._complete = not message.get("more_body", False) and not self._too_large
        if self._complete or self._too_large:
            self._ended.set()

    async def _check(self) -> None:
        """Raise the API's error for a reply that has ended and is not a whole and successful one."""
        if self.status == _UNAVAILABLE and await self._is_loading():
            raise RuntimeApiError("ModelNotReadyException", 429, _NOT_READY.format(self._name))
        if self._too_large:
            raise model_error(self._name, self.status, None)
        if not self._complete:
            raise no_answer(self._name, NO_RESPONSE.format(self._name))
        if not 200 <= self.status < 300:
            raise model_error(self._name, self.status, self.body)

    async def _is_loading(self) -> bool:
        import httpx  # takes a while, and is not needed by other commands

        transport = httpx.ASGITransport(self._scope["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://container", trust_env=False) as container:
            return (await container.get("/ping")).status_code in _LOADING


_EVENT = {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
_ERROR = {":exception-type": "ModelStreamError", ":content-type": "application/json", ":message-type": "exception"}
_STRING = 7
"""The type of a header's value."""


def payload_part(data: bytes) -> bytes:
    """The message of an event stream for a piece of the model's reply."""
    return event_message(_EVENT, data)


def model_stream_error(code: str, message: str) -> bytes:
    """The last message of a stream that fails after its first byte."""
    return event_message(_ERROR, json.dumps({"ErrorCode": code, "Message": message}).encode())


def event_message(headers: Mapping[str, str], payload: bytes) -> bytes:
    """A message of AWS's event stream ("Event stream encoding" in the Amazon Transcribe developer guide).

    It is its length, that of its headers, a checksum of both, the headers, the payload, and a checksum of all.
    """
    encoded = b""
    for name, value in ((name.encode(), value.encode()) for name, value in headers.items()):
        encoded += pack(">B", len(name)) + name + pack(">BH", _STRING, len(value)) + value
    prelude = pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    head = prelude + pack(">I", crc32(prelude)) + encoded
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))
