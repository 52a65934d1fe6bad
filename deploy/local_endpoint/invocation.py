"""A call of an endpoint: passes the request to the container and returns the reply, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from container.http.uvicorn_protocol import BREAK_OFF
from container.observability.traffic_capture import RECORDED
from deploy.local_endpoint.errors import NO_RESPONSE, TIMED_OUT, model_error, no_answer, no_capacity, not_ready
from deploy.local_endpoint.parameters import Headers

# `slipway local` sends one of these headers in place of a missing reply of the container: UNREACHABLE with status 503
# if it cannot connect, and NO_REPLY with 502 if the connection fails before the reply begins.
UNREACHABLE = (b"x-slipway-container", b"unreachable")
NO_REPLY = (b"x-slipway-container", b"no reply")

_UNAVAILABLE = 503
_LOADING = frozenset({207, _UNAVAILABLE})  # The statuses of /ping while a model loads.
_PING_SECONDS = 5.0  # The time limit for an answer to /ping.
_MAX_ERROR = 65536  # The maximum number of bytes of an error to read.
_LAST_MESSAGE_SECONDS = 5.0  # The time for the client to read the last message of a failed stream.


class ClientGone(Exception):
    """The client left before its request was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """The request that the container receives for a call of an endpoint."""

    endpoint: str
    headers: Headers
    body: bytes
    component: str | None = None  # The inference component that the call names.
    method: str = "POST"
    path: str = "/invocations"
    raw_path: bytes = b"/invocations"
    query: bytes = b""

    def scope(self, client: Scope) -> Scope:
        """Return the request's ASGI scope.

        Args:
            client: The scope of the client's request.
        """
        path = {"path": self.path, "raw_path": self.raw_path, "query_string": self.query}
        return {**client, **path, "method": self.method, "headers": self.headers}


class StreamForm(Protocol):
    """The format in which a client receives a stream."""

    def start(self, status: int, headers: Headers) -> Message:
        """Return the start of the reply, given the status and the headers of the container's reply."""
        ...

    def piece(self, data: bytes) -> bytes:
        """Return the bytes to send to the client for a piece of the container's reply."""
        ...

    def failure(self, code: str, message: str) -> bytes | None:
        """Return the last bytes of a stream that fails. None: the connection is closed instead."""
        ...


