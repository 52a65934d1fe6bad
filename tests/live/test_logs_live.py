"""A server with a log that nobody reads."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.live.server import METRIC_SECONDS, Server, write_model
from tests.waiting import SECONDS, wait_until

pytestmark = pytest.mark.slow

_PIPE_BYTES = 4096
_DROPPED = "slipway_log_lines_dropped_total"


def _log_much(server: Server) -> None:
    """Have the server log until it drops lines, because too many wait for a reader."""
    path = "/" + "x" * 16_000
    while server.metric(_DROPPED) == 0:
        for _ in range(100):
            assert server.client.get(path).status_code == 404


class PipedServer(Server):
    """A server whose log is a pipe.

    It is read without blocking, because the pipe never ends while this process has it open.
    """

    def log_text(self) -> str:
        with os.fdopen(os.open(self.log, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
            return (pipe.read() or b"").decode(errors="replace")


def test_a_server_whose_log_nobody_reads_serves_and_stops_and_each_line_is_json(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDWR)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # the start alone fills the pipe
    model = write_model(tmp_path / "model", **small_options)
    server = PipedServer(model, log, {"SERVING_LOG_FORMAT": "json", "SERVING_DRAIN_TIMEOUT": "600"})
    try:
        server.wait_until_ready()
        _log_much(server)
        assert server.ping() == 200
        assert server.invoke("a", max_new_tokens=2).status_code == 200

        read = bytearray()
        enough = threading.Event()

        def read_on() -> None:
            while b"lines were dropped because the log's reader is slow" not in read:
                read.extend(os.read(reader, 1 << 20))
            enough.set()

        threading.Thread(target=read_on, daemon=True).start()
        assert enough.wait(METRIC_SECONDS)
        lines = [json.loads(line) for line in read.splitlines()[:-1]]
        assert any("EngineCore" in str(line) or "vllm" in line["logger"] for line in lines)
        assert {"stderr", "slipway.access"} <= {line["logger"] for line in lines}

        server.process.send_signal(signal.SIGTERM)  # nobody reads the log from now on
        assert server.process.wait(SECONDS) == 0
    finally:
        server.stop()
        os.close(reader)
    wait_until(lambda: not server.has_engine_process())
