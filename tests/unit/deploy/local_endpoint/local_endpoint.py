"""The local endpoint on a socket, in front of a container with scripted replies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from container.http.cross_site import KnownHosts
from container.http.disconnect import disconnected
from container.http.router import Application, Mount, Router
from container.server import http_server, listen
from deploy.local_endpoint.runtime_api import PREFIX, RuntimeApi
from deploy.local_endpoint.settings import LocalSettings

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass
class Seen:
    """A request that the container got."""

    line: str
    headers: dict[str, str]
    body: bytes
    receive: Receive


Script = Callable[[Seen, Send], Awaitable[None]]


async def start(send: Send, status: int = 200, *headers: tuple[str, str]) -> None:
    pairs = [("content-type", "application/json"), *headers]
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs]
    await send({"type": "http.response.start", "status": status, "headers": lines})


async def piece(send: Send, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


def answering(status: int = 200, body: bytes = b"{}", *headers: tuple[str, str]) -> Script:
    async def script(_: Seen, send: Send) -> None:
        await start(send, status, *headers)
        await piece(send, body, last=True)

    return script


@dataclass
class ScriptedContainer:
    """An ASGI application. `ping` is the status of /ping, or 0 for no answer. The script answers all other requests."""

    script: Script = field(default_factory=answering)
    ping: int = 200
    pings: int = 0
    seen: list[Seen] = field(default_factory=list)
    ended: int = 0  # The number of calls that have ended.

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] == "/ping":
            self.pings += 1
            if not self.ping:
                await asyncio.Event().wait()
            await answering(self.ping)(Seen("", {}, b"", receive), send)
            return
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        line = f"{scope['method']} {scope['raw_path'].decode()}{query}"
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        seen = Seen(line, headers, body, receive)
        self.seen.append(seen)
        try:
            await self.script(seen, send)
        finally:
            self.ended += 1


async def silent(seen: Seen, send: Send) -> None:
    """Send nothing until the client has left."""
    await disconnected(seen.receive)


def broken_after(part: bytes) -> Script:
    """Send a part of an answer, and close the connection."""

    async def script(seen: Seen, send: Send) -> None:
        await start(send)
        await piece(send, part)

    return script


def answering_after(event: asyncio.Event) -> Script:
    """Answer `ok` when an event is set."""

    async def script(seen: Seen, send: Send) -> None:
        await event.wait()
        await answering(200, b"ok", ("Content-Length", "2"))(seen, send)

    return script


@contextlib.asynccontextmanager
async def local_endpoint(container: Application, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the local endpoint `e`."""
    listener: socket.socket = listen("127.0.0.1", 0)
    api = RuntimeApi(LocalSettings(endpoints=("e",), **settings), KnownHosts())
    server = http_server(Router(container, [Mount(PREFIX, api)]))
    serving = asyncio.create_task(server.serve([listener]))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        await api.drain(0.0)
        listener.close()
