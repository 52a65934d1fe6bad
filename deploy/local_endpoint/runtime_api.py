"""SageMaker's runtime API, mounted next to the container's own routes. Signatures and credentials are not checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import uuid

from starlette.types import Receive, Scope, Send

from container.http.body_limits import BodyReader, BodyTimeout, BodyTooLarge
from container.http.cross_site import KnownHosts
from container.settings.server import ServerConfig
from container.sources.location import SourceError
from deploy.local_endpoint.asynchronous import MAX_INLINE, AsyncCall, AsyncCalls
from deploy.local_endpoint.data_capture import DataCapture
from deploy.local_endpoint.errors import RuntimeApiError, internal_failure, unknown_operation, validation_error
from deploy.local_endpoint.event_stream import EventStream
from deploy.local_endpoint.invocation import ClientGone, ContainerRequest, Invocation
from deploy.local_endpoint.openai_path import OpenAIPath, PassedReply, openai_error
from deploy.local_endpoint.parameters import Api, Headers, read_parameters, reply_headers
from deploy.local_endpoint.settings import LocalSettings
from deploy.local_endpoint.storage import StorageError, location, object_url, storage_of

logger = logging.getLogger(__name__)

PREFIX = "/endpoints/"
# How long a client may send nothing in the middle of a body, in seconds. This is the default of the container's
# `request_read_timeout`.
READ_SECONDS = ServerConfig().request_read_timeout

_PATH = re.compile(r"/endpoints/([^/]+)/(.+)")
_APIS = {"invocations": Api.INVOKE, "invocations-response-stream": Api.STREAM, "async-invocations": Api.ASYNC}
_JSON = (b"content-type", b"application/json")
_OBJECTS = "s3/"
_NO_OBJECT = b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"


class RuntimeApi:
    """The API's ASGI application. `scope["app"]` is the container's application."""

    def __init__(self, settings: LocalSettings, hosts: KnownHosts) -> None:
        """Create the application.

        Args:
            hosts: The names under which browsers may reach the server.
        """
        self._settings, self._hosts = settings, hosts
        self._capture = None if settings.capture is None else DataCapture(settings.capture)
        self._async_calls: AsyncCalls | None = None  # Created when needed.

    async def drain(self, seconds: float) -> None:
        """Refuse further asynchronous calls. Wait at most `seconds` for running calls and unwritten records."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        if self._async_calls is not None:
            await self._async_calls.drain(seconds)
        if self._capture is not None:
            await self._capture.files.finish(deadline - loop.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = str(uuid.uuid4())
        common = _common(request_id)
        openai = OpenAIPath.of(scope)
        try:
            if fault := self._hosts.fault(dict(scope["headers"])):
                raise RuntimeApiError("AccessDeniedException", 403, fault)
            if openai is not None:
                await self._pass_through(openai, scope, receive, send, request_id)
            else:
                await self._serve(scope, receive, send, request_id)
        except ClientGone:
            return
        except RuntimeApiError as error:
            logger.info("%s: %s", error.name, error.message, extra={"request_id": request_id})
            await _send_error(send, common, error, openai)
        except Exception:
            logger.exception("internal error", extra={"request_id": request_id})
            await _send_error(send, common, internal_failure(), openai)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        path: str = scope["path"]
        if (found := _PATH.fullmatch(path)) is None:
            raise unknown_operation(scope["method"], path)
        name, operation = found.groups()
        if scope["method"] == "GET" and operation.startswith(_OBJECTS):
            self._settings.check_name(name)
            await self._send_object(operation.removeprefix(_OBJECTS), send, _common(request_id))
            return
        api = _APIS.get(operation)
        if api is None or scope["method"] != "POST":
            raise unknown_operation(scope["method"], path)
        settings, common = self._settings, _common(request_id)
        settings.check_name(name)
        parameters = read_parameters(api, scope["headers"])
        if api is Api.ASYNC:
            inline = await _read(scope, receive, MAX_INLINE, asynchronous=True)
            await self._queue(AsyncCall.of(scope, settings, name, parameters, inline, request_id), send, common)
            return
        headers = settings.container_headers(name, parameters)
        component = parameters.values.get("InferenceComponentName")
        body = await _read(scope, receive, settings.max_payload)
        request = ContainerRequest(endpoint=name, headers=headers, body=body, component=component)
        call = self._invocation(scope, receive, request)
        if api is Api.STREAM:
            await call.stream(EventStream(common), send, settings.answer_timeout, settings.stream_timeout)
        else:
            answer = await call.whole(settings.answer_timeout)
            await _send_reply(send, 200, [*common, *reply_headers(api, call.headers)], answer)
        self._record(request_id, request, call)

    async def _pass_through(
        self, path: OpenAIPath, scope: Scope, receive: Receive, send: Send, request_id: str
    ) -> None:
        settings = self._settings
        settings.check_name(path.endpoint)
        request = ContainerRequest(
            endpoint=path.endpoint,
            component=path.component,
            method=scope["method"],
            path=path.path,
            raw_path=path.raw_path,
            query=scope["query_string"],
            headers=path.headers(scope["headers"], settings),
            body=await _read(scope, receive, settings.max_payload),
        )
        call = self._invocation(scope, receive, request)
        form = PassedReply(_common(request_id))
        await call.stream(form, send, settings.stream_timeout, settings.stream_timeout)
        self._record(request_id, request, call)

    async def _queue(self, call: AsyncCall, send: Send, common: Headers) -> None:
        self._calls().submit(call)
        places = [
            (b"x-amzn-sagemaker-outputlocation", location(call.output).encode()),
            (b"x-amzn-sagemaker-failurelocation", location(call.failure).encode()),
        ]
        if self._settings.keeps_objects:
            places.append((b"x-slipway-objects", f"{PREFIX}{call.request.endpoint}/s3".encode()))
        answer = json.dumps({"InferenceId": call.inference_id}).encode()
        await _send_reply(send, 202, [_JSON, *common, *places], answer)

    async def _send_object(self, place: str, send: Send, common: Headers) -> None:
        """Answer as S3 does, with the result of an asynchronous call. `place` is the object's bucket and key."""
        settings = self._settings
        folders = (settings.async_output, settings.async_failures or settings.async_output)
        if settings.keeps_objects:
            with contextlib.suppress(SourceError, StorageError):  # The key is invalid, or the call has not ended.
                url = object_url(f"s3://{place}")
                if any(url.bucket == each.bucket and url.prefix.startswith(each.key_prefix) for each in folders):
                    body = await self._calls().read(url)
                    await _send_reply(send, 200, [(b"content-type", b"binary/octet-stream"), *common], body)
                    return
        await _send_reply(send, 404, [(b"content-type", b"application/xml"), *common], _NO_OBJECT)

    def _calls(self) -> AsyncCalls:
        if self._async_calls is None:
            self._async_calls = AsyncCalls(storage_of(self._settings), self._capture)
        return self._async_calls

    def _invocation(self, scope: Scope, receive: Receive, request: ContainerRequest) -> Invocation:
        keep = self._capture is not None
        return Invocation(scope, receive, request, self._settings.max_payload, keep=keep)

    def _record(self, request_id: str, request: ContainerRequest, call: Invocation) -> None:
        if self._capture is None or request.method != "POST":
            return
        if (body := call.body) is None:
            logger.warning("not captured: the answer is incomplete or too large", extra={"request_id": request_id})
        else:
            self._capture.record(request_id, request, call.headers, body)


def _common(request_id: str) -> Headers:
    """Return the headers of every reply."""
    return [(b"x-amzn-requestid", request_id.encode())]


async def _read(scope: Scope, receive: Receive, limit: int, *, asynchronous: bool = False) -> bytes:
    """Read the body of a request.

    Raises:
        RuntimeApiError: The body is larger than `limit`, or does not arrive in time.
        ClientGone: The client left while it sent the body.
    """
    try:
        body = await BodyReader(None).read(dict(scope["headers"]), receive, limit, READ_SECONDS)
    except BodyTooLarge:
        refusal = RuntimeApiError("ValidationError", 413, f"HTTP content length exceeded {limit} bytes.")
        if asynchronous:
            constraint = f"constraint: Member must have length less than or equal to {limit}"
            refusal = validation_error(f"1 validation error detected: Value at 'body' failed to satisfy {constraint}")
    except BodyTimeout as error:
        refusal = RuntimeApiError("ValidationError", 408, error.message)
    else:
        if body is None:
            raise ClientGone
        return body
    refusal.closes = True
    raise refusal


async def _send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, common: Headers, error: RuntimeApiError, openai: OpenAIPath | None) -> None:
    status, body = (error.status, error.body()) if openai is None else openai_error(error)
    kind = (b"x-amzn-errortype", error.name.encode())
    more = [(b"connection", b"close")] if error.closes else []
    await _send_reply(send, status, [_JSON, *common, kind, *more], body)
