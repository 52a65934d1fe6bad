"""One call of an endpoint: to the container and back, whole or as AWS's event stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from struct import pack
from zlib import crc32

import httpx
from starlette.types import Send

from deploy.local.container import ContainerBroken, ContainerBusy, ContainerClient, ContainerUnreachable, read_up_to
from deploy.local.endpoints import LocalSettings
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

logger = logging.getLogger(__name__)

_EVENT_STREAM = (b"content-type", b"application/vnd.amazon.eventstream")
_CONFLICT, _UNAVAILABLE = 409, 503
_LOADING = frozenset({207, _UNAVAILABLE})
"""What containers answer to a ping while a model loads; any other failure is the model's own, and a call shows it."""
_MAX_ANSWER = 65536
"""Bytes that are read of an error, and of the answer to a ping or a registration."""
_MAX_LOGGED = 500
_PING_SECONDS = 2.0
_REGISTER_SECONDS = 60.0
_LAST_WORD_SECONDS = 5.0
"""Time in which the caller has to take the message that ends a failed stream."""


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
    """Makes calls to the container and translates its answers and failures into the API's."""

    def __init__(self, settings: LocalSettings, container: ContainerClient) -> None:
        self._settings = settings
        self._container = container
        self._readiness = Readiness(container, settings.adapters)

    async def invoke(self, invocation: Invocation, seconds: float | None = None, most: int | None = None) -> Answer:
        """The whole answer, within `seconds` and with at most `most` bytes (default: the limits of a real-time call).

        Raises:
            RuntimeApiError: the call is refused or fails.
        """
        try:
            async with (
                asyncio.timeout(seconds or self._settings.answer_timeout),
                self._reply(invocation) as response,
            ):
                body = await read_up_to(response, most or self._settings.max_payload)
        except TimeoutError:
            raise model_timed_out(invocation.endpoint) from None
        except ContainerBroken as error:
            raise _broken(invocation, error) from error
        if body is None:
            raise model_error(invocation.endpoint, response.status_code, None)
        return Answer(reply_headers(invocation.parameters.api, response.headers.raw), body)

    async def stream(self, invocation: Invocation, common: Headers, send: Send, break_off: Callable[[], None]) -> None:
        """Send the answer as an event stream while it comes. `common`: headers that every reply has.

        The reply begins with the first bytes of the container's; a later failure is the stream's last message.
        `break_off` drops the caller's connection if it does not take that message.

        Raises:
            RuntimeApiError: the call is refused or fails before the first bytes.
        """
        begun, last = False, b""
        deadline = asyncio.get_running_loop().time() + self._settings.stream_timeout
        try:
            async with (
                asyncio.timeout(min(self._settings.answer_timeout, self._settings.stream_timeout)) as limit,
                self._reply(invocation) as response,
            ):
                pieces = response.aiter_raw()
                piece = await anext(pieces, b"")
                limit.reschedule(deadline)
                headers = [_EVENT_STREAM, *common, *reply_headers(invocation.parameters.api, response.headers.raw)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
                while piece:
                    await send({"type": "http.response.body", "body": payload_part(piece), "more_body": True})
                    piece = await anext(pieces, b"")
        except TimeoutError:
            if not begun:
                raise model_timed_out(invocation.endpoint) from None
            message = f"The model did not finish its response within {self._settings.stream_timeout:g} seconds."
            last = stream_exception("ModelStreamError", ErrorCode="ModelInvocationTimeExceeded", Message=message)
        except ContainerBroken as error:
            if not begun:
                raise _broken(invocation, error) from error
            logger.warning("endpoint %s: the container broke a stream off: %s", invocation.endpoint, error)
            message = "The connection between the endpoint and the model was reset or closed."
            last = stream_exception("ModelStreamError", ErrorCode="StreamBroken", Message=message)
        except Exception:
            if not begun:
                raise
            logger.exception("endpoint %s: internal error in the middle of a stream", invocation.endpoint)
            last = stream_exception("InternalStreamFailure", Message=internal_failure().message)
        try:
            async with asyncio.timeout(_LAST_WORD_SECONDS if last else None):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            break_off()

    @contextlib.asynccontextmanager
    async def _reply(self, invocation: Invocation) -> AsyncIterator[httpx.Response]:
        """The container's successful reply, its body still unread.

        Raises:
            RuntimeApiError: the call is refused, here or by the container, or does not reach it.
            ContainerBroken: the connection broke.
        """
        name = invocation.endpoint
        try:
            await self._readiness.check(name)
            headers = self._settings.container_headers(name, invocation.parameters)
            async with self._container.request("POST", "/invocations", headers, invocation.body) as response:
                if response.status_code == _UNAVAILABLE:
                    self._readiness.lost()
                if not response.is_success:
                    raise model_error(name, response.status_code, await read_up_to(response, _MAX_ANSWER))
                yield response
        except ContainerUnreachable as error:
            self._readiness.lost()
            raise service_unavailable(
                f"The container of endpoint {name} at {self._settings.container} cannot be reached: {error}"
            ) from error
        except ContainerBusy as error:
            raise service_unavailable(
                f"Endpoint {name} has {self._settings.max_connections} calls under way and takes no more."
            ) from error


def _broken(invocation: Invocation, error: ContainerBroken) -> RuntimeApiError:
    logger.warning("endpoint %s: the container broke a call off: %s", invocation.endpoint, error)
    return model_without_response(invocation.endpoint)


class Readiness:
    """Whether the container is in service. Asked once; the adapters are registered then."""

    def __init__(self, container: ContainerClient, adapters: Mapping[str, str]) -> None:
        """`adapters`: names and sources; one without a source is in the container already."""
        self._container = container
        self._adapters = {name: source for name, source in adapters.items() if source}
        self._in_service = False
        self._asking = asyncio.Lock()

    async def check(self, endpoint: str) -> None:
        """Ask the container, unless it is known to be in service.

        Raises:
            RuntimeApiError: ModelNotReadyException, the model is still loading.
            ContainerUnreachable, ContainerBroken, ContainerBusy: the container cannot be asked.
        """
        async with self._asking:
            if self._in_service:
                return
            try:
                status, _ = await self._ask(_PING_SECONDS, "GET", "/ping", b"")
            except TimeoutError:
                raise model_not_ready(endpoint) from None
            if status in _LOADING:
                raise model_not_ready(endpoint)
            if status == 200:
                for name, source in self._adapters.items():
                    await self._register(name, source)
                self._in_service = True

    def lost(self) -> None:
        """Ask again before the next call: the container may be restarting, and then has no adapters."""
        self._in_service = False

    async def _register(self, name: str, source: str) -> None:
        """Have an adapter loaded. A failure is only logged: calls for the adapter get the container's own error."""
        body = json.dumps({"name": name, "src": source}).encode()
        try:
            status, answer = await self._ask(_REGISTER_SECONDS, "POST", "/adapters", body)
        except TimeoutError:
            logger.error("adapter %s: the container did not load it within %g s", name, _REGISTER_SECONDS)
            return
        shown = answer[:_MAX_LOGGED].decode(errors="replace")
        if 200 <= status < 300:
            logger.info("adapter %s is registered, from %s", name, source)
        elif status == _CONFLICT:
            # Usually the adapter is registered since an earlier start; if something else is wrong, calls show it.
            logger.info("adapter %s: %s", name, shown)
        else:
            logger.error("adapter %s: POST /adapters answered %d: %s", name, status, shown)

    async def _ask(self, seconds: float, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        headers = [("content-type", "application/json")] if body else []
        async with asyncio.timeout(seconds), self._container.request(method, path, headers, body) as response:
            # The whole body is read so that the connection can serve another call.
            return response.status_code, await read_up_to(response, _MAX_ANSWER) or b""


# AWS's event stream ("Event stream encoding" in the Amazon Transcribe developer guide): each message is its length,
# that of its headers, a checksum of both, the headers, the payload, and a checksum of all.

_STRING = 7
"""The type of a header's value."""


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """The headers of a message."""
    return b"".join(
        pack(">B", len(name.encode())) + name.encode() + pack(">BH", _STRING, len(value.encode())) + value.encode()
        for name, value in headers.items()
    )


def encode_message(headers: bytes, payload: bytes) -> bytes:
    """A message with headers that `encode_headers` made."""
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    head = prelude + pack(">I", crc32(prelude)) + headers
    return b"".join((head, payload, pack(">I", crc32(payload, crc32(head)))))


_PAYLOAD_PART = encode_headers(
    {":event-type": "PayloadPart", ":content-type": "application/octet-stream", ":message-type": "event"}
)


def payload_part(data: bytes) -> bytes:
    """The message for a piece of the model's reply."""
    return encode_message(_PAYLOAD_PART, data)


def stream_exception(name: str, **document: str) -> bytes:
    """The last message of a stream that fails after its first byte."""
    headers = {":exception-type": name, ":content-type": "application/json", ":message-type": "exception"}
    return encode_message(encode_headers(headers), json.dumps(document).encode())
