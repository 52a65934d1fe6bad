"""Standard output and standard error: nobody who writes there waits for who reads them.

A pipe holds 64 KiB. A process that writes to a full one stands still until somebody reads, its event loop too. So a
`Writer` has a queue of limited size and a thread, and drops lines when the queue is full.

`redirect` puts a pipe of ours in the place of each of the two, also for the processes that are started later. A thread
reads it all the time. Thus a `print`, a line of a C library and the lines of vLLM's processes take the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_MOST_BYTES = 8 << 20
"""Of the lines that wait; as much again may be in the thread's hands."""
_BYTES_OF_A_LINE = 1024
"""What a line takes beside its text."""
_CHUNK = 65536
_LONGEST = 65536
"""Characters of a line of other processes; the rest is taken for another line."""
_PIPE_BYTES = 1 << 20
_PAUSE_SECONDS = 0.01
"""Between two writes: lines that come meanwhile are written together."""


class Writer:
    """Writes lines to a file in a thread."""

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        """`notice`: makes the line that says how many lines were dropped."""
        self._descriptor, self._notice = descriptor, notice
        self.dropped = 0
        """Lines that were dropped since the start."""
        self._lock = threading.RLock()  # A finalizer may log while its thread has the lock.
        self._lines: list[tuple[Callable[..., str], tuple[Any, ...]]] = []
        self._bytes = self._untold = 0
        self._wake, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def add(self, size: int, make: Callable[..., str], *arguments: Any) -> None:
        """Write a line soon, which `make` makes in the thread. Drops it if too much waits. Never blocks.

        Args:
            size: of the line, roughly.
            make: called with the arguments; returns the line without its end.
            *arguments: they must not change later.
        """
        with self._lock:
            if self._bytes > _MOST_BYTES:
                self._drop(1)
                return
            self._bytes += size + _BYTES_OF_A_LINE
            self._lines.append((make, arguments))
            if len(self._lines) == 1:
                self._idle.clear()
                self._wake.set()

    def flush(self, seconds: float) -> bool:
        """Wait until all lines are written, for this long at most; returns whether they are."""
        return self._idle.wait(seconds)

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._untold += lines

    def _run(self) -> None:
        while True:
            self._wake.wait()
            with self._lock:
                self._wake.clear()
                lines, self._lines, self._bytes = self._lines, [], 0
                dropped, self._untold = self._untold, 0
            texts = [_made(make, arguments) for make, arguments in lines]
            if dropped:
                texts.append(self._notice(dropped))  # they came after those that were in time
            try:
                self._write("\n".join([*texts, ""]).encode("utf-8", "backslashreplace"))
            except OSError:  # the reader has gone, or the disk is full
                with self._lock:
                    self._drop(len(lines))
                    self._untold += dropped
            with self._lock:
                if not self._lines:
                    self._idle.set()
            time.sleep(_PAUSE_SECONDS)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest[:_CHUNK]) :]
            except BlockingIOError:  # another process has made it so
                writable = select.poll()
                writable.register(self._descriptor, select.POLLOUT)
                writable.poll()


def _made(make: Callable[..., str], arguments: tuple[Any, ...]) -> str:
    try:
        return make(*arguments)
    except Exception as error:  # the thread has to go on
        return f"a line of the log cannot be made: {error!r}"


class _Redirected:
    """One of this process's two streams, which is a pipe from now on; and the thread that reads it."""

    def __init__(self, descriptor: int, writer: Writer, shape: Callable[[str], str]) -> None:
        self._descriptor, self._writer, self._shape = descriptor, writer, shape
        self._mark = f"slipway-{os.urandom(8).hex()}"
        self._marked = threading.Event()
        self._reader, write_end = os.pipe()
        with contextlib.suppress(OSError):  # this user may not have so large ones
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.dup2(write_end, descriptor)
        os.close(write_end)
        threading.Thread(target=self._read, name="output", daemon=True).start()

    def drain(self, seconds: float) -> None:
        """Wait until the writer has what was written before."""
        self._marked.clear()
        os.write(self._descriptor, f"\n{self._mark}\n".encode())
        self._marked.wait(seconds)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._reader, _CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST:
                lines, rest = [*lines, rest], b""
            for line in lines:
                # A progress bar begins its line anew again and again; its last state counts.
                text = line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
                if text == self._mark:
                    self._marked.set()
                elif text.strip():
                    self._writer.add(len(text), self._shape, text)


class Output:
    """Both streams of this process."""

    def __init__(self, notice: Callable[[int], str], shape: Callable[[str, str], str] | None = None) -> None:
        """Begin to write in threads.

        Args:
            notice: makes the line that says how many lines were dropped.
            shape: makes a line of a stream (`stdout`, `stderr`) and of what was written there past the log. None: the
                streams stay what they are.
        """
        self._redirected: list[_Redirected] = []
        self.stderr: int | None = None
        """What standard error was before; None if it still is that."""
        self._writers = [Writer(1 if shape is None else os.dup(1), notice)]
        if shape is None:
            return
        self.stderr = os.dup(2)
        if not os.path.sameopenfile(1, 2):
            self._writers.append(Writer(self.stderr, notice))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        for descriptor, name, writer in ((1, "stdout", self._writers[0]), (2, "stderr", self._writers[-1])):
            self._redirected.append(_Redirected(descriptor, writer, _Shape(shape, name)))

    @property
    def log(self) -> Writer:
        """What writes to standard output."""
        return self._writers[0]

    @property
    def dropped(self) -> int:
        return sum(writer.dropped for writer in self._writers)

    def flush(self, seconds: float) -> None:
        """Write what waits, for this long at most."""
        deadline = time.monotonic() + seconds
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for redirected in self._redirected:
            redirected.drain(max(deadline - time.monotonic(), 0.0))
        for writer in self._writers:
            writer.flush(max(deadline - time.monotonic(), 0.0))


class _Shape:
    def __init__(self, shape: Callable[[str, str], str], stream: str) -> None:
        self._shape, self._stream = shape, stream

    def __call__(self, line: str) -> str:
        return self._shape(self._stream, line)
