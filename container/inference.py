"""`/invocations` and `/predictions/<model>`: from an ASGI request to a handler and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, parse_qsl

from container.access_log import log_request
from container.lifecycle import Lifecycle, State
from container.metrics import HttpCounts
from container.push import Headers, Message, Pacer, PushedReply, Send
from container.request_headers import request_headers
from container.request_id import request_id
from container.response_headers import standing_headers
from container.settings import ServerSettings
from handlers.contracts.lmi_errors import JSON, front_end_error
from handlers.contracts.protocol import Call, ContractError, Reply
from handlers.entry_point import Service
from handlers.reply import Running

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Message]]
Scope = dict[str, Any]

_CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_TOO_LARGE = Reply(413, JSON, b"")


class _Refused(Exception):
    """A call that the front end answers itself."""

    def __init__(self, reply: Reply, headers: Headers | None = None) -> None:
        super().__init__(reply.status)
        self.reply = reply
        self.headers = headers or []


class InferenceEndpoint:
    """An ASGI application for the inference routes of one model."""

    def __init__(self, lifecycle: Lifecycle, settings: ServerSettings, counts: HttpCounts) -> None:
        self._lifecycle, self._settings = lifecycle, settings
        self._model = lifecycle.model.name
        self._id_header = settings.request_id_header.lower().encode()
        self._pacer = Pacer(settings.coalesce_above)
        self._standing_headers = standing_headers(settings)
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        identity = request_id(headers.get(self._id_header))
        reply_headers = [(b"x-request-id", identity.encode()), *self._standing_headers]
        writer = PushedReply(send, reply_headers, self._pacer)
        self._lifecycle.open_calls += 1
        try:
            await self._serve(scope, headers, identity, receive, writer)
        except _Refused as refused:
            reply_headers.extend(refused.headers)
            writer.reply(refused.reply)
        except Exception:
            logger.exception("internal error", extra={"request_id": identity})
            if not writer.status:
                message = "internal error; the log has more under this request's id"
                status = self._settings.server_error_http_code
                writer.reply(Reply(status, JSON, front_end_error(status, "InternalServerException", message)))
        finally:
            writer.close()
            self._lifecycle.open_calls -= 1
        seconds = time.perf_counter() - started
        # A client that went away before the end is counted as 499, as proxies do.
        status = writer.status if writer.finished else 499
        self._counts.count(scope["path"], status, seconds)
        log_request(scope, identity, status, seconds, writer.bytes_sent)

    async def _serve(
        self, scope: Scope, headers: dict[bytes, bytes], identity: str, receive: Receive, writer: PushedReply
    ) -> None:
        self._check_model(scope, headers)
        if scope["method"] == "OPTIONS":
            raise _Refused(Reply(200, JSON, b"{}\n"))
        service = self._service()
        body = await self._body(headers, receive)
        if body is None:
            return
        if self._settings.log_prompts:
            logger.info("body: %s", body.decode(errors="replace"), extra={"request_id": identity})
        call = Call(
            body=body,
            content_type=headers.get(b"content-type", b"").decode("latin-1"),
            request_id=identity,
            headers=request_headers(scope["headers"]),
            query=tuple(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
        )
        try:
            running = await service.invocations.handle(call, writer)
        except ContractError as error:
            logger.info("refused: %s", error.reason, extra={"request_id": identity})
            writer.reply(error.reply)
            return
        await _until_closed(receive, running)

    def _service(self) -> Service:
        state, service = self._lifecycle.state, self._lifecycle.service
        if service is not None and state in (State.READY, State.FAILED):  # failed: the engine's own error says more
            return service
        starting = state is State.STARTING
        message = f"model {self._model} is not loaded yet" if starting else "the server is stopping"
        status = self._settings.wlm_error_http_code
        body = front_end_error(status, "ServiceUnavailableException", message)
        raise _Refused(Reply(status, JSON, body), [(b"retry-after", b"5"), (b"connection", b"close")])

    def _check_model(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        name = scope.get("path_params", {}).get("model") or _named_model(scope, headers)
        if name is None or name == self._model:
            return
        message = f"Model not found: {name}. This server has the model {self._model}."
        raise _Refused(Reply(404, JSON, front_end_error(404, "ModelNotFoundException", message)))

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, or None if the client went away while sending it."""
        limit = self._settings.max_request_size
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            raise _Refused(_TOO_LARGE, [(b"connection", b"close")])
        message = await receive()
        parts, size = [], 0
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _Refused(_TOO_LARGE, [(b"connection", b"close")])
            if not message.get("more_body", False):
                return b"".join(parts)
            message = await receive()
        return None


async def _until_closed(receive: Receive, running: Running) -> None:
    """Wait until the reply is complete or the client has gone; ASGI reports both as a disconnect."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        running.cancel()


def _named_model(scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """The model that a call to /invocations names. Source: contracts/lmi.md section 1.4."""
    query: bytes = scope["query_string"]
    if query and (names := parse_qs(query.decode("latin-1")).get("model_name")):
        return names[0]
    if b"model_name" in headers:
        return headers[b"model_name"].decode("latin-1")
    for attribute in headers.get(_CUSTOM_ATTRIBUTES, b"").split(b";"):
        key, _, value = attribute.partition(b"=")
        if key.strip() == b"model_name":
            return value.strip().decode("latin-1")
    return None
