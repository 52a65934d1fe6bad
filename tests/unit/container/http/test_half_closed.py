"""Clients that end their own side at once, on the event loop that the server runs on."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from container.server import http_server, listen

REQUEST = b"POST / HTTP/1.%s\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def ask(address: tuple[str, int], version: bytes, seconds: float) -> bytes:
    """Send a request, and end the client's side after a while."""
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(REQUEST % version)
        time.sleep(seconds)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(4096), b""))


async def answers(version: bytes, pauses: Sequence[float]) -> list[bytes]:
    listener = listen("127.0.0.1", 0)
    server = http_server(answer)
    serving = asyncio.create_task(server.serve([listener]))
    found = [await asyncio.to_thread(ask, listener.getsockname(), version, seconds) for seconds in pauses]
    server.should_exit = True
    await serving
    return found


@pytest.mark.parametrize("version", [b"0", b"1"])
def test_each_client_that_ends_its_own_side_gets_its_answer(version: bytes) -> None:
    pauses = [number * 0.00002 for number in range(100)]
    found = uvloop.run(answers(version, pauses))
    assert [reply[-6:] for reply in found] == [b"\r\n\r\nok"] * len(pauses)
