"""The stacks of other processes: one hangs in C, one is stopped, and one has no handler and gets no signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from engines import stacks
from engines.stacks import catches, is_registered, own_stacks, stacks_of
from tests.waiting import wait_until

_REGISTERED = """
import ctypes, sys, threading, time
from engines import stacks
stacks.register()
gate = threading.Lock()
gate.acquire()
def waits(): gate.acquire()
for _ in range(7):
    threading.Thread(target=waits, daemon=True).start()
while sum(frame.f_code is waits.__code__ for frame in sys._current_frames().values()) < 7: time.sleep(0.01)
sleep = ctypes.PyDLL(None).sleep  # It keeps Python's lock: no other thread runs.
def hangs_in_c():
    print("ready", flush=True)
    while True: sleep(600)
hangs_in_c()
"""


_BUSY = """
import json, threading
from engines import stacks
stacks.register()
data = [{str(n): [n, {"y": n}]} for n in range(50)]
def works():
    while True: json.dumps(data, indent=1)
for _ in range(3):
    threading.Thread(target=works, daemon=True, name="works").start()
print("ready", flush=True)
while True: json.loads(json.dumps(data))
"""

_FORKS = """
import os, time
from engines import stacks
def child_waits():
    print(os.getpid(), flush=True)
    time.sleep(600)
def parent_waits(): time.sleep(600)
stacks.register()
print("ready", flush=True)
child_waits() if os.fork() == 0 else parent_waits()
"""


@contextlib.contextmanager
def process(code: str, lines: list[bytes] | None = None) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        if lines is not None:
            lines.append(started.stdout.readline())
        try:
            yield started.pid
        finally:
            started.kill()


def test_a_process_that_hangs_in_c_with_pythons_lock_writes_its_stacks_each_time() -> None:
    with process(_REGISTERED) as pid:
        for _ in range(3):
            # A third stack may belong to the thread that waits until the stacks are requested.
            main, others, *_ = stacks_of([pid], 60)[pid]
            assert main.frames[0].endswith("in hangs_in_c")
            assert (main.threads, others.threads) == (1, 7), "equal stacks are joined"


def test_a_process_without_a_handler_gets_no_signal() -> None:
    with process("import time\nprint('ready', flush=True)\ntime.sleep(600)") as pid:
        assert stacks_of([pid, 1 << 22], 60) == {}
        assert not catches(pid, signal.SIGQUIT)
        os.kill(pid, 0)


def test_a_stopped_process_costs_the_time_and_no_more() -> None:
    with process(_REGISTERED) as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        began = time.monotonic()
        assert stacks_of([pid], 0.0) == stacks_of([pid], 0.2) == {}
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


def test_a_busy_process_is_asked_many_times_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    with process(_BUSY) as pid:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        # No signal is sent in this time. With signals, `faulthandler` would end the process sooner or later.
        monkeypatch.setattr(stacks, "_BELL_SECONDS", 60.0)
        for _ in range(30):
            main, working, *_ = stacks_of([pid], 120)[pid]
            assert main.thread == "MainThread"
            assert (working.thread, working.frames[-1].endswith("in _bootstrap")) == ("works", True)
        assert len(os.listdir(f"/proc/{pid}/fd")) == descriptors
        os.kill(pid, 0)


def test_a_forked_process_has_its_own_stacks() -> None:
    with process(_FORKS, lines := []) as pid:
        child = int(lines[0])
        try:
            wait_until(lambda: is_registered(child))
            # Python 3.12 warns of a fork with threads, so the parent may still print the warning.
            wait_until(lambda: stacks_of([pid], 60)[pid][0].frames[0].endswith("in parent_waits"))
            found = stacks_of([pid, child], 60)
            assert found[pid][0].frames[0].endswith("in parent_waits")
            assert found[child][0].frames[0].endswith("in child_waits")
            assert len(os.listdir(f"/proc/{pid}/fd")) == len(os.listdir(f"/proc/{child}/fd"))
        finally:
            os.kill(child, signal.SIGKILL)


def test_processes_that_ask_at_once_get_whole_stacks() -> None:
    with process(_REGISTERED) as pid:
        found: list[list[tuple[str, int]]] = []

        def ask() -> None:
            found.append([(stack.frames[0], stack.threads) for stack in stacks_of([pid], 60)[pid]])

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert [[count for _, count in one[:2]] for one in found] == [[1, 7]] * 4
