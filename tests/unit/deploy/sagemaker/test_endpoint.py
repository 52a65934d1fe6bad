from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from deploy.local_endpoint.event_stream import EventStream
from deploy.sagemaker import endpoint
from deploy.sagemaker.aws import Aws
from slipway.cli import app


def test_a_connection_that_breaks_within_a_stream_breaks_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    part = EventStream([]).piece(b"a")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.amazon.eventstream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(part), part))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        pieces = endpoint.invoke_stream(Aws("eu-west-1").client("sagemaker-runtime"), "e", b"{}")
        assert next(pieces) == b"a"
        with pytest.raises(endpoint.StreamBroken):
            next(pieces)
        server.join(10)


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        status, media_type, body = 200, "application/json", b'{"echo": ' + asked + b"}"
        if self.path == "/endpoints/named/invocations":
            names = (self.headers[f"X-Amzn-SageMaker-{name}"] for name in ("Custom-Attributes", "Inference-Component"))
            body = " ".join(names).encode()
        if self.path == "/endpoints/refused/invocations":
            status, body = 424, b'{"Message": "no", "OriginalStatusCode": 424, "OriginalMessage": "wrong"}'
        if self.path == "/endpoints/my-llm/invocations-response-stream":
            media_type = "application/vnd.amazon.eventstream"
            stream = EventStream([])
            body = stream.piece(b'{"token": {"text": " Pa') + stream.piece(b'ris"}}\n')
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        if status != 200:
            self.send_header("x-amzn-ErrorType", "ModelError")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing into the output of the test."""


@pytest.fixture
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("_runtime")
def test_a_local_endpoint_is_asked_as_sagemakers() -> None:
    plain = CliRunner().invoke(app, ["invoke", "my-llm", "--prompt", "Hi", "--max-new-tokens", "3"])
    assert plain.stdout == '{"echo": {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}}\n'
    streamed = CliRunner().invoke(app, ["invoke", "my-llm", "--prompt", "Hi", "--stream"])
    assert streamed.stdout == '{"token": {"text": " Paris"}}\n\n'
    chat = json.loads(CliRunner().invoke(app, ["invoke", "my-llm", "--prompt", "Hi", "--chat"]).stdout)
    assert chat["echo"]["messages"] == [{"role": "user", "content": "Hi"}]
    named = CliRunner().invoke(app, ["invoke", "named", "--body", "{}", "--route", "/generate", "--component", "c"])
    assert named.stdout == "route=/generate c\n"
    refused = CliRunner().invoke(app, ["invoke", "refused", "--body", "{}"])
    assert refused.exit_code == 1
    assert "ModelError" in refused.stderr
