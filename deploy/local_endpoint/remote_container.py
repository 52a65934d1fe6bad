"""A container that runs elsewhere, for example in Docker, as an ASGI application."""

from __future__ import annotations

import asyncio
import logging

import httpx
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from container.http.cross_site import KnownHosts, passed_on
from container.http.disconnect import disconnected
from deploy.local_endpoint.invocation import NO_REPLY, UNREACHABLE

logger = logging.getLogger(__name__)

_CONNECT_SECONDS, _WRITE_SECONDS = 30.0, 60.0
# Servers commonly close an idle connection later (uvicorn: after 5 s), so this side closes it first.
_IDLE_SECONDS = 4.0
_MAX_CONNECTIONS = 512
_CONNECTION_HEADERS = (b"connection", b"keep-alive", b"transfer-encoding")  # Headers that concern one connection.
_OWN_HEADERS = (*_CONNECTION_HEADERS, b"date")  # Headers that this server sends itself.


class RemoteContainer:
    """Passes each request to the container, and passes the parts of the reply back as they arrive."""

    def __init__(self, url: str, hosts: KnownHosts) -> None:
        """Prepare the HTTP client for a container.

        This application checks the `Host` header of browsers' requests. The container cannot check it: it receives the
        `Host` of `url` instead, and none of the headers that only browsers send.

        Args:
            url: The container's URL.
            hosts: The names under which browsers may reach the container through this application.
        """
        self._hosts = hosts
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS, write=_WRITE_SECONDS),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=_IDLE_SECONDS),
            trust_env=False,
        )
        # Without httpx's defaults, the container receives only the client's values of these headers, as on SageMaker.
        for name in ("accept", "accept-encoding", "user-agent"):
            del self._http.headers[name]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. If the client leaves, the connection to the container is closed, too."""
        if fault := self._hosts.fault(dict(scope["headers"])):
            await PlainTextResponse(f"{fault}\n", 403)(scope, receive, send)
            return
        body, message = bytearray(), await receive()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
            message = await receive()
        else:
            return
        passing = asyncio.create_task(self._pass_on(scope, bytes(body), send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                await passing
        finally:
            passing.cancel()
            leaving.cancel()

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"]
        prefix = self._http.base_url.raw_path.rstrip(b"/")
        target = prefix + scope["raw_path"] + (b"?" + query if query else b"")
        sent = [
            (name, value) for name, value in passed_on(scope["headers"]) if name not in (b"host", *_CONNECTION_HEADERS)
        ]
        begun = False
        try:
            # Without `target`, httpx would resolve dots in the path, and request another path.
            exact = {"target": target}
            async with self._http.stream(scope["method"], "", headers=sent, content=body, extensions=exact) as reply:
                own = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _OWN_HEADERS]
                await send({"type": "http.response.start", "status": reply.status_code, "headers": own})
                begun = True
                async for piece in reply.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except httpx.TransportError as error:
            logger.warning("the container does not answer: %s", error or type(error).__name__)
            if begun:
                return  # The client sees that the end is missing.
            unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            status, reason = (503, UNREACHABLE) if unreachable else (502, NO_REPLY)
            headers = [(b"content-length", b"0"), reason]
            await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        await self._http.aclose()
