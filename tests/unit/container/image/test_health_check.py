from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from container.image.health_check import check, port_of
from tests.live.server import free_port


class Pinged(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ping" else 404)
        self.end_headers()
        self.wfile.write(b"Healthy" if self.status == 200 else b"DRAINING")

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Pinged) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("environ", "command", "port"),
    [
        ({}, [], 8080),
        ({}, ["tini", "--", "serve"], 8080),
        ({}, ["tini", "--", "serve", "--port", "9000", ""], 9000),
        ({}, ["tini", "--", "slipway", "serve", "-p", "9001"], 9001),
        ({}, ["tini", "--", "serve", "--port=9002"], 9002),
        ({"SERVING_PORT": "9003"}, ["serve", "--port", "9000"], 9003),
        ({"SERVING_PORT": "9003", "SAGEMAKER_BIND_TO_PORT": "9004"}, [], 9004),
        ({"SERVING_PORT": ""}, ["serve", "--port"], 8080),
    ],
)
def test_the_port_is_that_of_the_server(environ: dict[str, str], command: list[str], port: int) -> None:
    assert port_of(environ, command) == port


def test_a_ready_server_is_healthy(server: HTTPServer) -> None:
    assert check(server.server_port) == ""


def test_a_server_that_is_not_ready_is_not_and_its_answer_is_told(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pinged, "status", 503)
    assert check(server.server_port) == f"/ping on port {server.server_port} answers 503: DRAINING"


def test_no_server_is_unhealthy() -> None:
    port = free_port()
    assert check(port).startswith(f"port {port}: ")
