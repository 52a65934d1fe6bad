"""HTTP for clients that are slow, old or odd, on raw sockets."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from container.server import ENOUGH
from tests.live.server import Server, serving_copy
from tests.waiting import wait_until_still

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"
ECHO = HANDLERS / "echo"
HEAD = b"POST /invocations HTTP/1.1\r\nHost: x\r\n"


def connection(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def everything(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = bytearray()
    while piece := client.recv(65536):
        received += piece
    return bytes(received)


@pytest.mark.slow
def test_a_stop_does_not_wait_for_requests_that_are_not_there_yet(tmp_path: Path) -> None:
    with (
        serving_copy(ECHO, tmp_path, {"SERVING_DRAIN_TIMEOUT": "1000"}) as server,
        connection(server) as silent,
        connection(server) as begun,
        connection(server) as client,
    ):
        begun.sendall(HEAD[:20])
        client.sendall(HEAD + b"Content-Length: 10\r\n\r\nabc")
        server.wait_for_metric("slipway_open_requests", 1)
        server.process.send_signal(signal.SIGTERM)
        reply = everything(client)
        assert everything(silent) == everything(begun) == b""
        assert server.process.wait(60) == 0
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"the server is stopping" in reply
        assert "Traceback" not in server.log_text()


@pytest.mark.slow
def test_a_stop_breaks_off_a_client_that_reads_nothing_and_logs_no_error(tmp_path: Path) -> None:
    with serving_copy(ECHO, tmp_path, {"SERVING_DRAIN_TIMEOUT": "1"}) as server, connection(server) as client:
        journal = tmp_path / "journal"
        path = f"/invocations?endless=65536&journal={journal}"
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        wait_until_still(journal)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        server.wait_for_log("1 connections were still open, and are closed")
        assert "Traceback" not in server.log_text()


@pytest.mark.usefixtures("own_start")  # A forked server has the limits of the process that forks.
def test_a_server_may_have_as_many_files_open_as_its_hard_limit_says(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        server = serving_copy(ECHO, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with server:
        assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, ENOUGH)


MESSAGES = [{"role": "user", "content": "Hi"}]
LIMIT = {"max_tokens": 2, "temperature": 0}
OF_LMI = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
OF_OPENAI: dict[str, Any] = {"model": "model", **LIMIT}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/invocations", OF_LMI),
    ("/predictions/model", LIMIT | {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", OF_OPENAI | {"prompt": "Hi"}),
    ("/v1/chat/completions", OF_OPENAI | {"messages": MESSAGES, "user": "é" * 40_000}),
    ("/v1/responses", {"model": "model", "input": "Hi", "max_output_tokens": 2, "temperature": 0}),
    ("/", OF_LMI),
    ("/generate_stream", OF_LMI),
    ("/v2/models/model/generate", LIMIT | {"text_input": "Hi"}),
    ("/v1/generate_stream", LIMIT | {"prompt": "Hi"}),
    ("/v1/generate", {"prompt": 5}),
]
# Parts of answers that differ from call to call.
_OF_CALL = re.compile(rb'"(resp|msg)_[0-9a-f]+"|"(created|created_at|completed_at)": ?[0-9.]+')


def reply_from(file: BinaryIO) -> tuple[int, str, bytes]:
    """Read a reply. Return its status, content type and body, without the parts that differ from call to call."""
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if "chunked" in headers.get("transfer-encoding", ""):
        pieces = []
        while size := int(file.readline(), 16):
            pieces.append(file.read(size))
            assert file.readline() == b"\r\n"
        assert file.readline() == b"\r\n"
        body = b"".join(pieces)
    else:
        body = file.read(int(headers.get("content-length", 0)))
    return status, headers.get("content-type", ""), _OF_CALL.sub(b"", body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(("path", "document"), CALLS)
def test_a_request_is_answered_alike_in_one_write_and_in_several(
    server: Server, path: str, document: dict[str, Any]
) -> None:
    """Most clients write the head and the body separately. All calls of the test share a connection."""
    body = json.dumps(document, ensure_ascii=False).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: pieces\r\n".encode()
    with_length, in_chunks = head + b"Content-Length: %d\r\n" % len(body), head + b"Transfer-Encoding: chunked\r\n"
    half = len(body) // 2
    pieces = {
        "head and body": (with_length + b"\r\n", body),
        "parts of the body": (with_length + b"\r\n", body[:half], body[half:]),
        "parts of the head": (with_length[:40], with_length[40:] + b"\r\n" + body[:1], body[1:]),
        "chunks": (
            in_chunks + b"\r\n",
            chunk(body[:half]),
            chunk(body[half:])[:3],
            chunk(body[half:])[3:],
            b"0\r\n\r\n",
        ),
    }
    with connection(server) as client, client.makefile("rb") as file:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        client.sendall(with_length + b"\r\n" + body)
        expected = reply_from(file)
        for name, parts in pieces.items():
            for part in parts:
                client.sendall(part)
                server.client.get("/health")  # After its answer, the server has read the part.
            assert reply_from(file) == expected, name
        for lines in (with_length, in_chunks):
            client.sendall(lines + b"Expect: 100-continue\r\n\r\n")
            assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert file.readline() == b"\r\n"
            client.sendall(body if lines is with_length else chunk(body) + b"0\r\n\r\n")
            assert reply_from(file) == expected, lines
        client.sendall((with_length + b"\r\n" + body) * 2)  # Both are sent before the first is answered.
        assert [reply_from(file), reply_from(file)] == [expected, expected]
    assert expected[0] == (422 if document.get("prompt") == 5 else 200)
