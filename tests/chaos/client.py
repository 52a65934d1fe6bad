"""A client that reads exactly one reply from a connection. It may be slow or leave early."""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
from dataclasses import dataclass
from random import Random
from typing import Literal, cast

from tests.chaos.contracts import Answer

Manner = Literal["plain", "leaves", "reads slowly", "sends slowly"]
_PART_BYTES, _PART_SECONDS = 200, 0.01
"""The number of bytes that a slow client reads at a time, and its pause between two reads, in seconds."""
_PARTS = 8
"""The number of parts in which a slow client sends its request."""


class Broken(Exception):
    """The connection was closed before the reply was complete, or the reply is invalid."""


class Hung(Exception):
    """No complete reply arrived in time."""


@dataclass(frozen=True, slots=True)
class Left:
    """The client left on purpose."""


def request_bytes(path: str, body: bytes, method: str = "POST", content_type: str = "application/json") -> bytes:
    """Return a request that asks the server to close the connection afterwards, so that a second reply is noticed."""
    head = f"{method} {path} HTTP/1.1\r\nHost: chaos\r\nContent-Type: {content_type}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(
    port: int, request: bytes, seconds: float, manner: Manner = "plain", random: Random | None = None
) -> Answer | Left:
    """Send a request, and read its reply until the connection is closed.

    Raises:
        Broken: The connection was closed early, the bytes are not HTTP, or more than one reply arrived.
        Hung: The reply was not complete after `seconds`.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            return await _talk(reader, writer, request, manner, random or Random(0))
    except TimeoutError:
        raise Hung(f"no whole reply after {seconds:g} s") from None
    except OSError as error:
        raise Broken(str(error) or type(error).__name__) from error
    finally:
        if writer is not None:
            writer.transport.abort()


async def _talk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, manner: Manner, random: Random
) -> Answer | Left:
    if manner == "sends slowly":
        step = len(request) // _PARTS + 1
        for start in range(0, len(request), step):
            if writer.transport.is_closing():
                break
            writer.write(request[start : start + step])
            await asyncio.sleep(random.uniform(0.0, 0.1))
    else:
        head, end, body = request.partition(b"\r\n\r\n")
        for part in (head + end, body):  # Most HTTP libraries send the head and the body separately.
            writer.write(part)
    if manner == "leaves":
        if random.random() < 0.5:
            await reader.read(random.randrange(1, 2000))
        await asyncio.sleep(random.expovariate(10.0))
        return Left()
    data = b""
    size = _PART_BYTES if manner == "reads slowly" else 1 << 16
    while part := await reader.read(size):
        data += part
        if manner == "reads slowly":
            await asyncio.sleep(_PART_SECONDS)
    return _only_reply(data)


class _Received(io.BytesIO):
    """The bytes of a connection. They stay readable after `HTTPResponse` has closed them."""

    def close(self) -> None:
        pass

    def makefile(self, mode: str) -> _Received:
        return self


def _only_reply(data: bytes) -> Answer:
    """Return the reply in all bytes of a connection."""
    received = _Received(data)
    reply = http.client.HTTPResponse(cast("socket.socket", received))
    try:
        reply.begin()
        if reply.length is None and not reply.chunked:
            raise Broken("neither Content-Length nor chunked")
        body = reply.read()
    except (http.client.HTTPException, ValueError) as error:
        raise Broken(f"no whole reply in {len(data)} bytes: {error!r}: {data[:80]!r}") from error
    if reply.chunked and not data.endswith(b"0\r\n\r\n"):  # `read` does not notice that the last line is missing.
        raise Broken(f"no whole reply in {len(data)} bytes: {data[-80:]!r}")
    if behind := received.read():
        raise Broken(f"bytes behind the reply: {behind[:80]!r}")
    retry_after = reply.headers["retry-after"]
    return Answer(reply.status, reply.headers["content-type"] or "", body, retry_after and float(retry_after))
