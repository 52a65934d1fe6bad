"""Lines of the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.logs import AccessLog, JsonFormatter, PlainFormatter


def _line(message: str, **more: Any) -> str:
    return PlainFormatter().format(logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": message, **more}))


@pytest.mark.parametrize(
    ("character", "shown"),
    [("\r\n", r"\r\n"), ("\x1b[2J", r"\x1b[2J"), ("\0", r"\x00"), ("\u2028", r"\u2028"), ("\ud800", r"\ud800")],
)
def test_what_a_client_sends_cannot_look_like_a_line_of_the_log(character: str, shown: str) -> None:
    line = _line(f"refused: Model not found: a{character}2026-01-01 INFO forged", request_id="id")
    assert line.endswith(f" n [id]: refused: Model not found: a{shown}2026-01-01 INFO forged")


def test_other_letters_and_tabs_stay() -> None:
    assert _line("refused: \té 日本 😀", request_id="id").endswith("refused: \té 日本 😀")


def test_a_message_about_no_request_may_have_several_lines() -> None:
    assert _line("first\nsecond").endswith(": first\nsecond")


def test_replicas_have_their_names_in_every_line() -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "said", "request_id": "id"})
    assert PlainFormatter("r1").format(record).endswith(" INFO    r1 n [id]: said")
    assert json.loads(JsonFormatter("r1").format(record))["replica"] == "r1"
    assert "replica" not in json.loads(JsonFormatter().format(record))


@pytest.mark.parametrize("formatter", [PlainFormatter(), PlainFormatter("r1"), JsonFormatter(), JsonFormatter("r1")])
@given(created=st.floats(0, 4e9), message=st.text(), identity=st.text('abc0-"\\\\', min_size=1))
def test_the_access_log_has_the_lines_that_logging_would_make(
    formatter: PlainFormatter | JsonFormatter, created: float, message: str, identity: str
) -> None:
    record = logging.makeLogRecord(
        {"name": "slipway.access", "levelname": "INFO", "msg": "%s", "args": (message,), "request_id": identity}
        | {"created": created, "msecs": created % 1 * 1000}
    )
    assert formatter.access(created, message, identity) == formatter.format(record)


@pytest.mark.asyncio
async def test_the_lines_of_one_turn_are_written_together_and_those_of_a_level_that_is_off_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writes: list[str] = []
    log = AccessLog()
    log.add("GET /none", "0")  # nobody has said where to
    log.handler = logging.StreamHandler(Mock(write=writes.append))
    log.handler.setFormatter(PlainFormatter())
    with caplog.at_level("INFO", "slipway.access"):
        log.add("GET /a", "1")
        log.add("GET /b", "2")
        await asyncio.sleep(0)
        log.add("GET /c", "3")
        await asyncio.sleep(0)
    with caplog.at_level("WARNING", "slipway.access"):
        log.add("GET /d", "4")
        await asyncio.sleep(0)
    assert [[line.partition(" [")[2] for line in text.splitlines()] for text in writes] == [
        ["1]: GET /a", "2]: GET /b"],
        ["3]: GET /c"],
    ]


CONFIGURED = """
import json, os, subprocess, sys
from container import logs
logs.configure_vllm("plain", "info")
path = os.environ["VLLM_LOGGING_CONFIG_PATH"]
for _ in range(2):  # several processes read it
    read = subprocess.run([sys.executable, "-c", f"print(open({path!r}).read())"], capture_output=True, check=True)
    assert json.loads(read.stdout) == logs.configuration("plain", "info")
print(os.listdir(os.environ["TMPDIR"]), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_tells_vllm_how_to_log_is_for_all_processes_and_no_file_that_a_killed_server_leaves(
    tmp_path: Path,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_CONFIG_PATH"}
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", CONFIGURED], env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (-9, b"[]\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


ALONE = """
import os
from container import logs
logs.configure("plain", "info")
assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
"""


def test_a_process_without_vllm_leaves_it_to_the_container_that_it_starts_how_vllm_logs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_CONFIG_PATH"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
