"""One call of an endpoint: to the container's own routes and back, whole or as AWS's event stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from container.http.protocol import BREAK_OFF
from deploy.local.errors import (
    ACCOUNT,
    model_error,
    model_not_ready,
    model_timed_out,
    model_without_response,
    validation_error,
)
from deploy.local.event_stream import CONTENT_TYPE, model_stream_error, payload_part
from deploy.local.parameters import VARIANT, Headers, Parameters, check_endpoint_name, reply_headers

MEBIBYTE = 1 << 20
_ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)
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
        """Check that an endpoint exists.

        Raises:
            RuntimeApiError: ValidationError, the name is malformed or unknown.
        """
        check_endpoint_name(name)
        if name not in self.endpoints:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")

    def container_headers(self, name: str, parameters: Parameters) -> Headers:
        """The container's headers for a call of an endpoint.

        Raises:
            RuntimeApiError: ValidationError, something that the call names does not exist.
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


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call that has been read and checked."""

    scope: Scope
    receive: Receive
    """Tells when the client has left; the body was read."""
    endpoint: str
    parameters: Parameters
    headers: Headers
    """Those that the container gets."""
    body: bytes


class ContainerCall:
    """A request to the container's own routes, over ASGI, and its reply."""

    def __init__(
        self, call: Invocation, max_payload: int, on_piece: Callable[[bytes], Awaitable[None]] | None = None
    ) -> None:
        """`max_payload`: bytes of a successful reply; `on_piece` takes what comes of it instead."""
        self._receive, self._max_payload, self._on_piece = call.receive, max_payload, on_piece
        self._app, self._body = call.scope["app"], call.body
        path = {"path": "/invocations", "raw_path": b"/invocations", "query_string": b""}
        self._scope = {**call.scope, **path, "headers": call.headers}
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.complete = self.too_large = self._read = self._left = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Pass the request on, until the reply is complete or given up.

        Raises:
            ClientGone: the client has left.
        """
        try:
            await self._app(self._scope, self._next, self._send)
        finally:
            self._ended.set()
        if self._left:
            raise ClientGone

    @property
    def succeeded(self) -> bool:
        """Whether the container answers with a status of success."""
        return 200 <= self.status < 300

    async def _next(self) -> Message:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body}
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
        if self._on_piece is None or not self.succeeded:
            limit = self._max_payload if self.succeeded else _MAX_ERROR
            self.too_large = len(self.body) + len(piece) > limit
            self.body += b"" if self.too_large else piece
        elif piece:
            await self._on_piece(piece)
        self.complete = not message.get("more_body", False) and not self.too_large
        if self.complete or self.too_large:
            self._ended.set()


async def invoke(call: Invocation, settings: LocalSettings) -> ContainerCall:
    """The call, with its whole reply.

    Raises:
        RuntimeApiError: the call fails.
        ClientGone: the client has left.
    """
    container = ContainerCall(call, settings.max_payload)
    try:
        async with asyncio.timeout(settings.answer_timeout):
            await container.run()
    except TimeoutError:
        raise model_timed_out(call.endpoint) from None
    await _check(call, container)
    return container


async def stream(call: Invocation, settings: LocalSettings, common: Headers, send: Send) -> None:
    """Send the reply as an event stream while it comes. `common`: headers that every reply has.

    It begins with the first bytes of the container's; a later failure is the stream's last message. Where the caller
    does not take that message, its connection is dropped.

    Raises:
        RuntimeApiError: the call fails before the first bytes.
        ClientGone: the client has left.
    """
    begun, last = False, b""
    deadline = asyncio.get_running_loop().time() + settings.stream_timeout

    async def begin() -> None:
        nonlocal begun
        begun = True
        headers = [(b"content-type", CONTENT_TYPE), *common, *reply_headers(call.parameters.api, container.headers)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def forward(piece: bytes) -> None:
        if not begun:
            limit.reschedule(deadline)
            await begin()
        await send({"type": "http.response.body", "body": payload_part(piece), "more_body": True})

    container = ContainerCall(call, settings.max_payload, forward)
    try:
        async with asyncio.timeout(min(settings.answer_timeout, settings.stream_timeout)) as limit:
            await container.run()
    except TimeoutError:
        if not begun:
            raise model_timed_out(call.endpoint) from None
        text = f"The model did not finish its response within {settings.stream_timeout:g} seconds."
        last = model_stream_error("ModelInvocationTimeExceeded", text)
    else:
        if not begun:
            await _check(call, container)
            await begin()
        elif not container.complete:
            text = "The connection between the endpoint and the model was reset or closed."
            last = model_stream_error("StreamBroken", text)
    try:
        async with asyncio.timeout(_LAST_WORD_SECONDS if last else None):
            await send({"type": "http.response.body", "body": last, "more_body": False})
    except TimeoutError:
        call.scope["extensions"][BREAK_OFF]()


async def _check(call: Invocation, container: ContainerCall) -> None:
    """Raise the API's error for a reply that has ended and is not a whole and successful one."""
    if container.status == _UNAVAILABLE and await _is_loading(call.scope, call.receive):
        raise model_not_ready(call.endpoint)
    if container.too_large:
        raise model_error(call.endpoint, container.status, None)
    if not container.complete:
        raise model_without_response(call.endpoint)
    if not container.succeeded:
        raise model_error(call.endpoint, container.status, container.body)


async def _is_loading(scope: Scope, receive: Receive) -> bool:
    status = 0
    body: list[Message] = [{"type": "http.request", "body": b""}]

    async def request() -> Message:
        return body.pop() if body else await receive()

    async def note(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    ping = {"method": "GET", "path": "/ping", "raw_path": b"/ping", "query_string": b"", "headers": []}
    await scope["app"]({**scope, **ping}, request, note)
    return status in _LOADING
