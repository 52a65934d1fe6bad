"""Reads the Python stacks of all threads of other processes.

After a process has registered, one of its threads waits for a byte in a pipe, which is called the bell. When a byte
arrives, the thread takes Python's lock (the GIL) and writes the stacks. If the process hangs in C code that holds the
lock, the thread cannot run. Such a process gets a signal instead, and `faulthandler` writes the stacks in the signal's
handler. The handler is written in C, and does not take the lock. It is safe only while no thread runs Python code: the
handler reads the frames of all threads, and a frame that changes meanwhile can crash the process.

The stacks go to a file without a name, which the process keeps open. Other processes open the file and the bell through
`/proc/PID/fd`. Both disappear when the process ends. Workers of custom handlers load this module by its path, so it
imports only the standard library.
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

SIGNAL = signal.SIGRTMIN + 9  # A real-time signal, because other code in the processes may use the named signals.

_BIT = 1 << (SIGNAL - 1)  # The bit of `SIGNAL` in the kernel's masks of a process's signals.
_FILE = re.compile(r"slipway-stacks-(\d+)-")  # The file's name contains the number of the bell's descriptor.
_PROCESSES = Path("/proc")
_POLL_SECONDS = 0.01
_BELL_SECONDS = 1.0  # The time to answer the bell. A process that takes longer gets the signal.
_BYTES_READ = 4096  # Several processes may have rung the bell, so more than one byte is read.
_LONGEST = 4 << 20  # The maximum number of bytes that are read.
_MOST_FRAMES, _MOST_STACKS = 100, 100  # The limits of `faulthandler`.
_HEAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+).*$", re.MULTILINE)
_ANSWER = re.compile(r"^\[\[.*\]\]$", re.MULTILINE)  # The line that answers the bell.


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread, or of several threads with equal stacks. The innermost frame is first."""

    thread: str  # The name of the thread, or its number if the name is not known.
    frames: tuple[str, ...]
    threads: int = 1

    def shown(self) -> dict[str, Any]:
        """Return the stack as data for JSON."""
        return {"thread": self.thread, "threads": self.threads, "frames": list(self.frames)}


_descriptors: list[int] = []  # The file and both ends of the bell of this process. Empty before it registers.


def register() -> None:
    """Make this process and its forked processes write their stacks on demand. Repeated calls have no effect."""
    if not _descriptors:
        _open()
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    # The descriptors are those of the parent, and the parent's thread does not exist in the child.
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open()


def _open() -> None:
    bell, writer = os.pipe()  # Keep the writer open. Without a writer, reading the bell would return at once.
    file = _new_file(f"slipway-stacks-{bell}-")
    _descriptors[:] = [file, bell, writer]
    faulthandler.register(SIGNAL, file, all_threads=True)
    threading.Thread(target=_answer, args=(bell, file), name="stacks", daemon=True).start()


def _new_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
    else:  # The interpreter was built with an old C library.
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _answer(bell: int, file: int) -> None:
    """Write the stacks of this process each time the bell rings."""
    with contextlib.suppress(OSError):  # A program may close the descriptors that it does not know.
        while os.read(bell, _BYTES_READ):
            os.write(file, json.dumps([astuple(stack) for stack in own_stacks()]).encode() + b"\n")


def own_stacks() -> list[Stack]:
    """Return the stacks of this process, except that of the calling thread. The main thread is first."""
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
    """Ask processes for their stacks, and return the stacks of the processes that answered.

    The stack of the main thread is first. A process that has not registered gets no signal.

    Args:
        processes: The processes' ids.
        seconds: The time limit for all processes together. Processes that have not answered the bell get the signal
            after half of this time, or after `_BELL_SECONDS` if that is shorter.
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
                    with contextlib.suppress(OSError):  # The process has ended.
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
    """Return True if a process has registered. No other program has both such a file and such a handler."""
    return catches(process, SIGNAL) and _descriptors_of(process) is not None


def catches(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal. Without a handler, the signal may end the process."""
    try:
        return bool(_signals(process).get("SigCgt", 0) & 1 << (number - 1))
    except OSError:  # The process has ended.
        return False


def _descriptors_of(process: int) -> tuple[Path, Path] | None:
    """Return the paths of a process's file and bell, or None if it has not registered."""
    descriptors = _PROCESSES / str(process) / "fd"
    with contextlib.suppress(OSError):  # The process has ended, or belongs to another user.
        for link in descriptors.iterdir():
            if (name := _FILE.search(os.readlink(link))) is not None:
                return link, descriptors / name[1]
    return None


def _opened(process: int, deadline: float) -> tuple[int, Path] | None:
    """Open and empty a process's file. Return the file and the bell's path; None if the process cannot be asked.

    The file is locked until it is closed, so that no other process empties it before it is read.
    """
    if (paths := _descriptors_of(process)) is None:
        return None
    with contextlib.suppress(OSError):  # The process has ended, or another process has locked the file for too long.
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
    with contextlib.suppress(OSError):  # No thread reads the bell, or the pipe is full.
        bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(bell, b"!")
        finally:
            os.close(bell)


def _in_handler(process: int) -> bool:
    """Return True if the signal is pending for a process, or if its main thread runs the signal's handler."""
    try:
        signals = _signals(process)
    except OSError:
        return False
    return any(signals.get(name, 0) & _BIT for name in ("SigPnd", "ShdPnd", "SigBlk"))


def _signals(process: int) -> dict[str, int]:
    """Return a process's masks of signals, by their names in its status file."""
    lines = (_PROCESSES / str(process) / "status").read_text().splitlines()
    pairs = (line.split(":\t") for line in lines if line.startswith(("Sig", "Shd")))
    return {name: int(bits, 16) for name, bits in pairs if name != "SigQ"}


def _parsed(text: str) -> list[Stack]:
    """Parse the stacks that a process has written. The list is empty if they are not complete."""
    if (answer := _ANSWER.search(text)) is not None:
        return [Stack(thread, tuple(frames), threads) for thread, frames, threads in json.loads(answer[0])]
    # `faulthandler` wrote the text. The current thread in it is the main thread, which got the signal.
    _, *parts = _HEAD.split(text)
    found: list[Stack] = []
    for kind, number, lines in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        frames = tuple(line.strip() for line in lines.splitlines() if line.startswith("  "))
        found.insert(0 if kind == "Current thread" else len(found), Stack(number, frames))
    return _joined(found)


def _joined(stacks: list[Stack]) -> list[Stack]:
    """Merge equal stacks, such as the stacks of idle threads, into one."""
    counts: dict[tuple[str, ...], int] = {}
    for stack in stacks:
        counts[stack.frames] = counts.get(stack.frames, 0) + 1
    first = {stack.frames: stack.thread for stack in reversed(stacks)}
    return [Stack(first[frames], frames, count) for frames, count in counts.items()]
