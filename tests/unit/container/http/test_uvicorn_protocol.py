"""uvicorn with Slipway's protocol, over real sockets. The clients read slowly, send without an end, or leave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from container.http.body_limits import BodyMemory, BodyReader
from container.http.reply import HttpReply, RetryAfter
from container.http.route import AppState, HttpCounts
from container.http.uvicorn_protocol import (
    BREAK_OFF,
    Cork,
    CorkedTransport,
    HttpProtocol,
    check_uvicorn,
    received_body,
)
from container.models.registry import Models
from container.server import http_server, listen
from container.settings.server import ServerConfig
from engines.errors import BodyTooLarge, GenerationFailed, Overloaded
from handlers.contract import Reply
from tests.stand_ins.answering_route import answering_route
from tests.waiting import pass_time, until

PIECE = b"x" * 65536
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD_CHUNK = CHUNKED + b"no size\r\n"


@contextlib.asynccontextmanager
async def connected(
    application: Any, keep_alive: int = 60
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect a client to a uvicorn server with Slipway's protocol."""
    async with served(application, keep_alive) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def served(application: Any, keep_alive: int = 60) -> AsyncIterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """Run that server, and return it with its address."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        application,
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=keep_alive,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield server, listener.getsockname()
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def received(application: Any, sent: bytes, *, keep_alive: int = 60) -> bytes:
    """Send these bytes. Return everything that the server sends before it closes the connection."""
    async with connected(application, keep_alive) as (reader, writer):
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 60)


async def reply_with(send: Any, body: bytes = b"", status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the path, the names of the headers and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = b" ".join(name for name, _ in scope["headers"])
    await reply_with(send, b"<%s|%s|%s>" % (scope["raw_path"], names, body))


async def test_a_head_without_end_is_cut_off_and_bodies_do_not_count() -> None:
    body = b"x" * 4 * HttpProtocol.MAX_HEAD
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await received(echo, head + body)).endswith(b"|%b>" % body)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * HttpProtocol.MAX_HEAD
    assert (await received(echo, head)).startswith(b"HTTP/1.1 400 ")


class Transport:
    """The transport below a corked transport."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.writes: list[bytes] = []
        self.closed = self.aborted = False

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("no such transport")
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


def corked(inner: Transport, cork: Cork) -> CorkedTransport:
    return CorkedTransport(inner, cork)  # type: ignore[arg-type]


async def test_a_body_that_has_come_is_there_without_a_wait_and_the_end_of_the_client_is_heard_after_it() -> None:
    bodies: list[bytes] = []
    heard: list[str] = []

    def take(receive: Any) -> bool:
        assert received_body(receive, most=3) is None, "it is longer, and stays"
        if (body := received_body(receive)) is not None:
            bodies.append(body)
        return bool(bodies)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert not take(receive), "the rest of the body has not come"
        writer.write(b"rest")
        await until(lambda: take(receive))
        writer.close()
        heard.append((await receive())["type"])

    begun = b"x" * 60_000
    async with connected(application) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(begun) + 4) + begun)
        await until(lambda: bool(heard))
    assert (bodies, heard) == ([begun + b"rest"], ["http.disconnect"])


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_bodies_that_come_with_their_heads_have_the_limits_of_others(framing: str) -> None:
    """All requests are sent at once. The limit is 70,000 bytes. Bodies of more than 65,536 bytes take memory."""
    memory = BodyMemory(ServerConfig(max_request_memory=70_000, max_request_size=70_000))
    memory.take(1000)  # The rest is too little for the 69,500 bytes of a request to /full.
    found: list[object] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reader = BodyReader(memory if scope["path"] == "/full" else None)
        try:
            body = await reader.read(dict(scope["headers"]), receive, 70_000, 60.0)
        except (BodyTooLarge, Overloaded) as error:
            found.append(type(error))
        else:
            found.append(None if body is None else len(body))
        await reply_with(send)

    sizes = (0, 5, 65_536, 69_500, 70_001)
    async with connected(application) as (reader, writer):
        for size in sizes:
            body = b"x" * size
            if framing == "chunks":
                head = b"Transfer-Encoding: chunked"
                body = (b"%x\r\n%b\r\n" % (size, body) if size else b"") + b"0\r\n\r\n"
            else:
                head = b"Content-Length: %d" % size
            path = b"/full" if size == 69_500 else b"/"
            lines = b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n%b\r\n\r\n%b"
            writer.write(lines % (path, head, body))
        for _ in sizes:
            head = await reader.readuntil(b"\r\n\r\n")
            while head.startswith(b"HTTP/1.1 100"):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
    assert found == [0, 5, 65_536, Overloaded, BodyTooLarge]


