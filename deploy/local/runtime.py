"""SageMaker's runtime API as an ASGI application.

Signatures and credentials are not looked at. Source: contracts/sagemaker_hosting.md sections 4, 5 and 12.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any

from container.http.endpoint import bounded_body
from container.settings.settings import ServerSettings
from deploy.local.asynchronous import MAX_INLINE_BODY, AsyncInvocations, output_store
from deploy.local.container import ContainerBroken, ContainerBusy, ContainerClient, ContainerUnreachable
from deploy.local.errors import (
    RuntimeApiError,
    internal_failure,
    payload_timed_out,
    payload_too_large,
    unknown_operation,
    validation_error,
)
from deploy.local.invocation import Invocation, Invoker, break_off_of
from deploy.local.parameters import Api, Headers, read_parameters
from deploy.local.settings import LocalSettings

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


READ_SECONDS = ServerSettings().request_read_timeout
"""That a client may send nothing in the middle of a body: as many as a container allows."""


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """A request's whole body.

    Raises:
        RuntimeApiError: ValidationError with status 413, it has more than `limit` bytes; with 408, it does not go on.
        ClientGone: the client went away while it sent it.
    """
    body = await bounded_body(headers, receive, limit, READ_SECONDS, payload_too_large, payload_timed_out)
    if body is None:
        raise ClientGone
    return body


async def unless_gone(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """Run `answering` to its end, or cancel it as soon as the client has left."""
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(_closed(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = answer.done()
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    if finished:
        answer.result()


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a reply with its length."""
    framing = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [framing, *headers]})
    await send({"type": "http.response.body", "body": body})


MAX_BODY = ServerSettings().max_request_size
"""Bytes of a request, as many as the container takes unless told otherwise."""

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_SENT = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization"}
"""`Authorization`: on the platform it is spent on the way; the container asks for none."""


class Passthrough:
    """A plain proxy in front of the container."""

    def __init__(self, container: ContainerClient) -> None:
        self._container = container

    async def __call__(self, scope: Scope, receive: Receive, send: Send, raw_path: bytes | None = None) -> None:
        """Serve a request; `raw_path` takes the place of its own.

        Raises:
            RuntimeApiError: ValidationError with status 413, the body is too large.
            ClientGone: the client went away while it sent it.
        """
        body = await read_body(dict(scope["headers"]), receive, MAX_BODY)
        path: bytes = scope["raw_path"] if raw_path is None else raw_path
        query: bytes = scope["query_string"]
        target = (path + b"?" + query if query else path).decode("ascii", "replace")
        await unless_gone(receive, self._forward(scope, target, body, send))

    async def _forward(self, scope: Scope, target: str, body: bytes, send: Send) -> None:
        headers = [(name.decode(), value.decode("latin-1")) for name, value in _without(scope["headers"], _NOT_SENT)]
        begun = False
        try:
            async with self._container.request(scope["method"], target, headers, body) as response:
                kept = _without(response.headers.raw, _HOP_BY_HOP)
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                begun = True
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ContainerUnreachable, ContainerBusy) as error:
            await _bad_gateway(send, 503, f"the container cannot be reached: {error}\n")
        except ContainerBroken as error:
            if begun:
                raise  # the connection is all that can tell the client now: the server drops it
            await _bad_gateway(send, 502, f"the container broke the connection off: {error}\n")


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in names]


async def _bad_gateway(send: Send, status: int, text: str) -> None:
    await send_reply(send, status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode())


PREFIX = "/endpoints/"

_PATH = re.compile(r"/endpoints/([^/]+)/(.+)")
_JSON = (b"content-type", b"application/json")
_APIS = {
    "invocations": Api.INVOKE,
    "invocations-response-stream": Api.STREAM,
    "async-invocations": Api.ASYNC,
}
_OPENAI = "openai/v1/"


class RuntimeApi:
    """The application; everything below `/endpoints/`, and, where it is asked for, all else of the container."""

    def __init__(self, settings: LocalSettings, whole_container: bool = False) -> None:
        """`whole_container`: pass on what is not below `/endpoints/`."""
        self._settings = settings
        self._whole_container = whole_container
        self._container = ContainerClient(settings.container, settings.max_connections)
        self._invoker = Invoker(settings, self._container)
        self._passthrough = Passthrough(self._container)
        self._async: AsyncInvocations | None = None
        if settings.async_output is not None:
            self._async = AsyncInvocations(self._invoker, output_store(settings.async_output))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
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
        """End what runs in the background, and all connections."""
        if self._async is not None:
            await self._async.close()
        await self._invoker.endpoints.close()
        await self._container.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, common: Headers) -> None:
        path: str = scope["path"]
        if self._whole_container and not path.startswith(PREFIX):
            await self._passthrough(scope, receive, send)
            return
        found = _PATH.fullmatch(path)
        if found is None:
            raise unknown_operation(scope["method"], path)
        name, operation = found.groups()
        if operation.startswith(_OPENAI):
            self._invoker.endpoints.check_name(name)
            # As it was sent: what is escaped in it, such as the slash of a model's name, stays escaped.
            raw_path: bytes = scope["raw_path"]
            before = f"{PREFIX}{name}".encode()
            if not raw_path.startswith(before + f"/{_OPENAI}".encode()):
                raise unknown_operation(scope["method"], path)
            await self._passthrough(scope, receive, send, raw_path.removeprefix(before))
            return
        api = _APIS.get(operation)
        if api is None or scope["method"] != "POST":
            raise unknown_operation(scope["method"], path)
        await self._invoke(api, name, scope, receive, send, common)

    async def _invoke(self, api: Api, name: str, scope: Scope, receive: Receive, send: Send, common: Headers) -> None:
        self._invoker.endpoints.check_name(name)
        parameters = read_parameters(api, scope["headers"])
        limit = MAX_INLINE_BODY if api is Api.ASYNC else self._settings.max_payload
        body = await read_body(dict(scope["headers"]), receive, limit)
        invocation = Invocation(name, parameters, body)
        if api is Api.ASYNC:
            await self._accept(invocation, send, common)
        elif api is Api.STREAM:
            break_off = break_off_of(scope)
            await unless_gone(receive, self._invoker.stream(invocation, common, send, break_off))
        else:
            await unless_gone(receive, self._answer(invocation, send, common))

    async def _answer(self, invocation: Invocation, send: Send, common: Headers) -> None:
        answer = await self._invoker.invoke(invocation)
        await send_reply(send, 200, [*common, *answer.headers], answer.body)

    async def _accept(self, invocation: Invocation, send: Send, common: Headers) -> None:
        if self._async is None:
            raise validation_error(
                f"Endpoint {invocation.endpoint} is not asynchronous: it was started without a place for outputs "
                "(--async-output)."
            )
        accepted = self._async.accept(invocation)
        body = json.dumps({"InferenceId": accepted.inference_id}).encode()
        await send_reply(send, 202, [_JSON, *common, *accepted.headers], body)


async def _send_error(send: Send, common: Headers, error: RuntimeApiError) -> None:
    kind = (b"x-amzn-errortype", error.name.encode())
    more = [(b"connection", b"close")] if error.status in (408, 413) else []
    await send_reply(send, error.status, [_JSON, *common, kind, *more], error.body())
