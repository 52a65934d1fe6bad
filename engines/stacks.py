"""The Python stacks of the threads of other processes.

A process registers. Then a thread of it waits for a byte in a pipe, the bell, and writes the stacks with Python's lock.
A process that hangs in a call of C with the lock cannot answer, and gets a signal. `faulthandler` writes the stacks in
the signal's handler, in C and without the lock. That is safe only while no thread runs Python: the handler reads the
frames of all threads, and a frame that changes at that moment ends the process.

The stacks go to a file without a name, which the process has open from its start. Other processes open it and the
bell by `/proc/PID/fd`. Nothing of them is left when the process has ended. Workers of custom handlers load this module
by its path, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

SIGNAL = signal.SIGRTMIN + 9  # The processes may run other code, which uses the signals with names.

_BIT = 1 << (SIGNAL - 1)  # The bit of `SIGNAL` in the kernel's masks of a process's signals.
_FILE = re.compile(r"slipway-stacks-(\d+)-")  # The file's name contains the number of the bell's descriptor.
_PROCESSES = Path("/proc")
_POLL_SECONDS = 0.01
_BELL_SECONDS = 1.0  # A process that has not answered the bell by then hangs, and gets the signal.
_BYTES_READ = 4096  # Several processes may have rung, so more than one byte is read.
_LONGEST = 4 << 20  # The maximum number of bytes that are read.
_MOST_FRAMES, _MOST_STACKS = 100, 100  # The limits of `faulthandler`.
_HEAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+).*$", re.MULTILINE)
_ANSWER = re.compile(r"^\[\[.*\]\]$", re.MULTILINE)  # The line that is written for the bell.


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread or of several equal threads, the innermost frame first."""

    thread: str  # The name of the thread, or its number if the name is not known.
    frames: tuple[str, ...]
    threads: int = 1

    def shown(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        return {"thread": self.thread, "threads": self.threads, "frames": list(self.frames)}


class _Registration:
    """The descriptors of this process, and the thread that waits for the bell."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def begin(self) -> None:
        """Let this process write its stacks, and each process that it forks. Repeated calls change nothing."""
        if not self._descriptors:
            self._open()
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        # The files are the parent's, and its thread has not been forked.
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open()

    def _open(self) -> None:
        bell, writer = os.pipe()  # This process keeps the writer: without one, the bell would be at its end.
        file = _new_file(f"slipway-stacks-{bell}-")
        self._descriptors = [file, bell, writer]
        faulthandler.register(SIGNAL, file, all_threads=True)
        threading.Thread(target=_answer, args=(bell, file), name="stacks", daemon=True).start()


_registration = _Registration()
register = _registration.begin


def _new_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:  # An interpreter that was built with an old C library.
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _answer(bell: int, file: int) -> None:
    """Write the stacks of this process each time when the bell rings."""
    with contextlib.suppress(OSError):  # A program may close the descriptors that it does not know.
        while os.read(bell, _BYTES_READ):
            os.write(file, json.dumps([astuple(stack) for stack in own_stacks()]).encode() + b"\n")


def own_stacks() -> list[Stack]:
    """Return the stacks of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if number != threading.get_ident():
            places = ((one.f_code, line) for one, line in islice(traceback.walk_stack(frame), _MOST_FRAMES))
            lines = (f'File "{code.co_filename}", line {line} in {code.co_name}' for code, line in places)
            found.append(Stack(names.get(number, hex(number)), tuple(lines)))
    return _joined(found)[:_MOST_STACKS]


def stacks_of(processes: Collection[int], seconds: float) -> dict[int, list[Stack]]:
    """Have processes write their stacks, and return the stacks of those that did, the main thread first.

    A process that did not register gets no signal.

    Args:
        processes: The processes' ids.
        seconds: The time for all of them. Half of it is for an answer to the bell, at most `_BELL_SECONDS`.
    """
    found: dict[int, list[Stack]] = {}
    began, signalled = time.monotonic(), False
    with contextlib.ExitStack() as files:
        waiting: dict[int, int] = {}
        for process in processes:
            if catches(process, SIGNAL) and (opened := _opened(process, began + seconds)) is not None:
                waiting[process], bell = opened
                files.callback(os.close, waiting[process])
                _ring(bell)
        sizes = dict.fromkeys(waiting, 0)
        while waiting and (now := time.monotonic()) < began + seconds:
            if not signalled and now > began + min(seconds / 2, _BELL_SECONDS):
                signalled = True
                for process in waiting:
                    with contextlib.suppress(OSError):  # It has ended.
                        os.kill(process, SIGNAL)
            time.sleep(_POLL_SECONDS)
            for process, file in tuple(waiting.items()):
                before, size = sizes[process], os.fstat(file).st_size
                sizes[process] = size
                if size and size == before and not _in_handler(process):
                    stacks = _parsed(os.pread(file, _LONGEST, 0).decode(errors="replace"))
                    if stacks:
                        found[process] = stacks
                        del waiting[process]
    return found


def is_registered(process: int) -> bool:
    """Return True if a process has registered: no other program has such a file and such a handler."""
    return catches(process, SIGNAL) and _descriptors_of(process) is not None


def catches(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal. Without one, the signal may end the process."""
    try:
        return bool(_signals(process).get("SigCgt", 0) & 1 << (number - 1))
    except OSError:  # It has ended.
        return False


def _descriptors_of(process: int) -> tuple[Path, Path] | None:
    """Return the paths of a process's file and bell, or None if it has not registered."""
    descriptors = _PROCESSES / str(process) / "fd"
    with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
        for link in descriptors.iterdir():
            if (name := _FILE.search(os.readlink(link))) is not None:
                return link, descriptors / name[1]
    return None


def _opened(process: int, deadline: float) -> tuple[int, Path] | None:
    """Empty and return the file of a process. Also return the bell's path. None: the process cannot be asked now.

    The file is locked until it is closed. So nobody else empties it before it is read.
    """
    if (paths := _descriptors_of(process)) is None:
        return None
    with contextlib.suppress(OSError):  # It has ended, or another process asks it for too long.
        file = os.open(paths[0], os.O_RDWR | os.O_CLOEXEC)
        try:
            while not _locked(file):
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_POLL_SECONDS)
            os.truncate(file, 0)
        except OSError:
            os.close(file)
            raise
        return file, paths[1]
    return None


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ring(path: Path) -> None:
    with contextlib.suppress(OSError):  # Nothing reads the bell, or nothing has read it for long.
        bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(bell, b"!")
        finally:
            os.close(bell)


def _in_handler(process: int) -> bool:
    """Return True if the signal waits for a process, or if its main thread is in the signal's handler."""
    try:
        signals = _signals(process)
    except OSError:
        return False
    return any(signals.get(name, 0) & _BIT for name in ("SigPnd", "ShdPnd", "SigBlk"))


def _signals(process: int) -> dict[str, int]:
    """Return the sets of signals of a process, by the names in its status."""
    lines = (_PROCESSES / str(process) / "status").read_text().splitlines()
    pairs = (line.split(":\t") for line in lines if line.startswith(("Sig", "Shd")))
    return {name: int(bits, 16) for name, bits in pairs if name != "SigQ"}


def _parsed(text: str) -> list[Stack]:
    """Read the stacks that a process has written. Empty if they are not complete."""
    if (answer := _ANSWER.search(text)) is not None:
        return [Stack(thread, tuple(frames), threads) for thread, frames, threads in json.loads(answer[0])]
    _, *parts = _HEAD.split(text)  # by `faulthandler`; the main thread is the one that got the signal
    found: list[Stack] = []
    for kind, number, lines in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        frames = tuple(line.strip() for line in lines.splitlines() if line.startswith("  "))
        found.insert(0 if kind == "Current thread" else len(found), Stack(number, frames))
    return _joined(found)


def _joined(stacks: list[Stack]) -> list[Stack]:
    """Join equal stacks, such as the stacks of idle threads."""
    counts: dict[tuple[str, ...], int] = {}
    for stack in stacks:
        counts[stack.frames] = counts.get(stack.frames, 0) + 1
    first = {stack.frames: stack.thread for stack in reversed(stacks)}
    return [Stack(first[frames], frames, count) for frames, count in counts.items()]