async def test_a_connection_that_cannot_be_written_to_is_broken_off_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = [Transport(), Transport(broken=True), Transport()]
    cork: Cork = []
    for one in inner:
        corked(one, cork).write(b"part")
    await asyncio.sleep(0)
    assert [one.writes for one in inner] == [[b"part"], [], [b"part"]]
    assert [one.aborted for one in inner] == [False, True, False]
    assert "no such transport" in caplog.text


@pytest.mark.parametrize("wrapped", [False, True])
async def test_the_parts_that_a_turn_writes_to_a_stream_leave_in_one_write(wrapped: bool) -> None:
    """A wrapped `send` sees every part. The connection gets the same bytes with and without the wrapper."""
    inner, seen = Transport(), []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def wrapper(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        reply = HttpReply(wrapper if wrapped else send, [], RetryAfter())
        reply.start(200, "")
        reply.write(b"a")
        await asyncio.sleep(0)
        for part in (b"b", b"", b"c"):
            reply.write(part)
        await asyncio.sleep(0)
        reply.write(b"d")
        reply.end(b"e")

    server = http_server(application)
    server.config.load()
    connection = server.config.http_protocol_class(server.config, server.server_state, {})  # type: ignore[call-arg]
    connection.connection_made(inner)  # type: ignore[arg-type]
    connection.data_received(GET)  # type: ignore[attr-defined]
    await until(lambda: len(inner.writes) == 3)
    connection.connection_lost(None)
    head, *parts = inner.writes
    assert head.endswith(b"\r\n\r\n1\r\na\r\n")
    assert parts == [b"1\r\nb\r\n1\r\nc\r\n", b"1\r\nd\r\n1\r\ne\r\n0\r\n\r\n"]
    assert len(seen) == (7 if wrapped else 0)


async def test_another_uvicorn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_uvicorn()
    with monkeypatch.context() as changed:
        changed.setattr(uvicorn, "__version__", "0.55.0")
        with pytest.raises(RuntimeError, match=r"0\.54\.x.*0\.55\.0"):
            check_uvicorn()
    monkeypatch.delattr(HttpToolsProtocol, "_unset_keepalive_if_required")
    with pytest.raises(RuntimeError, match="_unset_keepalive_if_required"):
        check_uvicorn()


async def test_a_client_that_never_reads_loses_its_connection_and_its_call_hears_of_it() -> None:
    left = asyncio.Event()

    async def flooding(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        reply = HttpReply(send, [], RetryAfter(), scope["extensions"][BREAK_OFF])
        reply.start(200, "application/octet-stream")
        for _ in range(1000):
            reply.write(PIECE)
            await asyncio.sleep(0)
        await _until_left(receive)
        left.set()

    async with connected(flooding) as (_, writer):
        writer.write(GET)
        await asyncio.wait_for(left.wait(), 60)


OFFER = (
    b"POST /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAA\r\nContent-Length: 4\r\n\r\n"
)
"""The first bytes of a connection of Java's HttpClient."""


@pytest.mark.parametrize("pieces", [[OFFER + b"body"], [OFFER, b"bo", b"dy"], [OFFER[:50], OFFER[50:-2], b"\r\nbody"]])
async def test_a_request_that_offers_another_protocol_is_answered_with_its_body_and_so_is_the_next(
    pieces: list[bytes],
) -> None:
    async with connected(echo) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert b"</a|host connection http2-settings content-length|body>" in await _read_until(reader, b">")
        writer.write(b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
        assert b"</b|host content-length|hi>" in await _read_until(reader, b">")


async def test_pipelined_offers_of_another_protocol_are_answered_in_turn() -> None:
    async with connected(echo) as (reader, writer):
        writer.write(3 * (OFFER + b"body"))
        for _ in range(3):
            assert b"|body>" in await _read_until(reader, b">")


@pytest.mark.parametrize("target", [b"example.org:443", b"/", b"http://x/y", b"*"])
async def test_connect_is_refused_and_no_application_is_called(target: bytes) -> None:
    called = Mock()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        called()

    request = b"CONNECT %b HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (target, 5000 * b"x")
    assert (await received(application, request)).startswith(b"HTTP/1.1 400 ")
    called.assert_not_called()


async def test_a_headers_name_has_a_limit() -> None:
    for length, status in ((256, 200), (257, 400)):
        request = b"GET / HTTP/1.1\r\nHost: x\r\n%b: 1\r\nConnection: close\r\n\r\n" % (length * b"x")
        assert (await received(echo, request)).startswith(b"HTTP/1.1 %d " % status)


async def test_a_client_that_leaves_ends_its_running_call_though_it_has_sent_another() -> None:
    begun: list[str] = []
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        await _send_first(receive, send)
        await _until_left(receive)
        ended.set()

    async with connected(endless) as (reader, writer):
        writer.write(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
        await _read_until(reader, b"first")
        writer.close()
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0.05)
    assert begun == ["/first"]


async def test_a_client_that_sends_ever_more_before_it_is_answered_loses_its_connection() -> None:
    begun = 0

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        begun += 1
        await _until_left(receive)

    async with connected(waiting) as (reader, writer):
        writer.write((HttpProtocol.MAX_PIPELINED + 2) * GET)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
    assert begun == 1


@pytest.mark.parametrize("begun", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: "])
async def test_a_head_that_never_ends_ends_its_connection_also_if_it_grows(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(HttpProtocol, "HEAD_SECONDS", 0.2)

    async def growing(writer: asyncio.StreamWriter) -> None:
        while begun:
            await asyncio.sleep(0.05)
            writer.write(b"x")

    async with connected(echo, keep_alive=1) as (reader, writer):
        writer.write(begun)
        dripping = asyncio.create_task(growing(writer))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        dripping.cancel()


async def test_a_head_that_never_ends_does_not_cut_off_the_reply_to_the_request_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HttpProtocol, "HEAD_SECONDS", 0.1)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"end"})

    reply = await received(slow, b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHo")
    assert reply.count(b"part") == 5
    assert reply.endswith(b"end\r\n0\r\n\r\n")


async def test_a_client_that_goes_on_sending_a_body_that_nobody_reads_and_stops_loses_its_connection() -> None:
    async def hasty(scope: Any, receive: Any, send: Any) -> None:
        await reply_with(send, b"!", 404)

    async with connected(hasty, keep_alive=1) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        await _read_until(reader, b"!")
        writer.write(b"def")
        assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_only_a_client_that_knows_chunks_gets_them(version: bytes) -> None:
    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        reply = HttpReply(send, [], RetryAfter())
        reply.start(200, "text/plain")
        reply.write(b"one")
        reply.end(b"two")

    head, _, body = (await received(streaming, LAST_GET.replace(b"1.1", version))).partition(b"\r\n\r\n")
    chunked = version == b"1.1"
    assert (b"transfer-encoding: chunked" in head) is chunked
    assert b"connection: close" in head
    assert body == (b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" if chunked else b"onetwo")


async def test_a_client_of_http_1_0_is_not_told_to_continue() -> None:
    request = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
    assert (await received(echo, request)).startswith(b"HTTP/1.1 200 ")


async def test_a_server_that_ends_does_not_wait_for_a_request_that_is_not_there_yet() -> None:
    begun = asyncio.Event()

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await _until_left(receive)

    async with served(reading) as (server, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        await asyncio.wait_for(begun.wait(), 60)
        server.should_exit = True
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_trailers_are_no_headers_of_the_request() -> None:
    seen: list[list[bytes]] = []
    begun = asyncio.Event()

    async def looking(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await echo(scope, receive, send)
        seen.append([name for name, _ in scope["headers"]])

    async with connected(looking) as (reader, writer):
        writer.write(CHUNKED + b"2\r\nhi\r\n")
        await asyncio.wait_for(begun.wait(), 60)
        writer.write(b"0\r\nX-Amzn-SageMaker-Adapter-Identifier: other\r\n\r\n")
        assert await _read_until(reader, b">")
        writer.write(b"GET /next HTTP/1.1\r\nHost: x\r\nX-Next: y\r\n\r\n")
        assert b"</next|host x-next|>" in await _read_until(reader, b">")
    assert seen == [[b"host", b"transfer-encoding"], [b"host", b"x-next"]]


@pytest.mark.parametrize("piece", [b"X-Trailer: x\r\n", b"x"])
async def test_trailers_without_end_end_the_connection(piece: bytes) -> None:
    async with connected(echo) as (reader, writer):
        writer.write(CHUNKED + b"2\r\nhi\r\n0\r\nX-Long: x")
        writer.write(piece * (2 * HttpProtocol.MAX_HEAD // len(piece)))
        with contextlib.suppress(ConnectionError):
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 400 ")


async def push_much(scope: Any, receive: Any, send: Any) -> None:
    """Push 6 MB. A client may leave more than this unread."""
    await push(100, scope, receive, send)


async def push(pieces: int, scope: Any, receive: Any, send: Any) -> None:
    await receive()
    reply = HttpReply(send, [], RetryAfter(), scope["extensions"][BREAK_OFF])
    reply.start(200, "application/octet-stream")
    for _ in range(pieces):
        reply.write(PIECE)
        await asyncio.sleep(0)
    reply.end(b"end")
    await _until_left(receive)


@contextlib.contextmanager
def client_with_little_room(address: tuple[str, int], request: bytes = LAST_GET) -> Iterator[socket.socket]:
    """Return a client whose socket has a small receive buffer."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        client.sendall(request)
        yield client


async def test_a_client_that_takes_nothing_of_what_waits_for_it_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HttpProtocol, "SEND_SECONDS", 0.3)
    left = asyncio.Event()

    async def pushing(scope: Any, receive: Any, send: Any) -> None:
        await push_much(scope, receive, send)
        left.set()

    async with served(pushing) as (_, address):
        with client_with_little_room(address):
            await asyncio.wait_for(left.wait(), 60)
    assert "taken nothing for 0.3 s" in caplog.text


async def test_a_client_that_takes_nothing_of_the_end_of_a_reply_does_not_keep_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unread bytes are too few to make uvicorn wait."""
    monkeypatch.setattr(HttpProtocol, "SEND_SECONDS", 0.3)
    waiting = []

    async def until_some_waits(scope: Any, receive: Any, send: Any) -> None:
        transport = scope["extensions"][BREAK_OFF].__self__
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
            await asyncio.sleep(0)
        waiting.append(transport.get_write_buffer_size())
        await send({"type": "http.response.body", "body": b""})

    async with served(until_some_waits) as (server, address):
        with client_with_little_room(address):
            await until(lambda: waiting and not server.server_state.connections)
    assert 0 < waiting[0] < 16384


async def test_a_client_that_takes_a_little_from_time_to_time_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "SEND_SECONDS", 60.0)
    transports: list[asyncio.WriteTransport] = []

    async def pushing(scope: Any, receive: Any, send: Any) -> None:
        transport = scope["extensions"][BREAK_OFF].__self__
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transports.append(transport)
        await push(4, scope, receive, send)

    def unsent() -> int:
        return transports[0].get_write_buffer_size() if transports else 0

    read = bytearray()
    async with served(pushing) as (_, address):
        with client_with_little_room(address) as client:
            await until(lambda: unsent() > len(PIECE))
            while waiting := unsent():
                while unsent() >= waiting:
                    read += await asyncio.to_thread(client.recv, 4096)
                await pass_time(61)
            read += await asyncio.to_thread(_receive_until, client, b"end\r\n0\r\n\r\n")
    assert read.count(b"x") == 4 * len(PIECE)


async def _send_first(receive: Any, send: Any) -> None:
    """Begin a reply. More pieces follow the first."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first", "more_body": True})


async def _until_left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    return await asyncio.wait_for(reader.readuntil(end), 60)


async def test_what_cannot_be_read_is_answered_after_the_reply_that_has_begun() -> None:
    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await _send_first(receive, send)
        await finish.wait()
        await send({"type": "http.response.body", "body": b"last"})

    finish = asyncio.Event()
    async with connected(streaming) as (reader, writer):
        writer.write(GET)
        await _read_until(reader, b"first\r\n")
        writer.write(b"\x00 this is no HTTP\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(GET)
        finish.set()
        reply, _, refusal = (await asyncio.wait_for(reader.read(), 60)).partition(b"HTTP/1.1 400 ")
    assert reply == b"4\r\nlast\r\n0\r\n\r\n"
    assert refusal.endswith(b"\r\n\r\nInvalid HTTP request received.")


@pytest.mark.parametrize(
    "bad",
    [
        b"BAD\r\n\r\n",
        BAD_CHUNK,
        b"POST /bad HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 2 * HttpProtocol.MAX_HEAD,
    ],
    ids=["line", "body", "length"],
)
async def test_requests_before_one_that_cannot_be_read_are_answered_in_order(bad: bytes) -> None:
    good = [b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" % number for number in range(10)]
    async with connected(echo) as (reader, writer):
        writer.write(b"".join(good) + bad)
        for number in range(10):
            assert b"</%d|" % number in await _read_until(reader, b">")
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_cannot_be_read_is_answered_at_once_and_a_later_reply_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replied = asyncio.Event()

    async def at_once(scope: Any, receive: Any, send: Any) -> None:
        await reply_with(send, b"", 404)
        replied.set()

    reply = await received(at_once, BAD_CHUNK)
    await asyncio.wait_for(replied.wait(), 60)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"404" not in reply
    assert "broken off" not in caplog.text


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"POST / HTTP/1.1\r\n", b"A request of HTTP/1.1 needs one Host header."),
        (b"POST / HTTP/1.1\r\nHost: x\r\nHost: y\r\n", b"A request of HTTP/1.1 needs one Host header."),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n",
            b"The only transfer coding that is known here is chunked.",
        ),
    ],
)
async def test_a_head_that_cannot_be_served_is_refused_with_its_reason(head: bytes, reason: bytes) -> None:
    answer = await received(echo, head + b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n" + reason)


# Clients that close only their own side of the connection, and clients that leave.

HALF_CLOSED = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"


async def test_a_client_that_ends_its_own_side_gets_all_its_replies_and_then_the_end() -> None:
    for requests, replies in ((3 * HALF_CLOSED, 3), (HALF_CLOSED + HALF_CLOSED[:-1], 1)):
        async with connected(echo) as (reader, writer):
            writer.write(requests)
            writer.write_eof()
            read = await asyncio.wait_for(reader.read(), 60)
        assert read.count(b"</a|host content-length|hi>") == read.count(b"HTTP/1.1 ") == replies


async def test_a_client_that_ends_its_own_side_gets_replies_that_take_long() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.5)
        await _send_first(receive, send)
        await asyncio.sleep(0.5)
        await send({"type": "http.response.body", "body": b"last"})

    async def read() -> tuple[int, bytes]:
        response = await asyncio.to_thread(http.client.HTTPResponse, client)
        await asyncio.to_thread(response.begin)
        return response.status, await asyncio.to_thread(response.read)

    async with served(slow) as (_, address):
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(HALF_CLOSED)
            client.shutdown(socket.SHUT_WR)
            assert await read() == (200, b"firstlast")


async def half_closing(version: bytes, pauses: Sequence[float]) -> list[bytes]:
    """Return the replies to clients. Each client closes its own side after one of these pauses."""

    def ask(pause: float) -> bytes:
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(HALF_CLOSED.replace(b"1.1", version))
            time.sleep(pause)
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(4096), b""))

    async with served(echo) as (_, address):
        return [await asyncio.to_thread(ask, pause) for pause in pauses]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_each_client_that_ends_its_own_side_at_once_gets_its_answer_on_the_servers_event_loop(version: bytes) -> None:
    replies = uvloop.run(half_closing(version, [number * 0.00002 for number in range(100)]))
    assert [reply[-4:] for reply in replies] == [b"|hi>"] * 100


async def _slow_start(receive: Any, send: Any) -> None:
    await receive()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("begin", [_slow_start, _send_first])
async def test_a_client_that_closes_its_connection_ends_its_call_at_once(version: bytes, begin: Any) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await begin(receive, send)
        begun.set()
        await _until_left(receive)
        left.set()

    async with served(endless) as (_, address):
        client = socket.create_connection(address)
        client.sendall(HALF_CLOSED.replace(b"1.1", version))
        await asyncio.wait_for(begun.wait(), 60)
        await asyncio.sleep(0.05)
        client.close()
        await asyncio.wait_for(left.wait(), 60)


# Clients that are refused while they still send.

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await reply_with(send, b"big", 413, (b"connection", b"close"))


def ask(address: tuple[str, int], size: int) -> tuple[int, bytes]:
    """Send everything before reading anything, as `http.client` does."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request("POST", "/", body=b"x" * size)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [0, 1000, 100_000, 30_000_000])
async def test_a_client_that_sends_all_before_it_reads_gets_its_refusal(size: int) -> None:
    async with served(refuse) as (_, address):
        assert await asyncio.to_thread(ask, address, size) == (413, b"big")


async def test_a_refused_client_that_sends_for_ever_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "LINGER_SECONDS", 0.5)
    async with connected(refuse) as (reader, writer):
        writer.write(HEAD)
        assert (await reader.read()).endswith(b"\r\n\r\nbig"), "our side is closed at once"
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_for_ever(writer), 60)


async def test_what_a_refused_client_sends_is_no_further_request() -> None:
    calls = 0

    async def count(scope: Any, receive: Any, send: Any) -> None:
        nonlocal calls
        calls += 1
        await refuse(scope, receive, send)

    async with connected(count) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        assert (await reader.read()).endswith(b"big")
        writer.write(b"12345GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write_eof()
        await asyncio.sleep(0.1)
    assert calls == 1


# Replies to clients that have not read the previous reply.


async def test_a_refusal_waits_for_a_client_that_has_not_taken_the_reply_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusing = asyncio.Event()

    async def refuse_call(call: Any, reply: Any) -> None:
        refusing.set()
        raise GenerationFailed("no")

    state = AppState(Models(), ServerConfig(), HttpCounts())
    refusals = answering_route(state, refuse_call)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/refused":
            await refusals(scope, receive, send)
            return
        HttpReply(send, [], RetryAfter()).reply(Reply(200, "", b"x" * 8_000_000))
        await _until_left(receive)

    async with served(application) as (_, address):
        requests = b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"/big", b"/refused"))
        with client_with_little_room(address, requests) as client:
            await asyncio.wait_for(refusing.wait(), 60)
            read = await asyncio.to_thread(_receive_until, client, b"\r\n\r\nno")
    assert read.count(b"x") > 8_000_000
    assert b"HTTP/1.1 424 " in read
    assert "without starting response" not in caplog.text


def _receive_until(client: socket.socket, end: bytes) -> bytes:
    client.settimeout(60)
    read = bytearray()
    while not read.endswith(end):
        piece = client.recv(1 << 19)
        assert piece, "the connection was closed"
        read += piece
    return bytes(read)
