"""A client that reads exactly one reply from a connection. It may be slow or leave early."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Literal

import httptools

from tests.chaos.contracts import Answer

Manner = Literal["plain", "leaves", "reads slowly", "sends slowly"]
_PART_BYTES, _PART_SECONDS = 200, 0.01
"""How many bytes a slow client reads at a time, and the pause between two reads in seconds."""
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
    reply = _Reply()
    size = _PART_BYTES if manner == "reads slowly" else 1 << 16
    while data := await reader.read(size):
        reply.feed(data)
        if manner == "reads slowly":
            await asyncio.sleep(_PART_SECONDS)
    return reply.answer()


class _Reply:
    """A parser of one HTTP/1.1 reply."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._type = ""
        self._retry_after: float | None = None
        self._body: list[bytes] = []
        self._begun = self._complete = 0
        self._delimited = False
        self._received = 0

    def feed(self, data: bytes) -> None:
        self._received += len(data)
        if self._complete:
            raise Broken(f"bytes behind the reply: {data[:80]!r}")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Broken(f"no HTTP: {error}: {data[:80]!r}") from error

    def answer(self) -> Answer:
        if self._begun != 1 or self._complete != 1:
            raise Broken(f"{self._complete} whole replies in {self._received} bytes")
        return Answer(self._parser.get_status_code(), self._type, b"".join(self._body), self._retry_after)

    def on_message_begin(self) -> None:
        self._begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self._delimited |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"content-type":
            self._type = value.decode("latin-1")
        if name.lower() == b"retry-after":
            self._retry_after = float(value)

    def on_headers_complete(self) -> None:
        if not self._delimited and self._parser.get_status_code() not in (204, 304):
            raise Broken("neither Content-Length nor chunked")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete += 1
