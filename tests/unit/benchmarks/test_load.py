"""The benchmarks' load client against a small server with real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks.load import (
    TAIL_BYTES,
    Figures,
    Load,
    LoadSpec,
    ResponseError,
    ResponseReader,
    command,
    parse,
    percentile,
)
from tests.waiting import until

RECORDS = [b'{"token": {"id": 7, "text": " a"}}\n', b'{"token": {"id": 9, "text": " b"}, "generated_text": " a b"}\n']
BODY = b"".join(RECORDS)
MARKER = b'"token": {'


def plain(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(pieces: Sequence[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonlines\r\nTRANSFER-ENCODING: chunked\r\n\r\n"
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    return head + chunks + b"0" + extension + b"\r\n" + trailer + b"\r\n"


RESPONSES = {
    "content-length": plain(BODY),
    "chunk per record": chunked(RECORDS),
    "chunks that cut the marker": chunked([BODY[at : at + 3] for at in range(0, len(BODY), 3)]),
    "chunk of one byte": chunked([BODY[at : at + 1] for at in range(len(BODY))]),
    "extensions and trailers": chunked(RECORDS, extension=b";a=1", trailer=b"X-A: 1\r\nX-B: 2\r\n"),
}


def test_keeps_only_the_end_of_a_long_body() -> None:
    reader = ResponseReader(b"x")
    reader.feed(chunked([b"x" * 5000, b"y" * 10]))
    assert (reader.markers, reader.body_bytes) == (5000, 5010)
    assert reader.tail == b"x" * (TAIL_BYTES - 10) + b"y" * 10


def test_an_empty_body_is_complete_with_the_head() -> None:
    reader = ResponseReader(MARKER)
    reader.feed(plain(b"", "503 Service Unavailable", "Connection: close"))
    assert (reader.complete, reader.status, reader.keep_alive) == (True, 503, False)


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
        plain(BODY) + b"more",
        chunked(RECORDS) + b"more",
    ],
)
def test_refuses_what_is_not_one_response(response: bytes) -> None:
    with pytest.raises(ResponseError):
        ResponseReader().feed(response)


class Script:
    """A server that answers every request with the same pieces of bytes. Each piece is one write."""

    def __init__(self, pieces: Sequence[bytes], *, hang_up: bool = False) -> None:
        self._pieces = pieces
        self._hang_up = hang_up
        self.open = 0
        self.connections: list[int] = []  # The number of requests on each connection.
        self.bodies: set[bytes] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.connections)
        self.connections.append(0)
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                self.bodies.add(await reader.readexactly(length))
                self.connections[number] += 1
                for piece in self._pieces:
                    writer.write(piece)
                    await asyncio.sleep(0)
                if self._hang_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def listening(script: Script) -> AsyncIterator[str]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/invocations"


async def load(script: Script, **changes: object) -> Figures:
    spec: dict[str, object] = {"body": '{"inputs": "é"}', "concurrency": 3, "seconds": 0.05, "timeout": 60.0}
    spec |= {"tokens": 2, "marker": MARKER.decode(), "end_marker": '"generated_text"', "exact_records": True}
    async with listening(script) as url:
        figures = await Load(LoadSpec(url=url, **{**spec, **changes})).run()  # type: ignore[arg-type]
        await until(lambda: not script.open)
    return figures


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES.keys())
async def test_counts_over_a_real_connection(response: bytes, size: int) -> None:
    script = Script([response[at : at + size] for at in range(0, len(response), size)])
    figures = await load(script)
    assert (figures.errors, figures.error_kinds) == (0, {})
    assert figures.requests == sum(script.connections)
    assert figures.tokens == figures.records == 2 * figures.requests
    assert 0 < figures.first_p50_ms <= figures.first_p99_ms
    assert figures.first_p50_ms <= figures.total_p50_ms <= figures.total_p99_ms
    assert len(set(script.connections)) == 1, "each client makes the same number of requests"
    assert len(script.connections) == 3, "over one connection each"
    assert script.bodies == {'{"inputs": "é"}'.encode()}


async def test_each_request_has_one_of_several_bodies() -> None:
    script = Script([plain(b"{}")])
    bodies = [json.dumps({"inputs": text}, ensure_ascii=False) for text in ("a", "b\u2028")]
    figures = await load(script, body="\n".join(bodies), tokens=0, marker="", end_marker="")
    assert (figures.errors, script.bodies) == (0, {body.encode() for body in bodies})


async def test_any_other_status_is_a_counted_and_shown_error() -> None:
    script = Script([plain(b'{"error":"full"}', "503 Service Unavailable")])
    figures = await load(script)
    assert figures.error_kinds == {'status 503: {"error":"full"}': sum(script.connections)}
    assert (figures.requests, figures.tokens) == (0, 0)


async def test_a_stream_that_lacks_its_end_or_a_record_is_an_error() -> None:
    no_end = await load(Script([chunked(RECORDS[:1])]), concurrency=1, seconds=0.0)
    assert list(no_end.error_kinds) == [f"incomplete answer, ending in: {RECORDS[0].decode()}"]
    short = await load(Script([chunked(RECORDS)]), concurrency=1, seconds=0.0, tokens=3)
    assert short.error_kinds == {"2 records instead of 3": 1}


async def test_merged_records_count_as_their_tokens_where_that_is_allowed() -> None:
    figures = await load(Script([chunked(RECORDS)]), concurrency=1, seconds=0.0, tokens=3, exact_records=False)
    assert (figures.requests, figures.tokens, figures.records) == (1, 3, 2)


async def test_goes_on_over_a_new_connection_when_the_server_closes_after_an_answer() -> None:
    script = Script([plain(BODY, "200 OK", "Connection: close")], hang_up=True)
    figures = await load(script, concurrency=2)
    assert figures.errors == 0
    assert figures.requests == len(script.connections) > 2


async def test_a_connection_that_breaks_is_an_error() -> None:
    script = Script([chunked(RECORDS)[:-20]], hang_up=True)
    figures = await load(script)
    assert figures.error_kinds == {"connection closed before the answer was complete": 3}


async def test_what_is_unfinished_at_the_end_is_an_error() -> None:
    figures = await load(Script([chunked(RECORDS)[:-20]]), timeout=0.1)
    assert figures.error_kinds == {"unfinished after 0.1 s": 3}


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with listening(Script([])) as url:
        pass
    figures = await Load(LoadSpec(url=url, body="{}", concurrency=2)).run()
    assert figures.error_kinds == {"connection refused or timed out": 2}


def test_the_command_line_says_the_same_as_the_spec() -> None:
    spec = LoadSpec(
        url="http://127.0.0.1:1/x",
        body='{"a": "--b"}',
        concurrency=8,
        seconds=1.5,
        marker="data: {",
        exact_records=True,
    )
    assert parse(command(spec)[3:]) == spec


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, 4.0]
