"""A stand-in for S3: moto's server, and a gate in front of it that can damage the answers."""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
BUCKET = "models"

Fault = Callable[["Passing"], bool]


@dataclass
class Passing:
    """A GET request for an object, while the gate holds it."""

    path: str
    body: bytes
    handler: BaseHTTPRequestHandler


@dataclass
class Gate:
    """An HTTP server between the client and moto."""

    upstream: str
    url: str = ""
    fault: Fault | None = None
    """A function that gets each answer to a GET. It returns True if it has answered the client."""
    gets: list[str] = field(default_factory=list)
    """Paths of the objects that were read."""


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str, message: str = "no") -> bool:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    return True


def refuse(status: int, code: str, times: int = 1_000_000) -> Fault:
    """Answer with an error of S3, for the first `times` requests."""
    left = [times]

    def fault(passing: Passing) -> bool:
        left[0] -= 1
        return left[0] >= 0 and _refuse(passing.handler, status, code)

    return fault


def cut_short(times: int) -> Fault:
    """Send half of the announced bytes, then close the connection, for the first `times` requests."""
    return _other_bytes(times, lambda body: body[: len(body) // 2])


def alter(times: int) -> Fault:
    """Send wrong bytes of the right length, for the first `times` requests."""
    return _other_bytes(times, lambda body: bytes(len(body)))


def _other_bytes(times: int, sent: Callable[[bytes], bytes]) -> Fault:
    left = [times]

    def fault(passing: Passing) -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        data = sent(passing.body)
        passing.handler.send_response(206)
        passing.handler.send_header("Content-Length", str(len(passing.body)))
        passing.handler.end_headers()
        passing.handler.wfile.write(data)
        if len(data) < len(passing.body):
            passing.handler.close_connection = True
        return True

    return fault


def held(until: threading.Event, ending: str = "", first: int = 0) -> Fault:
    """Until the event is set, hold the objects whose paths have this ending, except for the `first` objects."""
    left = [first]

    def fault(passing: Passing) -> bool:
        if passing.path.endswith(ending):
            left[0] -= 1
            if left[0] < 0:
                until.wait()
        return False

    return fault


def slow(seconds: float, ending: str = "") -> Fault:
    """Delay objects whose paths have this ending."""

    def fault(passing: Passing) -> bool:
        if passing.path.endswith(ending):
            time.sleep(seconds)
        return False

    return fault


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore the error. In some tests, clients leave early, or moto stops before its clients."""


def _handler(gate: Gate) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            answer, _ = self._ask()
            self._pass_on(answer, answer.getheader("Content-Length", "0"))

        def do_GET(self) -> None:
            answer, body = self._ask()
            path = urlsplit(self.path).path
            listing = not path.strip("/").count("/")
            if not listing:
                gate.gets.append(path)
            if gate.fault is not None and not listing and gate.fault(Passing(path, body, self)):
                return
            self._pass_on(answer, str(len(body)))
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def _ask(self) -> tuple[http.client.HTTPResponse, bytes]:
            connection = http.client.HTTPConnection(urlsplit(gate.upstream).netloc, timeout=30)
            with contextlib.closing(connection):
                headers = dict(self.headers.items())
                connection.request(self.command, self.path, headers=headers)
                answer = connection.getresponse()
                return answer, answer.read()

        def _pass_on(self, answer: http.client.HTTPResponse, length: str) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    return Handler


@contextlib.contextmanager
def gate_to(upstream: str) -> Iterator[Gate]:
    """Run a gate for the time of a test."""
    gate = Gate(upstream)
    server = _QuietServer(("127.0.0.1", 0), _handler(gate))
    gate.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run an S3 server, and return its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel("ERROR")  # it would log each request between the lines that tests read
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def put(address: str, files: dict[str, bytes]) -> None:
    """Write objects into BUCKET. If the bucket does not exist, create it."""
    client = _client(address)
    with contextlib.closing(client):
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=BUCKET)
        for key, body in files.items():
            client.put_object(Bucket=BUCKET, Key=key, Body=body)


def delete(address: str, key: str) -> None:
    """Delete one object."""
    client = _client(address)
    with contextlib.closing(client):
        client.delete_object(Bucket=BUCKET, Key=key)


def _client(address: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
