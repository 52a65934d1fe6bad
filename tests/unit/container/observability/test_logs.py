"""Lines of the log."""

from __future__ import annotations

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

from container.observability.logs import FIELDS, AccessLog, HeldLines, JsonFormatter, LogHandler, PlainFormatter
from container.observability.standard_output import Writer


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


def test_a_record_with_fields_has_them_in_json_and_lines_in_plain_text() -> None:
    said = {
        "name": "n",
        "levelname": "INFO",
        "msg": "served\n  console: a",
        FIELDS: {"console": "a", "models": ["m"], "at": Path("/a"), "level": 3, "message": "other"},
    }
    record = logging.makeLogRecord(said)
    written = json.loads(JsonFormatter().format(record))
    assert (written["message"], written["console"], written["models"]) == ("served\n  console: a", "a", ["m"])
    assert (written["at"], written["level"]) == ("/a", "info")
    assert PlainFormatter().format(record).endswith("served\n  console: a")


@pytest.mark.parametrize("fields", [["a"], {"level": 3}, {"a": object()}, None, 1])
def test_attributes_of_a_library_s_record_change_nothing(fields: Any) -> None:
    record = {"name": "n", "levelname": "INFO", "msg": "said"}
    written = JsonFormatter().format(logging.makeLogRecord(record | {"fields": fields, "request_id": Path("/r")}))
    assert json.loads(written) | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "n",
        "message": "said",
        "request_id": "/r",
    }


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


def test_the_access_log_is_written_by_its_writer_unless_its_level_is_off(caplog: pytest.LogCaptureFixture) -> None:
    writer, log = Mock(spec=Writer), AccessLog()
    log.add("GET /none", "0")  # the log has no writer yet
    log.write_to(writer, PlainFormatter())
    with caplog.at_level("INFO", "slipway.access"):
        log.add("GET /a", "1")
    with caplog.at_level("WARNING", "slipway.access"):
        log.add("GET /b", "2")
    ((_, make, *arguments),) = [call.args for call in writer.add.call_args_list]
    assert make(*arguments).endswith(" INFO    slipway.access [1]: GET /a")


def test_a_record_is_logged_as_it_was() -> None:
    writer, changing = Mock(spec=Writer), ["before"]
    handler = LogHandler(writer, JsonFormatter())
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.LogRecord("n", logging.INFO, __file__, 1, "%s", (changing,), sys.exc_info())
    handler.handle(record)
    changing[0] = "after"
    _, make, kept = writer.add.call_args.args
    assert (kept.args, kept.exc_info) == (None, None)
    line = json.loads(make(kept))
    assert line["message"] == "['before']"
    assert line["traceback"].endswith("ValueError: wrong")
    assert record.exc_info is not None  # other handlers still get the exception


TOO_DEEP = ['{"a":' + "[" * 60_000, '{"a":' + "[" * 60_000 + "}"]


@pytest.mark.parametrize("line", ["plain", "{", "{not json}", "12", '{"a": 1} ', "", *TOO_DEEP])
def test_every_line_of_others_is_json_where_the_log_is(line: str) -> None:
    assert json.loads(JsonFormatter().foreign("stderr", line)) | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "stderr",
        "message": line,
    }
    assert JsonFormatter().foreign("stdout", '{"a": 1}') == '{"a": 1}'
    assert PlainFormatter().foreign("stdout", line) == line


@pytest.mark.parametrize("formatter", [PlainFormatter(), JsonFormatter()])
@pytest.mark.parametrize(
    "line",
    [
        '{"level": "info", "logger": 1, "message": "x"}',
        '{"level": "info", "logger": ["vllm"], "message": "x"}',
        '{"level": "info", "logger": "vllm", "message": null}',
        '{"level": {}, "logger": "vllm", "message": "x"}',
        '{"level": "info", "logger": "vllm"}',
        "{}",
        *TOO_DEEP,
    ],
)
def test_a_printed_line_that_only_looks_like_a_record_is_a_line_like_others(
    line: str, formatter: PlainFormatter | JsonFormatter
) -> None:
    held = HeldLines()
    assert not held.keeps_line("stdout", line, formatter)
    held.holds_output = True
    assert held.keeps_line("stdout", line, formatter)
    assert held.latest == line[: len(held.latest)]
    assert held.keeps_line("stdout", '{"level": "info", "logger": "vllm", "message": "x"}', formatter)
    assert held.latest == "x"


CONFIGURED = """
import json, os, subprocess, sys
from container.observability import logs
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
from container.observability import logs
logs.configure("plain", "info")
assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
"""


def test_a_process_without_vllm_leaves_it_to_the_container_that_it_starts_how_vllm_logs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_CONFIG_PATH"}
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []
