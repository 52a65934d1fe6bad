"""`slipway invoke` with boto3 over HTTP, against what AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME names."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from deploy.cli import app


def _message(headers: dict[str, str], payload: bytes) -> bytes:
    """A message of AWS's event stream."""
    block = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    body = prelude + struct.pack(">I", zlib.crc32(prelude)) + block + payload
    return body + struct.pack(">I", zlib.crc32(body))


class Runtime(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        status, media_type, body = 200, "application/json", b'{"echo": ' + asked + b"}"
        if self.path == "/endpoints/refused/invocations":
            status, body = 424, b'{"Message": "no", "OriginalStatusCode": 424, "OriginalMessage": "wrong"}'
        if self.path == "/endpoints/my-llm/invocations-response-stream":
            media_type = "application/vnd.amazon.eventstream"
            event = {":message-type": "event", ":event-type": "PayloadPart"}
            body = _message(event, b'{"token": {"text": " Pa') + _message(event, b'ris"}}\n')
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        if status != 200:
            self.send_header("x-amzn-ErrorType", "ModelError")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its own."""


@pytest.fixture
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Runtime) as server:
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
    assert streamed.stdout == " Paris\n"
    refused = CliRunner().invoke(app, ["invoke", "refused", "--body", "{}"])
    assert refused.exit_code == 1
    assert "ModelError" in refused.stderr