class Invocation:
    """A checked call of an endpoint. Calls the container over ASGI and holds its reply."""

    def __init__(
        self, scope: Scope, receive: Receive, request: ContainerRequest, max_answer: int, *, keep: bool = False
    ) -> None:
        """Prepare the call.

        Args:
            scope: The ASGI scope of the client's request. `scope["app"]` is the container's application.
            receive: Reports when the client has left.
            max_answer: The largest reply that is buffered, in bytes.
            keep: Buffer the reply even if it is streamed, because the endpoint records the call.
        """
        self._receive, self._request, self._max_answer, self._keep = receive, request, max_answer, keep
        self._scope = {**request.scope(scope), RECORDED: keep}
        self._unsent: list[Message] = [{"type": "http.request", "body": request.body}]
        self.status = 0
        self.headers: Headers = []
        self._held, self._whole = bytearray(), b""
        self._streams = False
        self._on_piece: Callable[[bytes], Awaitable[None]] | None = None  # Receives the parts of a successful stream.
        self._ended_reply = self._too_large = self._left = False
        self._ended = asyncio.Event()

    @property
    def body(self) -> bytes | None:
        """The reply's body. None if the reply was not buffered, is too large, is incomplete, or is an error."""
        held = self._keep or not self._streams
        return self._joined() if held and self._ended_reply and not self._too_large and self._succeeded else None

    def _joined(self) -> bytes:
        if self._held:
            self._whole, self._held = bytes(self._held), bytearray()
        return self._whole

    @property
    def _succeeded(self) -> bool:
        return 200 <= self.status < 300

    async def whole(self, seconds: float) -> bytes:
        """Call the container and return the body of its reply.

        Raises:
            RuntimeApiError: The call failed, or the reply was not complete within `seconds`.
            ClientGone: The client left.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._run()
        except TimeoutError:
            raise no_answer(self._request.endpoint, TIMED_OUT) from None
        await self._check()
        return self._joined()

    async def stream(self, form: StreamForm, send: Send, first: float, seconds: float) -> None:
        """Send the reply while it arrives.

        The stream begins with the first bytes of the container's reply. A failure after that is sent as the last
        message of the stream. If the format has no such message, or if the client does not read it in time, the
        connection is closed.

        Args:
            first: The time limit for the first bytes, in seconds.
            seconds: The time limit for the complete reply, in seconds.

        Raises:
            RuntimeApiError: The call failed before the first bytes.
            ClientGone: The client left.
        """
        begun, last = False, b""
        failure: tuple[str, str] | None = None
        deadline = asyncio.get_running_loop().time() + seconds

        async def forward(piece: bytes) -> None:
            nonlocal begun
            if not begun:
                begun = True
                limit.reschedule(deadline)
                await send(form.start(self.status, self.headers))
            await send({"type": "http.response.body", "body": form.piece(piece), "more_body": True})

        self._streams, self._on_piece = True, forward
        try:
            async with asyncio.timeout(min(first, seconds)) as limit:
                await self._run()
        except TimeoutError:
            if not begun:
                raise no_answer(self._request.endpoint, TIMED_OUT) from None
            failure = (
                "ModelInvocationTimeExceeded",
                f"The model did not finish its response within {seconds:g} seconds.",
            )
        else:
            if not begun:
                await self._check()
                await send(form.start(self.status, self.headers))
            elif not self._ended_reply:
                failure = ("StreamBroken", "The connection between the endpoint and the model was reset or closed.")
        if failure is not None:
            message = form.failure(*failure)
            if message is None:
                return  # The server sends the pieces that it has, and closes the connection.
            last = message
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
            self._on_piece = None  # This breaks the reference cycle between this object and the callback.
        if self._left:
            raise ClientGone

    async def _next(self) -> Message:
        if self._unsent:
            return self._unsent.pop()
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
            return  # The call was abandoned.
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
            return
        piece: bytes = message.get("body", b"")
        streaming = self._streams and self._succeeded
        if not streaming or self._keep:
            limit = self._max_answer if self._succeeded else _MAX_ERROR
            self._too_large = self._too_large or len(self._held) + len(piece) > limit
            self._held += b"" if self._too_large else piece
        if streaming and piece:
            assert self._on_piece is not None
            await self._on_piece(piece)
        given_up = self._too_large and not streaming
        self._ended_reply = not message.get("more_body", False) and not given_up
        if self._ended_reply or given_up:
            self._ended.set()

    async def _check(self) -> None:
        """Raise the API's error unless the reply is complete and successful."""
        endpoint, streaming = self._request.endpoint, self._streams and self._succeeded
        if self.status == _UNAVAILABLE:
            if self._request.component is not None and UNREACHABLE in self.headers:
                raise no_capacity()
            if await is_loading(self._scope["app"]):
                raise not_ready(endpoint)
        if self._too_large and not streaming:
            raise model_error(endpoint, self.status, None)
        if not self._ended_reply or NO_REPLY in self.headers:
            raise no_answer(endpoint, NO_RESPONSE.format(endpoint))
        if not self._succeeded:
            raise model_error(endpoint, self.status, bytes(self._held))


async def is_loading(container: ASGIApp) -> bool:
    """Return True if the container is still loading its model, or does not answer. Asks `/ping`."""
    import httpx  # Importing it takes a while, and other commands do not need it.

    transport = httpx.ASGITransport(container)
    async with httpx.AsyncClient(transport=transport, base_url="http://container", trust_env=False) as client:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                return (await client.get("/ping")).status_code in _LOADING
        except TimeoutError:
            return True
