"""Pushing over a real socket through uvicorn, to a client that reads slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from container.cork import BREAK_OFF, CorkedHttpProtocol
from container.push import Pacer, PushedReply

pytestmark = pytest.mark.asyncio

PIECE = b"x" * 65536
PIECES = 200


class Application:
    """Pushes 13 MB at once, as an engine that does not wait for the client would."""

    def __init__(self) -> None:
        self.paused = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reply = PushedReply(send, [], Pacer(0))
        reply.start(200, "application/octet-stream")
        for number in range(PIECES):
            reply.write(PIECE)
            if number % 50 == 0:
                await asyncio.sleep(0.01)
        self.paused = reply._resume is not None
        reply.end(b"end")
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def connected(application: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client of a uvicorn server with our protocol."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(application, http=CorkedHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving
        listener.close()


async def test_a_slow_client_gets_everything_in_order() -> None:
    application = Application()
    async with connected(application) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0.5)
        received = bytearray()
        while piece := await reader.read(1 << 20):
            received += piece
    assert application.paused, "the client was never slow enough; the test shows nothing"
    assert received.count(b"x") == PIECES * len(PIECE)
    assert received.endswith(b"end\r\n0\r\n\r\n")


async def test_a_head_without_end_is_cut_off_and_bodies_do_not_count() -> None:
    async def echo_size(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size})

    size = 4 * CorkedHttpProtocol.MAX_HEAD
    async with connected(echo_size) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        assert (b"%d" % size) in await reader.read()
    async with connected(echo_size) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nX-Long: " + b"x" * CorkedHttpProtocol.MAX_HEAD)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")


async def test_head_and_body_of_a_reply_leave_in_one_write() -> None:
    from container.cork import Cork, CorkedTransport

    class Transport:
        def __init__(self) -> None:
            self.writes: list[bytes] = []
            self.closed = False

        def write(self, data: bytes) -> None:
            self.writes.append(data)

        def is_closing(self) -> bool:
            return self.closed

        def close(self) -> None:
            self.closed = True

    inner = Transport()
    transport = CorkedTransport(inner, Cork())  # type: ignore[arg-type]
    transport.write(b"head")
    transport.write(b"body")
    assert inner.writes == []
    await asyncio.sleep(0)
    assert inner.writes == [b"headbody"]
    transport.write(b"last")
    transport.close()
    await asyncio.sleep(0)
    assert (inner.writes, inner.closed) == ([b"headbody", b"last"], True)


async def test_a_client_that_never_reads_loses_its_connection_and_its_call_hears_of_it() -> None:
    left = asyncio.Event()

    async def flooding(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        reply = PushedReply(send, [], Pacer(0), scope["extensions"][BREAK_OFF])
        reply.start(200, "application/octet-stream")
        for _ in range(1000):
            reply.write(PIECE)
            await asyncio.sleep(0)
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with connected(flooding) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(left.wait(), 20)
