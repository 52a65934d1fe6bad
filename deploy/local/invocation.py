"""A call of an endpoint: passes the request to the container and returns its reply, whole or as an event stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Scope, Send

from container.http.uvicorn_protocol import BREAK_OFF
from deploy.local.errors import NO_RESPONSE, TIMED_OUT, RuntimeApiError, model_error, no_answer
from deploy.local.event_stream import CONTENT_TYPE, model_stream_error, payload_part
from deploy.local.parameters import Headers, Parameters, reply_headers
from deploy.local.settings import LocalSettings

_NOT_READY = "Model for endpoint {} is not ready for inference yet. Please retry."
_UNAVAILABLE = 503
_LOADING = frozenset({207, _UNAVAILABLE})  # Statuses of /ping while a model loads.
_MAX_ERROR = 65536  # Bytes of an error that are read.
_LAST_MESSAGE_SECONDS = 5.0  # The client has to read the message that ends a failed stream in this time.


class ClientGone(Exception):
    """The client left before its request was answered."""


class Invocation:
    """A call that was read and checked, and the reply of the container's own routes, called over ASGI."""

    def __init__(
        self, scope: Scope, receive: Receive, settings: LocalSettings, name: str, parameters: Parameters, body: bytes
    ) -> None:
        """Prepare the call.

        Args:
            scope: The ASGI scope of the client's request.
            receive: Reports when the client has left.
            settings: The settings of the endpoint.
            name: The name of the endpoint.
            parameters: The parameters of the call.
            body: The body of the request.

        Raises:
            RuntimeApiError: The call names a variant, a container or an inference component that does not exist.
        """
        self._receive, self._settings, self._name, self._parameters = receive, settings, name, parameters
        path = {"path": "/invocations", "raw_path": b"/invocations", "query_string": b""}
        self._scope = {**scope, **path, "headers": settings.container_headers(name, parameters)}
        self._request: list[Message] = [{"type": "http.request", "body": body}]
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        # Takes the parts of a successful reply, in place of `body`.
        self._on_piece: Callable[[bytes], Awaitable[None]] | None = None
        self._complete = self._too_large = self._left = False
        self._ended = asyncio.Event()

    async def whole(self) -> None:
        """Call the container. Its reply is then in `headers` and `body`.

        Raises:
            RuntimeApiError: The call failed.
            ClientGone: The client left.
        """
        try:
            async with asyncio.timeout(self._settings.answer_timeout):
                await self._run()
        except TimeoutError:
            raise no_answer(self._name, TIMED_OUT) from None
        await self._check()

    async def stream(self, common: Headers, send: Send) -> None:
        """Send the reply as an event stream while it arrives.

        The stream begins with the first bytes of the container's reply. A later failure is the last message of the
        stream. The connection is dropped if the client does not read that message in time.

        Args:
            common: Headers that every reply has.
            send: ASGI's `send`.

        Raises:
            RuntimeApiError: The call failed before the first bytes.
            ClientGone: The client left.
        """
        begun, last = False, b""
        seconds = self._settings.stream_timeout
        deadline = asyncio.get_running_loop().time() + seconds

        async def begin() -> None:
            nonlocal begun
            begun = True
            headers = [*common, *reply_headers(self._parameters.api, self.headers)]
            headers.insert(0, (b"content-type", CONTENT_TYPE.encode()))
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
            async with asyncio.timeout(_LAST_MESSAGE_SECONDS if last else None):
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
            return  # The call was given up.
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
        """Raise the API's error unless the reply is complete and successful."""
        if self.status == _UNAVAILABLE and await self._is_loading():
            raise RuntimeApiError("ModelNotReadyException", 429, _NOT_READY.format(self._name))
        if self._too_large:
            raise model_error(self._name, self.status, None)
        if not self._complete:
            raise no_answer(self._name, NO_RESPONSE.format(self._name))
        if not 200 <= self.status < 300:
            raise model_error(self._name, self.status, self.body)

    async def _is_loading(self) -> bool:
        import httpx  # Importing it takes a while, and other commands do not need it.

        transport = httpx.ASGITransport(self._scope["app"])
        async with httpx.AsyncClient(transport=transport, base_url="http://container", trust_env=False) as container:
            return (await container.get("/ping")).status_code in _LOADING
