"""One call of an endpoint: to the container and back, whole or as an event stream.

Source: contracts/sagemaker_hosting.md sections 4, 5 and 12.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, Literal
from zlib import crc32

import httpx

from container.http.protocol import BREAK_OFF
from deploy.local.container import ContainerBroken, ContainerBusy, ContainerClient, ContainerUnreachable, read_up_to
from deploy.local.endpoints import Endpoints
from deploy.local.errors import (
    RuntimeApiError,
    internal_failure,
    model_error,
    model_not_ready,
    model_timed_out,
    model_without_response,
    service_unavailable,
)
from deploy.local.parameters import Headers, Parameters, reply_headers
from deploy.local.settings import LocalSettings

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/vnd.amazon.eventstream"

StreamErrorCode = Literal["ModelInvocationTimeExceeded", "StreamBroken"]

_STRING = 7
_MAX_NAME, _MAX_VALUE = 255, 65535


def encode_headers(headers: Sequence[tuple[str, str]]) -> bytes:
    """The headers part of a message; every value is a string.

    Raises:
        ValueError: a name has no or more than 255 bytes, or a value more than 65535.
    """
    parts = []
    for name, value in headers:
        raw_name, raw_value = name.encode(), value.encode()
        if not 0 < len(raw_name) <= _MAX_NAME:
            raise ValueError(f"a header's name has {len(raw_name)} bytes; 1 to {_MAX_NAME} are allowed")
        if len(raw_value) > _MAX_VALUE:
            raise ValueError(f"header {name} has {len(raw_value)} bytes; at most {_MAX_VALUE} are allowed")
        parts.append(pack(">B", len(raw_name)) + raw_name + pack(">BH", _STRING, len(raw_value)) + raw_value)
    return b"".join(parts)


def encode_message(headers: bytes, payload: bytes) -> bytes:
    """A message with headers that `encode_headers` made."""
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    head = prelude + pack(">I", crc32(prelude)) + headers
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))


_PAYLOAD_PART = encode_headers(
    (
        (":event-type", "PayloadPart"),
        (":content-type", "application/octet-stream"),
        (":message-type", "event"),
    )
)


def payload_part(data: bytes) -> bytes:
    """A piece of the model's reply."""
    return encode_message(_PAYLOAD_PART, data)


def model_stream_error(message: str, code: StreamErrorCode) -> bytes:
    """The model failed after the first byte; nothing comes after this message."""
    return _exception("ModelStreamError", {"ErrorCode": code, "Message": message})


def internal_stream_failure(message: str) -> bytes:
    """The platform failed after the first byte; nothing comes after this message."""
    return _exception("InternalStreamFailure", {"Message": message})


def _exception(name: str, document: dict[str, str]) -> bytes:
    headers = encode_headers(
        (
            (":exception-type", name),
            (":content-type", "application/json"),
            (":message-type", "exception"),
        )
    )
    return encode_message(headers, json.dumps(document).encode())


_PING_SECONDS = 2.0
_REGISTER_SECONDS = 60.0
_MAX_ANSWER = 65536
_CONFLICT = 409
_LOADING = frozenset({207, 503})
"""What containers answer while a model loads; any other failure is the model's own, and a call will show it."""


class Readiness:
    """Remembers that a container has come into service, so that calls do not ask for it each time."""

    def __init__(self, container: ContainerClient, adapters: Mapping[str, str]) -> None:
        """`adapters`: name and source of those that the container is to load; see `POST /adapters`."""
        self._container = container
        self._adapters = {name: source for name, source in adapters.items() if source}
        self._in_service = False
        self._asking = asyncio.Lock()

    async def check(self, endpoint: str) -> None:
        """Let a call pass, or not.

        Raises:
            RuntimeApiError: ModelNotReadyException, the model is still loading.
            ContainerUnreachable, ContainerBroken, ContainerBusy: there is no asking.
        """
        if self._in_service:
            return
        async with self._asking:
            if self._in_service:
                return
            try:
                async with (
                    asyncio.timeout(_PING_SECONDS),
                    self._container.request("GET", "/ping", (), b"") as response,
                ):
                    status = response.status_code
                    await read_up_to(response, _MAX_ANSWER)  # so that the connection can serve the call
            except TimeoutError:
                raise model_not_ready(endpoint) from None
            if status in _LOADING:
                raise model_not_ready(endpoint)
            if status == 200:
                for name, source in self._adapters.items():
                    await self._register(name, source)
                self._in_service = True

    def lost(self) -> None:
        """The container could not be reached, or serve: it may be starting again, and then has no adapters yet."""
        self._in_service = False

    async def _register(self, name: str, source: str) -> None:
        """Have an adapter loaded. A failure is logged: calls for the adapter get the container's own error."""
        body = json.dumps({"name": name, "src": source}).encode()
        headers = [("content-type", "application/json")]
        try:
            async with (
                asyncio.timeout(_REGISTER_SECONDS),
                self._container.request("POST", "/adapters", headers, body) as response,
            ):
                answer = await read_up_to(response, _MAX_ANSWER) or b""
        except TimeoutError:
            logger.error("adapter %s: the container did not load it within %g s", name, _REGISTER_SECONDS)
            return
        if response.status_code == _CONFLICT:
            # As a rule it has the adapter from an earlier time; if not, calls for it show what else is wrong.
            logger.info("adapter %s: %s", name, answer[:500].decode(errors="replace"))
        elif response.is_success:
            logger.info("adapter %s is registered, from %s", name, source)
        else:
            logger.error(
                "adapter %s: POST /adapters answered %d: %s",
                name,
                response.status_code,
                answer[:500].decode(errors="replace"),
            )


Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_NOT_FOUND, _UNAVAILABLE = 404, 503
_MAX_ERROR_BYTES = 65536
_LAST_WORD_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call that has been read and checked."""

    endpoint: str
    parameters: Parameters
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A container's whole answer, as the caller gets it."""

    headers: Headers
    body: bytes


