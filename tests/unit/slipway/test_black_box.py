"""`slipway blackbox` with servers that answer, and with servers in which only one thread or no thread still runs."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from slipway import black_box
from slipway.cli import app
from tests.waiting import SECONDS

_HANGS = """
import asyncio, ctypes, os, socket, sys, time
from container.models.registry import Models
from container.observability.black_box import BlackBoxes
from container.settings.server import ServerConfig
from engines import stacks
stacks.register()
BlackBoxes(Models(), ServerConfig(), None, late=lambda: 0.0).begin()
listener = socket.create_server(("127.0.0.1", 0))
sleep = getattr(ctypes, sys.argv[1])(None).sleep  # PyDLL keeps Python's lock: no other thread runs.
async def never_returns():
    print(listener.getsockname()[1], flush=True)
    while True: sleep(600)
asyncio.run(never_returns())
"""


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only a moment for an answer, because the server gives none. Wait as long as needed for the server's file."""
    monkeypatch.setattr(black_box, "_SECONDS", 0.5)
    monkeypatch.setattr(black_box, "_FILE_SECONDS", SECONDS)


@contextlib.contextmanager
def hanging(library: str, directory: Path) -> Iterator[int]:
    """Start a process that listens but never answers. Yield its port."""
    command = [sys.executable, "-c", _HANGS, library]
    environment = {**os.environ, "SERVING_BLACKBOX_DIR": "", "SLIPWAY_CACHE_DIR": str(directory)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as started:
        assert started.stdout is not None
        try:
            yield int(started.stdout.readline())
        finally:
            started.kill()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["blackbox", *arguments])


@pytest.mark.usefixtures("short_wait")
def test_a_server_whose_event_loop_hangs_writes_a_box(tmp_path: Path) -> None:
    with hanging("CDLL", tmp_path) as port:
        result = run("--url", f"http://127.0.0.1:{port}", "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    box = json.loads((tmp_path / "out.json").read_text())
    assert box["reason"] == "the server got SIGQUIT"
    (file,) = (tmp_path / "blackbox").iterdir()
    assert str(file) in result.stderr
    (process,) = box["processes"]
    assert process["stacks"][0]["thread"] == "MainThread"
    assert process["stacks"][0]["frames"][0].endswith("in never_returns")


@pytest.mark.usefixtures("short_wait")
def test_a_server_in_which_no_thread_runs_shows_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "_FILE_SECONDS", 0.5)
    with hanging("PyDLL", tmp_path) as port:
        result = run("--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 0, result.output
    assert "no black box has come to" in result.stderr
    (process,) = json.loads(result.stdout)["processes"]
    assert process["name"] == "the server"
    assert process["stacks"][0]["frames"][0].endswith("in never_returns")


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers["authorization"] == "Bearer my-key"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(self.path.encode() if known else b"no key")


@pytest.fixture
def url() -> Iterator[str]:
    """A server that wants a key."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_answers_is_asked_with_the_key(url: str) -> None:
    assert run("--url", f"{url}/", "--api-key", "my-key").stdout == "/server/blackbox"
    refused = run("--url", url)
    assert refused.exit_code == 1
    assert refused.stderr.endswith(f"slipway: {url} answers 401: no key\n")  # after the lines of this test's server
    odd = run("--url", url, "--api-key", "☃")
    assert (odd.exit_code, "answers 401" in odd.stderr) == (1, True)


def test_a_file_is_only_for_its_owner_and_a_wrong_path_is_an_error(url: str, tmp_path: Path) -> None:
    command = ("--url", url, "--api-key", "my-key", "-o")
    written, failed = run(*command, str(tmp_path / "a")), run(*command, str(tmp_path / "no" / "a"))
    assert (written.exit_code, (tmp_path / "a").stat().st_mode & 0o777) == (0, 0o600)
    assert (failed.exit_code, "cannot be written" in failed.stderr) == (1, True)


@pytest.mark.usefixtures("short_wait")
def test_a_process_that_is_no_server_gets_no_signal(tmp_path: Path) -> None:
    code = (
        "import signal, socket, time\n"
        "signal.signal(signal.SIGQUIT, lambda *_: exit(1))  # as nginx and Java do\n"
        "s = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code + "time.sleep(600)"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        result = run("--url", f"http://127.0.0.1:{int(other.stdout.readline())}")
        assert other.poll() is None
        other.kill()
    assert result.exit_code == 1
    assert "is no server of Slipway" in result.stderr


@pytest.mark.usefixtures("short_wait")
def test_the_process_of_another_machine_is_not_asked_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "_is_here", lambda _: False)
    with hanging("CDLL", tmp_path) as port:
        result = run("--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1
    assert "run this command on its machine" in result.stderr
    assert not (tmp_path / "blackbox").exists()


def test_this_machine_is_known_by_its_addresses() -> None:
    assert all(map(black_box._is_here, ("localhost", "127.0.0.1", "127.8.8.8", "0.0.0.0", "::1")))
    assert not any(map(black_box._is_here, ("192.0.2.1", "nobody.invalid", "")))


@pytest.mark.parametrize("address", ["foo", "http://h:99999999", "localhost:9411", "ftp://h", "http://"])
def test_a_wrong_address_is_refused(address: str) -> None:
    result = run("--url", address)
    assert (result.exit_code, "http://HOST:PORT" in result.stderr) == (2, True), result.output


def test_a_port_without_http_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"220 smtp\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        result = run("--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert (result.exit_code, "is no server of Slipway" in result.stderr) == (1, True), result.output


def test_a_port_without_a_listener_is_an_error() -> None:
    result = run("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no process of this user listens on port 9" in result.stderr
