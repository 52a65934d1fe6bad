"""SageMaker's runtime API as an ASGI application. Signatures and credentials are not checked."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from container.http.endpoint import bounded_body, disconnected
from container.http.protocol import BREAK_OFF
from container.settings.settings import ServerSettings
from deploy.local.asynchronous import MAX_INLINE_BODY, AsyncInvocations
from deploy.local.container import ContainerBroken, ContainerBusy, ContainerClient, ContainerUnreachable
from deploy.local.endpoints import LocalSettings
from deploy.local.errors import (
    RuntimeApiError,
    internal_failure,
    payload_timed_out,
    payload_too_large,
    unknown_operation,
    validation_error,
)
from deploy.local.invocation import Invocation, Invoker
from deploy.local.parameters import Api, Headers, read_parameters

logger = logging.getLogger(__name__)

PREFIX = "/endpoints/"
MAX_BODY = ServerSettings().max_request_size
"""Bytes of a request that is passed through: the container's own default."""
READ_SECONDS = ServerSettings().request_read_timeout
"""Time that a client may send nothing in the middle of a body: the container's own default."""

_PATH = re.compile(r"/endpoints/([^/]+)/(.+)")
_OPENAI = "openai/v1/"
_APIS = {
    "invocations": Api.INVOKE,
    "invocations-response-stream": Api.STREAM,
    "async-invocations": Api.ASYNC,
}
_JSON = (b"content-type", b"application/json")
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_SENT = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization"}
"""`Authorization` is for the platform, not for the container."""


class RuntimeApi:
    """The ASGI application."""

    def __init__(self, settings: LocalSettings, whole_container: bool = False) -> None:
        """`whole_container`: also pass on every request outside of `/endpoints/`."""
        self._settings = settings
        self._whole_container = whole_container
        self._container = ContainerClient(settings.container, settings.max_connections)
        self._invoker = Invoker(settings, self._container)
        self._async: AsyncInvocations | None = None
        if settings.async_output is not None:
            self._async = AsyncInvocations(self._invoker, settings.async_output)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        request_id = str(uuid.uuid4())
        common = [(b"x-amzn-requestid", request_id.encode())]
        try:
            await self._serve(scope, receive, send, common)
        except ClientGone:
            return
        except ContainerBroken:
            raise  # in the middle of a reply that was passed through
        except RuntimeApiError as error:
            logger.info("%s: %s", error.name, error.message, extra={"request_id": request_id})
            await _send_error(send, common, error)
        except Exception:
            logger.exception("internal error", extra={"request_id": request_id})
            await _send_error(send, common, internal_failure())

    async def close(self) -> None:
        """End background work, and close all connections."""
        if self._async is not None:
            await self._async.close()
        await self._container.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, common: Headers) -> None:
        path: str = scope["path"]
        # As it was sent: an escaped character, such as the slash of a model's name, stays escaped.
        raw_path: bytes = scope["raw_path"]
        if self._whole_container and not path.startswith(PREFIX):
            await self._pass_through(scope, raw_path, receive, send)
            return
        if (found := _PATH.fullmatch(path)) is None:
            raise unknown_operation(scope["method"], path)
        name, operation = found.groups()
        if operation.startswith(_OPENAI):
            self._settings.check_name(name)
            prefix = f"{PREFIX}{name}".encode()
            if not raw_path.startswith(prefix + f"/{_OPENAI}".encode()):
                raise unknown_operation(scope["method"], path)
            await self._pass_through(scope, raw_path.removeprefix(prefix), receive, send)
            return
        api = _APIS.get(operation)
        if api is None or scope["method"] != "POST":
            raise unknown_operation(scope["method"], path)
        self._settings.check_name(name)
        parameters = read_parameters(api, scope["headers"])
        limit = MAX_INLINE_BODY if api is Api.ASYNC else self._settings.max_payload
        invocation = Invocation(name, parameters, await _read_body(scope, receive, limit))
        if api is Api.ASYNC:
            await self._accept(invocation, send, common)
        elif api is Api.STREAM:
            break_off = scope.get("extensions", {}).get(BREAK_OFF, lambda: None)
            await _unless_gone(receive, self._invoker.stream(invocation, common, send, break_off))
        else:
            await _unless_gone(receive, self._answer(invocation, send, common))

    async def _answer(self, invocation: Invocation, send: Send, common: Headers) -> None:
        answer = await self._invoker.invoke(invocation)
        await _send_reply(send, 200, [*common, *answer.headers], answer.body)

    async def _accept(self, invocation: Invocation, send: Send, common: Headers) -> None:
        if self._async is None:
            raise validation_error(
                f"Endpoint {invocation.endpoint} is not asynchronous: it was started without a place for outputs "
                "(--async-output)."
            )
        inference_id, headers = self._async.accept(invocation)
        body = json.dumps({"InferenceId": inference_id}).encode()
        await _send_reply(send, 202, [_JSON, *common, *headers], body)

    async def _pass_through(self, scope: Scope, raw_path: bytes, receive: Receive, send: Send) -> None:
        """Act as a plain proxy of the container's path `raw_path`."""
        body = await _read_body(scope, receive, MAX_BODY)
        query: bytes = scope["query_string"]
        target = (raw_path + b"?" + query if query else raw_path).decode("ascii", "replace")
        await _unless_gone(receive, self._forward(scope, target, body, send))

    async def _forward(self, scope: Scope, target: str, body: bytes, send: Send) -> None:
        headers = [(name.decode(), value.decode("latin-1")) for name, value in _without(_NOT_SENT, scope["headers"])]
        begun = False
        try:
            async with self._container.request(scope["method"], target, headers, body) as response:
                kept = _without(_HOP_BY_HOP, response.headers.raw)
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                begun = True
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ContainerUnreachable, ContainerBusy) as error:
            await _bad_gateway(send, 503, f"the container cannot be reached: {error}\n")
        except ContainerBroken as error:
            if begun:
                raise  # the server drops the connection, which is the only way left to tell the client
            await _bad_gateway(send, 502, f"the container broke the connection off: {error}\n")


class ClientGone(Exception):
    """The client left before its request was complete."""


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A request's whole body.

    Raises:
        RuntimeApiError: ValidationError; status 413: more than `limit` bytes; 408: the client stopped sending.
        ClientGone: the client left.
    """
    headers = dict(scope["headers"])
    body = await bounded_body(headers, receive, limit, READ_SECONDS, payload_too_large, payload_timed_out)
    if body is None:
        raise ClientGone
    return body


async def _unless_gone(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """Run `answering` to its end, or cancel it as soon as the client has left."""
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = answer.done()
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    if finished:
        answer.result()


def _without(names: frozenset[bytes], headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.lower(), value) for name, value in headers if name.lower() not in names]


async def _send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, common: Headers, error: RuntimeApiError) -> None:
    kind = (b"x-amzn-errortype", error.name.encode())
    more = [(b"connection", b"close")] if error.status in (408, 413) else []
    await _send_reply(send, error.status, [_JSON, *common, kind, *more], error.body())


async def _bad_gateway(send: Send, status: int, text: str) -> None:
    await _send_reply(send, status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())
