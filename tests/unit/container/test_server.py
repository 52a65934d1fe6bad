"""The server's process: engines that stall or cannot be watched, starts that fail, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from container import server
from container.http.router import Mount
from container.models.life_cycle import Lifecycle, State
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Startup
from tests.live.server import free_port
from tests.unit.container.one_model import make
from tests.waiting import until


async def watched(monkeypatch: pytest.MonkeyPatch, stalled: Mock, **settings: Any) -> tuple[int | None, Lifecycle]:
    """Return the exit code and the model's life cycle. The exit code is None if the process still runs."""
    monkeypatch.setattr(server, "_ENGINE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(Lifecycle, "stalled", property(stalled))
    lifecycle, _ = make()
    process = server.Process(Startup(ServerConfig(blackbox_dir="", **settings), ()))
    process.server.models = Models([Model(lifecycle, "m")])
    watching = asyncio.create_task(process.watch())
    await until(lambda: watching.done() or lifecycle.state is State.FAILED or stalled.call_count > 50)  # Several looks.
    if process.exit_code == server.EXIT_OK:
        assert not watching.done()
        watching.cancel()
        return None, lifecycle
    await asyncio.wait_for(watching, 60)
    assert lifecycle.stage is State.DRAINING
    assert all(server.should_exit for server, _, _ in process.listeners)
    return process.exit_code, lifecycle


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({}, None),
        ({"fail_fast": True}, None),
        ({"fail_fast_when_stalled": True}, None),
        ({"fail_fast": True, "fail_fast_when_stalled": True}, 137),
    ],
)
async def test_a_stalled_engine_ends_the_process_only_if_both_settings_say_so(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool], code: int | None
) -> None:
    stalled = Mock(return_value="the engine is stalled")
    assert (await watched(monkeypatch, stalled, **settings))[0] == code


@pytest.mark.parametrize(("fail_fast", "code"), [(False, None), (True, 137)])
async def test_engines_that_cannot_be_watched_any_more_count_as_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail_fast: bool, code: int | None
) -> None:
    exit_code, lifecycle = await watched(monkeypatch, Mock(side_effect=ZeroDivisionError), fail_fast=fail_fast)
    assert exit_code == code
    if not fail_fast:
        assert (lifecycle.state, lifecycle.reason) == (State.FAILED, "the engine is no longer watched: internal error")
    assert "ZeroDivisionError" in caplog.text


