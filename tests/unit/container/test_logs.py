"""Lines of the log."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from container.logs import JsonFormatter, PlainFormatter


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


CONFIGURED = """
import os, sys
from container import logs
from container.cli import ProcessEnd
end = ProcessEnd()
logs.configure_vllm("plain", "info")
assert os.path.exists(os.environ["VLLM_LOGGING_CONFIG_PATH"])
end.code = 3
sys.exit(end.code)
"""


def test_what_tells_vllm_how_to_log_goes_with_the_server(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_CONFIG_PATH"}
    done = subprocess.run([sys.executable, "-c", CONFIGURED], env=environment | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert done.returncode == 3
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
