"""SageMaker's runtime API as an ASGI application.

Signatures and credentials are not looked at. Source: contracts/sagemaker_hosting.md sections 4, 5 and 12.
"""

from __future__ import annotations

import json
import logging
import re
import uuid

from deploy.local.asgi import ClientGone, Receive, Scope, Send, read_body, send_reply, unless_gone
from deploy.local.async_invocations import MAX_INLINE_BODY, AsyncInvocations
from deploy.local.async_stores import output_store
from deploy.local.container_client import ContainerBroken, ContainerClient
from deploy.local.errors import RuntimeApiError, internal_failure, unknown_operation, validation_error
from deploy.local.invocation import Invocation, Invoker, break_off_of
from deploy.local.parameters import Api, Headers, read_parameters
from deploy.local.passthrough import Passthrough
from deploy.local.settings import LocalSettings

logger = logging.getLogger(__name__)

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
