"""Lines that a thread writes to a file, even if nobody reads the file."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from container.observability.standard_output import Writer
from tests.waiting import wait_until

_PAGE = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that holds 4 KiB."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PAGE)
    yield reader, writer
    os.close(reader)


def _read_until(reader: int, end: bytes) -> bytes:
    read = b""
    while end not in read:
        read += os.read(reader, 1 << 20)
    return read


def test_lines_are_written_in_order_and_a_broken_one_stops_nothing(pipe: tuple[int, int]) -> None:
    writer = Writer(pipe[1], str)
    for i in range(100):
        writer.add(3, str, i)
    writer.add(1, int, "x")
    writer.add(1, str, "half \ud800")
    lines = _read_until(pipe[0], b"half \\ud800\n").decode().splitlines()
    assert lines[:100] == [str(i) for i in range(100)]
    assert lines[100].startswith("a line of the log cannot be made: ValueError")
    assert writer.flush(60)
    assert writer.dropped == 0


@pytest.mark.slow
def test_lines_beyond_the_queue_are_dropped_and_the_reader_is_told_how_many(pipe: tuple[int, int]) -> None:
    writer = Writer(pipe[1], lambda dropped: f"dropped: {dropped}.")
    text, added = "x" * 100_000, 300
    for _ in range(added):
        writer.add(len(text), str, text)
    dropped = writer.dropped
    assert dropped > added // 2
    assert not writer.flush(0.05)
    read = _read_until(pipe[0], b".\n").decode().splitlines()
    assert len(read) == added - dropped + 1
    assert read[-1] == f"dropped: {dropped}."
    writer.add(4, str, "next")
    assert _read_until(pipe[0], b"next\n") == b"next\n"


def test_a_reader_that_has_gone_stops_nothing(pipe: tuple[int, int]) -> None:
    away, gone = os.pipe()
    os.close(away)
    writer = Writer(gone, str)
    writer.add(1, str, "a")
    wait_until(lambda: writer.dropped == 1)
    os.dup2(pipe[1], gone)
    writer.add(1, str, "b")
    assert _read_until(pipe[0], b"1\n") == b"b\n1\n"


def test_a_file_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = Writer(pipe[1], str)
    writer.add(1, str, "x" * 100_000)
    assert len(_read_until(pipe[0], b"\n")) == 100_001


REDIRECTED = """
import logging, os, subprocess, sys, warnings
from container.observability import logs
logs.configure("json", "info", redirect=True)
print("printed")
logging.getLogger("own").info("logged")
warnings.warn("warned")
subprocess.run(["sh", "-c", r'''echo child; echo error >&2; echo '{"a": 1}'; printf 'begun\\rdone' '''])
os.write(2, b"\\nfrom C\\n\\n")
END
"""
ENDS = {"raise RuntimeError('at last')": 1, "logs.flush(); os._exit(3)": 3, "sys.exit('at last')": 1}


@pytest.mark.parametrize("end", ENDS)
def test_all_that_a_process_and_its_children_print_is_json_and_comes_out_at_its_end(end: str) -> None:
    script = REDIRECTED.replace("END", end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == ENDS[end]
    out, err = ([json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr))
    messages = " ".join(line.get("message", "") for line in out)
    assert all(said in messages for said in ("printed", "logged", "UserWarning: warned", "child", "done"))
    assert "begun" not in messages
    assert {"a": 1} in out
    assert [line["message"] for line in err[:2]] == ["error", "from C"]
    assert {line["logger"] for line in err} == {"stderr"}
    assert end.startswith("logs.flush") or "at last" in err[-1]["message"]


def test_a_crash_shows_its_stack_on_standard_error() -> None:
    script = (
        "import os; from container.observability import logs; "
        'logs.configure("json", "info", redirect=True); os.kill(os.getpid(), 11)'
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_lines_of_several_threads_stay_whole(pipe: tuple[int, int]) -> None:
    writer = Writer(pipe[1], str)
    threads = [
        threading.Thread(target=lambda name=name: [writer.add(200, str, name * 200) for _ in range(50)])
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    writer_ended = threading.Thread(target=lambda: [[thread.join() for thread in threads], writer.add(3, str, "end")])
    writer_ended.start()
    lines = _read_until(pipe[0], b"end\n").decode().splitlines()
    writer_ended.join()
    assert sorted(lines[:-1]) == sorted(name * 200 for name in "abc" for _ in range(50))


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_process_may_be_started_without_its_standard_streams(closed: str) -> None:
    code = (
        "import os, sys; from container.observability import logs; logs.configure('json', 'info', redirect=True); "
        "print('a'); print('b', file=sys.stderr); os.system('echo c'); logs.flush(); sys.exit(7)"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], check=False)
    assert done.returncode == 7


def test_a_filter_that_fails_holds_nothing_and_ends_nothing() -> None:
    script = """
from container.observability.standard_output import Output
output = Output(str, lambda stream, line: line, lambda stream, line: 1 / 0)
print("first", flush=True)
output.flush(60)
print("second", flush=True)
output.flush(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "first\nsecond\n"


QUIET = """
import logging, subprocess, sys, warnings
from container.observability import logs
logs.configure(FORMAT, "info", redirect=True, quiet=True)
logs.hold_output(True)
child = '''
import logging, sys
from container.observability import logs
logs.configure(FORMAT, "info")
logging.getLogger("vllm.engine").info("of the child")
logging.getLogger("vllm.engine").warning("Triton is not installed. It is expected.")
logging.getLogger("vllm.engine").warning("heed this")
logs.flush()
print("a progress bar", flush=True)
logging.getLogger("vllm.engine").error("it fails")
logs.flush()
print("a traceback", flush=True)
'''.replace("FORMAT", repr(FORMAT))
logging.getLogger("vllm.config").info("of this process")
logging.getLogger("container").info("of the server")
warnings.warn("a library's")
print("printed", flush=True)
logs.flush()
subprocess.run([sys.executable, "-c", child], check=True)
logs.flush()
logs.hold_output(False)
print("printed later", flush=True)
logs.flush()
if FAILS:
    logs.show_held()
"""


@pytest.mark.parametrize("log_format", ["plain", "json"])
@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_libraries_are_shown_only_if_a_start_fails(log_format: str, fails: bool) -> None:
    script = f"FORMAT, FAILS = {log_format!r}, {fails}\n{QUIET}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    if log_format == "json":
        lines = [json.loads(line)["message"] for line in lines]
    said = [line.rpartition(": ")[2] for line in lines]
    shown = ["of the server", "heed this", "it fails", "a traceback", "printed later"]
    held = ["of this process", "a library's", "printed", "of the child", "It is expected.", "a progress bar"]
    assert [text for text in said if text in shown] == shown
    found = [text for text in held if any(line.endswith(text) or f": {text}" in line for line in lines)]
    assert found == (held if fails else [])
    assert lines.index(next(line for line in lines if "printed later" in line)) < len(shown)


def test_lines_after_a_failure_are_shown_until_the_next_start() -> None:
    script = """
import logging
from container.observability import logs
logs.configure("plain", "info", redirect=True, quiet=True)
logs.hold_output(True)
def say(text):
    logging.getLogger("vllm.config").info(text)
    print(text, flush=True)
    logs.flush()
say("before")
logs.show_held()
say("after")
logs.hold_lines()
say("of the next start")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    said = [line.rpartition(": ")[2] for line in done.stdout.splitlines()]
    assert sorted(said[1:]) == ["after", "after", "before", "before"]