@asynccontextmanager
async def connected(
    application: Any, last_seconds: float = 5.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Run an HTTP server, and connect a client to it. At the end, stop the server."""
    listener = server.listen("127.0.0.1", 0)
    http = server.http_server(application, last_seconds)
    serving = asyncio.create_task(http.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        http.should_exit = True
        await asyncio.wait_for(serving, 60)


async def test_a_stop_that_waits_for_calls_alone_does_not_say_that_connections_are_broken_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def slow_to_end(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        await asyncio.sleep(0.5)

    async with connected(slow_to_end, 0.05) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 60)
        writer.close()
        await asyncio.wait_for(left.wait(), 60)
    assert "still open" not in caplog.text


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"no HTTP\r\n\r\n"])
async def test_every_reply_has_one_date(head: bytes) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async with connected(answer) as (reader, writer):
        writer.write(head)
        reply = await asyncio.wait_for(reader.read(), 60)
    (date,) = re.findall(rb"(?i)\r\ndate: ([^\r]+)\r\n", reply)
    assert abs(parsedate_to_datetime(date.decode()).timestamp() - time.time()) < 60


async def test_further_applications_end_their_work_with_the_drain() -> None:
    drained: list[float] = []

    async def drain(seconds: float) -> None:
        drained.append(seconds)

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        pass

    mounts = [Mount("/further/", nothing, drain=drain), Mount("/other/", nothing)]
    draining = server.ModelServer(Startup(ServerConfig(drain_timeout=3.0), ()), mounts)
    await draining.drain()
    assert drained == [3.0]


FAILING = """
import asyncio, logging, sys
from container import server
from container.observability import logs
from container.settings.server import ServerConfig
from container.settings.settings import Startup
from engines.interface import EngineStartError

class Failing(server.ModelServer):
    async def load(self):
        logs.hold_output(True)
        logging.getLogger("vllm.early").info("held")
        print("a progress bar", flush=True)
        while not logging.getLogger("container.server").told:
            await asyncio.sleep(0)
        raise EngineStartError("no memory") if "known" in sys.argv else RuntimeError("a bug")

class Drained:
    async def drain(self, seconds):
        print("printed late", flush=True)
        logging.getLogger("vllm.late").info("logged late")

def told(record):
    server.logger.told |= record.msg.startswith("still loading")
    return True

def listening(startup):
    process = Process(startup)
    process.server.models.drain = Drained().drain
    return process

server.logger.told = False
server.logger.addFilter(told)
server.ModelServer, server._PROGRESS_SECONDS, server._FAILED_SECONDS = Failing, 0.01, 0.1
Process = server.Process
server.Process = lambda startup, mounts, clean_up: listening(startup)
logs.configure("plain", "info", redirect=True, quiet=True)
settings = ServerConfig(host="127.0.0.1", port=int(sys.argv[1]), multi_model=True)
sys.exit(server.serve(Startup(settings, ())))
"""


@pytest.mark.parametrize(("kind", "reason"), [("known", "no memory"), ("unknown", "internal error")])
def test_a_failed_start_shows_what_was_held_then_its_reason_and_all_later_lines(kind: str, reason: str) -> None:
    command = [sys.executable, "-c", FAILING, str(free_port()), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == server.EXIT_FAILED_TO_START, done.stderr
    lines = done.stdout.splitlines()
    (at,) = [i for i, line in enumerate(lines) if " CRITICAL " in line]
    assert lines[at].endswith(reason)
    said = [line.rpartition(": ")[2] for line in lines]
    assert {"held", "a progress bar"} < set(said[:at])
    assert {"printed late", "logged late"} < set(said[at:])
    assert not [line for line in lines[at:] if "still loading" in line]


HANGING = """
import asyncio, sys, threading
from container import server
from container.observability import logs
from container.settings.server import ServerConfig
from container.settings.settings import Startup

stops = threading.Event()

class Timer(threading.Timer):
    def run(self):
        stops.wait()
        super().run()

class Hanging(server.ModelServer):
    async def stop(self):
        print("stopping", flush=True)
        stops.set()
        if "closed" in sys.argv:
            sys.stdout.close()
        await asyncio.Event().wait()

server.ModelServer, threading.Timer = Hanging, Timer
server._END_SECONDS, server._STOP_SECONDS, server._STEPS_SECONDS = 1.0, 0.5, 0.25
logs.configure("plain", "critical", redirect=True)
settings = ServerConfig(host="127.0.0.1", port=int(sys.argv[1]), drain_timeout=0.5, multi_model=True)
server.serve(Startup(settings, ()))
"""


@pytest.mark.parametrize("output", ["open", "closed"])
def test_a_step_that_hangs_does_not_put_off_the_end(output: str) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", HANGING, str(port), output], stdout=subprocess.PIPE, text=True)
    transport = httpx.HTTPTransport(retries=10)
    with process, httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60) as client:
        client.get("/ping")
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("drain", "box", "end"), [(0.0, 22.5, 25.0), (19.0, 22.5, 25.0), (20.0, 23.0, 25.0), (25.0, 28.0, 29.5)]
)
async def test_the_steps_after_a_drain_have_three_seconds_and_the_process_ends_before_sagemaker_kills_it(
    monkeypatch: pytest.MonkeyPatch, drain: float, box: float, end: float
) -> None:
    timer = Mock()
    monkeypatch.setattr(threading, "Timer", timer)
    process = server.Process(Startup(ServerConfig(blackbox_dir="", drain_timeout=drain, multi_model=True), ()))
    process._on_signal(signal.SIGTERM)
    due, _, (_, seconds, left) = timer.call_args.args
    assert (due, due + left, seconds) == (box, end, end)
    assert process._stopping is not None
    await process._stopping


def test_processes_to_come_load_no_library_from_their_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(ServerConfig(multi_model=True), ())
    for given, left in (("/a::/b:", "/a:/b"), ("/a", "/a"), (":", None), (None, None)):
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        if given is not None:
            monkeypatch.setenv("LD_LIBRARY_PATH", given)
        with server.prepared(startup):
            assert os.environ.get("LD_LIBRARY_PATH") == left


def test_a_home_that_cannot_be_written_is_replaced_by_a_directory_that_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(tmp_path / "cache"))
    writable = tmp_path / "home"
    for given, left in (("/proc/nonexistent", tmp_path / "cache" / "home"), (str(writable), writable)):
        monkeypatch.setenv("HOME", given)
        server.ensure_home()
        assert os.environ["HOME"] == str(left)
        assert left.is_dir()


OPEN_FILES = """
import resource
from container.server import allow_open_files
for limits in ((256, 4096), (1024, 1024)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    allow_open_files()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_as_many_files_may_be_open_as_the_hard_limit_says() -> None:
    done = subprocess.run([sys.executable, "-c", OPEN_FILES], capture_output=True, text=True, check=True)
    assert done.stdout == "4096 4096\n1024 1024\n"
