"""SageMaker's runtime API, mounted beside the container's own routes. Signatures and credentials are not checked."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.types import Receive, Scope, Send

from container.http.body_limits import BodyReader, BodyTimeout, BodyTooLarge
from container.http.cross_site import KnownHosts
from container.settings.settings import ServerSettings
from deploy.local.errors import RuntimeApiError, unknown_operation
from deploy.local.invocation import ClientGone, Invocation
from deploy.local.parameters import Api, Headers, read_parameters, reply_headers
from deploy.local.settings import LocalSettings

logger = logging.getLogger(__name__)

PREFIX = "/endpoints/"
# A client may send nothing in the middle of a body for this long. The container's own default.
READ_SECONDS = ServerSettings().request_read_timeout

_PATH = re.compile(r"/endpoints/([^/]+)/(.+)")
_OPENAI = "openai/v1/"
_APIS = {"invocations": Api.INVOKE, "invocations-response-stream": Api.STREAM}
_JSON = (b"content-type", b"application/json")


class RuntimeApi:
    """The ASGI application of the API. `scope["app"]` is the container's application."""

    def __init__(self, settings: LocalSettings, hosts: KnownHosts) -> None:
        """Take the endpoints, and the names under which browsers may reach them."""
        self._settings, self._hosts = settings, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = str(uuid.uuid4())
        common = [(b"x-amzn-requestid", request_id.encode())]
        try:
            await self._serve(scope, receive, send, common)
        except ClientGone:
            return
        except RuntimeApiError as error:
            logger.info("%s: %s", error.name, error.message, extra={"request_id": request_id})
            await _send_error(send, common, error)
        except Exception:
            logger.exception("internal error", extra={"request_id": request_id})
            failure = "The request processing has failed because of an unknown error."
            await _send_error(send, common, RuntimeApiError("InternalFailure", 500, failure))

    async def _serve(self, scope: Scope, receive: Receive, send: Send, common: Headers) -> None:
        if fault := self._hosts.fault(dict(scope["headers"])):
            raise RuntimeApiError("AccessDeniedException", 403, fault)
        path: str = scope["path"]
        if (found := _PATH.fullmatch(path)) is None:
            raise unknown_operation(scope["method"], path)
        name, operation = found.groups()
        if operation.startswith(_OPENAI):
            self._settings.check_name(name)
            await _pass_through(scope, receive, send, f"{PREFIX}{name}")
            return
        api = _APIS.get(operation)
        if api is None or scope["method"] != "POST":
            raise unknown_operation(scope["method"], path)
        self._settings.check_name(name)
        parameters = read_parameters(api, scope["headers"])
        limit = self._settings.max_payload
        try:
            body = await BodyReader(None).read(dict(scope["headers"]), receive, limit, READ_SECONDS)
        except BodyTooLarge:
            raise RuntimeApiError("ValidationError", 413, f"HTTP content length exceeded {limit} bytes.") from None
        except BodyTimeout as error:
            raise RuntimeApiError("ValidationError", 408, error.message) from None
        if body is None:
            return
        call = Invocation(scope, receive, self._settings, name, parameters, body)
        if api is Api.STREAM:
            await call.stream(common, send)
        else:
            await call.whole()
            await _send_reply(send, 200, [*common, *reply_headers(api, call.headers)], call.body)


async def _pass_through(scope: Scope, receive: Receive, send: Send, prefix: str) -> None:
    """Serve the container's own route below an endpoint's name.

    `Authorization` is meant for SageMaker, and is dropped.
    """
    # The raw path keeps escaped characters escaped, such as a slash in a model's name.
    raw_path: bytes = scope["raw_path"]
    if not raw_path.startswith(f"{prefix}/{_OPENAI}".encode()):
        raise unknown_operation(scope["method"], scope["path"])
    headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    own = {"path": scope["path"].removeprefix(prefix), "raw_path": raw_path.removeprefix(prefix.encode())}
    await scope["app"]({**scope, **own, "headers": headers}, receive, send)


async def _send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def _send_error(send: Send, common: Headers, error: RuntimeApiError) -> None:
    kind = (b"x-amzn-errortype", error.name.encode())
    more = [(b"connection", b"close")] if error.status in (408, 413) else []
    await _send_reply(send, error.status, [_JSON, *common, kind, *more], error.body())
