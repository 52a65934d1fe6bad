"""HTTP for clients that are slow, old or odd, on raw sockets."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from container.server import ENOUGH
from tests.live.server import Server, serving_copy, start_copy
from tests.waiting import wait_until_still

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"
ECHO = HANDLERS / "echo"
HEAD = b"POST /invocations HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"SERVING_REQUEST_READ_TIMEOUT": "1"}
    with serving_copy(ECHO, tmp_path_factory.mktemp("echo"), environment) as running:
        yield running


def connection(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def everything(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = bytearray()
    while piece := client.recv(65536):
        received += piece
    return bytes(received)


@pytest.mark.parametrize("rest", [b"Content-Length: 10\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"])
def test_a_body_that_does_not_go_on_is_408_and_holds_nothing(echo: Server, rest: bytes) -> None:
    with connection(echo) as client:
        client.sendall(HEAD + rest)
        reply = everything(client)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"\r\nconnection: close" in head
    assert body == (
        b'{\n  "code": 408,\n  "type": "BadRequestException",\n  "message": '
        b'"nothing of the body\\u0027s rest has come for 1 s (request_read_timeout)"\n}\n'
    )
    echo.wait_for_metric("slipway_open_requests", 0)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + b"Content-Length: 10\r\n\r\nabc"])
def test_a_stop_does_not_wait_for_requests_that_are_not_there_yet(tmp_path: Path, sent: bytes) -> None:
    with serving_copy(ECHO, tmp_path, {"SERVING_DRAIN_TIMEOUT": "1000"}) as server, connection(server) as client:
        client.sendall(sent)
        if sent.endswith(b"abc"):
            server.wait_for_metric("slipway_open_requests", 1)
        server.process.send_signal(signal.SIGTERM)
        reply = everything(client)
        assert server.process.wait(60) == 0
        if sent.endswith(b"abc"):
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
        server.wait_for_log("1 connections were still open, and are broken off")
        assert "Traceback" not in server.log_text()


def test_a_server_may_have_as_many_files_open_as_its_hard_limit_says(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        server = start_copy(ECHO, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        server.wait_until_ready()
        assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, ENOUGH)
    finally:
        server.stop()


def test_a_client_of_http_1_0_gets_whole_answers_with_their_length_and_streams_until_the_connection_ends(
    echo: Server,
) -> None:
    with connection(echo) as client:
        client.sendall(b"POST /invocations HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"content-length: 2" in head.split(b"\r\n")
    assert body == b"hi"
    with connection(echo) as client:
        client.sendall(b"POST /invocations?stream=1 HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
        head, _, body = everything(client).partition(b"\r\n\r\n")
    names = {line.partition(b":")[0] for line in head.split(b"\r\n")[1:]}
    assert not names & {b"transfer-encoding", b"content-length"}
    assert b"connection: close" in head.split(b"\r\n")
    assert body == b"t-0\nt-1\nt-2\nt-3\nt-4\n"
