"""The local endpoint on a socket, in front of a container whose bytes a test dictates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from container.server import http_server, listen
from deploy.local.endpoints import LocalSettings
from deploy.local.runtime import RuntimeApi

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PING_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Seen:
    """A request as the container got it."""

    line: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(status: str = "200 OK", body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class ScriptedContainer:
    """Speaks HTTP/1.1; /ping has an answer of its own, the rest is the script's."""

    script: Script
    ping: bytes = PING_OK
    pings: int = 0
    seen: list[Seen] = field(default_factory=list)
    closed: int = 0
    """Connections that ended."""
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                seen = Seen(head[0], headers, body)
                if head[0].startswith("GET /ping "):
                    self.pings += 1
                    writer.write(self.ping)
                else:
                    self.seen.append(seen)
                    await self.script(seen, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


def always(data: bytes) -> Script:
    async def script(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return script


@contextlib.asynccontextmanager
async def local_endpoint(container: ScriptedContainer, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the local endpoint `e`."""
    server = await asyncio.start_server(container.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    container.url = f"http://127.0.0.1:{port}"
    async with server, endpoint_for(container.url, **settings) as client:
        yield client


@contextlib.asynccontextmanager
async def endpoint_for(url: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    api = RuntimeApi(LocalSettings(container=url, endpoints=("e",), **settings), whole_container=True)
    listener: socket.socket = listen("127.0.0.1", 0)
    server = http_server(api)
    serving = asyncio.create_task(server.serve([listener]))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=base, timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        await api.close()
        listener.close()
