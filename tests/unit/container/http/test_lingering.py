"""Clients that are refused while they still send."""

from __future__ import annotations

import asyncio
import http.client
from typing import Any

import pytest

from container.http.protocol import HttpProtocol
from tests.unit.container.http.test_push_uvicorn import connected, served

pytestmark = pytest.mark.asyncio

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body."""
    headers = [(b"content-length", b"3"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"big"})


def ask(address: tuple[str, int], size: int) -> tuple[int, bytes]:
    """Send everything before reading anything, as `http.client` does."""
    connection = http.client.HTTPConnection(*address, timeout=30)
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
            await asyncio.wait_for(send_for_ever(writer), 30)


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
