"""The Python stacks of the threads of other processes.

A process registers, and writes its stacks when it gets a signal. `faulthandler` writes them in the signal's handler, in
C and without Python's lock. So a process that hangs in a call of C writes them, too. They go to a file without a name,
which the process has open from its start. Other processes open it by `/proc/PID/fd`. Nothing of it is left when the
process has ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 9  # The processes may run other code, which uses the signals with names.

_BIT = 1 << (SIGNAL - 1)  # Of `SIGNAL`, in the sets of a process's signals.
_NAME = "slipway-stacks-"
_PROCESSES = Path("/proc")
_POLL_SECONDS = 0.01
_LONGEST = 4 << 20  # Bytes that are read. `faulthandler` writes at most 100 frames of 100 threads.
_HEAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread or of several equal threads, the innermost frame first."""

    thread: str  # The name of the thread, or its number if the name is not known.
    frames: tuple[str, ...]
    threads: int = 1


def stack_file() -> int:
    """Return the descriptor of a new file for the stacks of a process."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(_NAME)
    else:  # An interpreter that was built with an old C library.
        descriptor, path = tempfile.mkstemp(prefix=_NAME)
        os.unlink(path)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def register() -> None:
    """Let this process write its stacks when it gets `SIGNAL`."""
    faulthandler.register(SIGNAL, stack_file(), all_threads=True)


def own_stacks() -> list[Stack]:
    """Return the stacks of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if number != threading.get_ident():
            places = ((one.f_code, line) for one, line in traceback.walk_stack(frame))
            lines = (f'File "{code.co_filename}", line {line} in {code.co_name}' for code, line in places)
            found.append(Stack(names.get(number, hex(number)), tuple(lines)))
    return _joined(found)


def stacks_of(processes: Collection[int], seconds: float) -> dict[int, list[Stack]]:
    """Have processes write their stacks, and return the stacks of those that did, the main thread first.

    A process that did not register gets no signal.

    Args:
        processes: The processes' ids.
        seconds: The time for all of them.
    """
    texts: dict[int, str] = {}
    with contextlib.ExitStack() as files:
        waiting = {process: file for process in processes if (file := _ask(process)) is not None}
        for file in waiting.values():
            files.callback(os.close, file)
        sizes = dict.fromkeys(waiting, 0)
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for process, file in tuple(waiting.items()):
                before, size = sizes[process], os.fstat(file).st_size
                sizes[process] = size
                if size and size == before and not _in_handler(process):
                    texts[process] = os.pread(file, _LONGEST, 0).decode(errors="replace")
                    del waiting[process]
    return {process: _parsed(text) for process, text in texts.items()}


def catches(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal. Without one, the signal may end the process."""
    try:
        return bool(_signals(process).get("SigCgt", 0) & 1 << (number - 1))
    except OSError:  # It has ended.
        return False


def _ask(process: int) -> int | None:
    """Send the signal to a process. Returns its file, which is empty at first, or None if it gets no signal."""
    descriptors = _PROCESSES / str(process) / "fd"
    if not catches(process, SIGNAL):
        return None
    with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
        for link in descriptors.iterdir():
            if _NAME not in os.readlink(link):
                continue
            file = os.open(link, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.truncate(file, 0)
                os.kill(process, SIGNAL)
            except OSError:
                os.close(file)
                raise
            return file
    return None


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
    """Read what `faulthandler` has written. The main thread is the one that got the signal."""
    _, *parts = _HEAD.split(text)
    found: list[Stack] = []
    for kind, number, lines in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        frames = tuple(line.strip() for line in lines.splitlines() if line.startswith("  "))
        found.insert(0 if kind == "Current thread" else len(found), Stack(number, frames))
    return _joined(found)


def _joined(stacks: list[Stack]) -> list[Stack]:
    """Join equal stacks, as those of idle threads."""
    counts: dict[tuple[str, ...], int] = {}
    for stack in stacks:
        counts[stack.frames] = counts.get(stack.frames, 0) + 1
    first = {stack.frames: stack.thread for stack in reversed(stacks)}
    return [Stack(first[frames], frames, count) for frames, count in counts.items()]
