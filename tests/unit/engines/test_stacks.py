"""The stacks of other processes: of one that hangs in C, of one that is stopped, and none of one that is not ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from engines.stacks import catches, own_stacks, stacks_of
from tests.waiting import wait_until

_REGISTERED = """
import ctypes, threading
from engines import stacks
stacks.register()
started, gate = threading.Semaphore(0), threading.Lock()
gate.acquire()
def waits(): started.release(); gate.acquire()
for _ in range(7):
    threading.Thread(target=waits, daemon=True).start()
for _ in range(7):
    started.acquire()
sleep = ctypes.PyDLL(None).sleep  # It keeps Python's lock: no other thread runs.
def hangs_in_c():
    print("ready", flush=True)
    while True: sleep(600)
hangs_in_c()
"""


@contextlib.contextmanager
def process(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        try:
            yield started.pid
        finally:
            started.kill()


def test_a_process_that_hangs_in_c_with_pythons_lock_writes_its_stacks_each_time() -> None:
    with process(_REGISTERED) as pid:
        for _ in range(3):
            main, others = stacks_of([pid], 60)[pid]
            assert main.frames[0].endswith("in hangs_in_c")
            assert (main.threads, others.threads) == (1, 7), "equal stacks are joined"


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with process("import time\nprint('ready', flush=True)\ntime.sleep(600)") as pid:
        assert stacks_of([pid, os.getpid(), 1 << 22], 60) == {}
        assert not catches(pid, signal.SIGQUIT)
        os.kill(pid, 0)


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_stopped_process_costs_the_time_and_no_more(seconds: float) -> None:
    with process(_REGISTERED) as pid:
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert stacks_of([pid], seconds) == {}
        assert time.monotonic() - began < 30
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: stacks_of([pid], 60)[pid][0].frames[0].endswith("in hangs_in_c"))


def test_the_own_stacks_have_the_names_of_threads_and_the_main_thread_is_first() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="waits")
    thread.start()
    found: list[str] = []

    def look() -> None:
        found.extend(stack.thread for stack in own_stacks())

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    ended.set()
    thread.join()
    assert found[0] == "MainThread"
    assert "waits" in found