class Invoker:
    """Makes calls to the container and turns what becomes of them into the API's terms."""

    def __init__(self, settings: LocalSettings, container: ContainerClient) -> None:
        self._settings = settings
        self._container = container
        self.endpoints = Endpoints(settings, container)
        self._readiness = Readiness(container, settings.adapters)

    async def invoke(self, invocation: Invocation, seconds: float | None = None, most: int | None = None) -> Answer:
        """The whole answer, within `seconds` and with at most `most` bytes (default: the limits of a real-time call).

        Raises:
            RuntimeApiError: there is no good answer.
        """
        try:
            async with (
                asyncio.timeout(seconds or self._settings.answer_timeout),
                self._reply(invocation) as response,
            ):
                body = await read_up_to(response, most or self._settings.max_payload)
        except TimeoutError:
            if self.endpoints.loading(invocation.parameters):
                raise model_not_ready(invocation.endpoint) from None
            raise model_timed_out(invocation.endpoint) from None
        except ContainerBroken as error:
            raise self._broken(invocation, error) from error
        if body is None:
            raise model_error(invocation.endpoint, response.status_code, None)
        return Answer(reply_headers(invocation.parameters.api, response.headers.raw), body)

    async def stream(self, invocation: Invocation, common: Headers, send: Send, break_off: Callable[[], None]) -> None:
        """Send the answer as an event stream while it comes. `common`: headers that every reply has.

        The reply begins with the first bytes of the container's; what goes wrong later is the stream's last message.
        `break_off` drops the caller's connection, where it does not take that message.

        Raises:
            RuntimeApiError: something went wrong before the first bytes.
        """
        begun, last = False, b""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.stream_timeout
        try:
            async with (
                asyncio.timeout(min(self._settings.answer_timeout, self._settings.stream_timeout)) as limit,
                self._reply(invocation) as response,
            ):
                pieces = response.aiter_raw()
                first = await anext(pieces, b"")
                limit.reschedule(deadline)
                await send(_start(common, reply_headers(invocation.parameters.api, response.headers.raw)))
                begun = True
                if first:
                    await send(_part(first))
                async for piece in pieces:
                    await send(_part(piece))
        except TimeoutError:
            if not begun:
                raise model_timed_out(invocation.endpoint) from None
            last = model_stream_error(
                f"The model did not finish its response within {self._settings.stream_timeout:g} seconds.",
                "ModelInvocationTimeExceeded",
            )
        except ContainerBroken as error:
            if not begun:
                raise self._broken(invocation, error) from error
            logger.warning("endpoint %s: the container broke a stream off: %s", invocation.endpoint, error)
            last = model_stream_error(
                "The connection between the endpoint and the model was reset or closed.", "StreamBroken"
            )
        except Exception:
            if not begun:
                raise
            logger.exception("endpoint %s: internal error in the middle of a stream", invocation.endpoint)
            last = internal_stream_failure(internal_failure().message)
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS if last else None):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            break_off()

    @contextlib.asynccontextmanager
    async def _reply(self, invocation: Invocation) -> AsyncIterator[httpx.Response]:
        """A container's successful reply, its body still unread.

        Raises:
            RuntimeApiError: the call is refused, here or by the container, or does not reach it.
            ContainerBroken: the connection broke.
        """
        name = invocation.endpoint
        try:
            await self._readiness.check(name)
            async with contextlib.AsyncExitStack() as replies:
                response = await replies.enter_async_context(await self._request(invocation))
                if response.status_code == _NOT_FOUND and await self.endpoints.lost(invocation.parameters):
                    # Unloaded by somebody else, or the container was started again; it has not seen the call.
                    await replies.aclose()
                    response = await replies.enter_async_context(await self._request(invocation))
                if response.status_code == _UNAVAILABLE:
                    self._readiness.lost()
                if not response.is_success:
                    body = await read_up_to(response, _MAX_ERROR_BYTES)
                    text = None if body is None else body.decode(errors="replace")
                    raise model_error(name, response.status_code, text)
                yield response
        except ContainerUnreachable as error:
            self._readiness.lost()
            if self.endpoints.target_models is not None:
                self.endpoints.target_models.forget()
            raise service_unavailable(
                f"The container of endpoint {name} at {self._settings.container} cannot be reached: {error}"
            ) from error
        except ContainerBusy as error:
            raise service_unavailable(
                f"Endpoint {name} has {self._settings.max_connections} calls under way and takes no more."
            ) from error

    async def _request(self, invocation: Invocation) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        route = await self.endpoints.route(invocation.endpoint, invocation.parameters)
        return self._container.request("POST", route.path, route.headers, invocation.body)

    def _broken(self, invocation: Invocation, error: ContainerBroken) -> RuntimeApiError:
        logger.warning("endpoint %s: the container broke a call off: %s", invocation.endpoint, error)
        return model_without_response(invocation.endpoint)


def break_off_of(scope: MutableMapping[str, Any]) -> Callable[[], None]:
    """What drops the connection of a request at once; on servers that cannot, nothing does."""
    found: Callable[[], None] = scope.get("extensions", {}).get(BREAK_OFF, lambda: None)
    return found


def _start(common: Headers, headers: Headers) -> MutableMapping[str, Any]:
    framing = (b"content-type", CONTENT_TYPE.encode())
    return {"type": "http.response.start", "status": 200, "headers": [framing, *common, *headers]}


def _part(data: bytes) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": payload_part(data), "more_body": True}
