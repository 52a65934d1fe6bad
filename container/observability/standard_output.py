"""Standard output and standard error that never block the process.

A pipe holds 64 KiB. A process that writes to a full pipe blocks until the reader reads. Its event loop then blocks,
too. A `Writer` does not block: it has a bounded queue and a thread, and drops lines when the queue is full.

`Output` can replace both streams by pipes that a thread always reads. Processes that are started later inherit the
pipes, so a `print`, a line from a C library and a line from vLLM's processes all reach a `Writer`.
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
from functools import partial
from typing import Any

_MOST_BYTES = 8 << 20  # The size of the queue. The lines that the thread is writing do not count.
_BYTES_OF_A_LINE = 1024  # The memory that a queued line needs in addition to its text.
_CHUNK = 65536
_LONGEST = 65536  # If a line has more bytes than this and has not ended yet, it is split.
_PIPE_BYTES = 1 << 20
_PAUSE_SECONDS = 0.01  # The pause between two writes. Lines that arrive during the pause are written together.


class Writer:
    """Writes lines to a file in a thread."""

    def __init__(self, descriptor: int, notice: Callable[[int], str]) -> None:
        """Create the writer.

        Args:
            notice: Formats the line that reports a number of dropped lines.
        """
        self._descriptor, self._notice = descriptor, notice
        self.dropped = 0  # The number of dropped lines since the start.
        self._lock = threading.RLock()  # Reentrant: a finalizer may log in a thread that holds the lock.
        self._lines: list[tuple[Callable[..., str], tuple[Any, ...]]] = []
        self._bytes = self._untold = 0
        self._wake, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def add(self, size: int, make: Callable[..., str], *arguments: Any) -> None:
        """Queue a line, or drop it if the queue is full. This method never blocks.

        Args:
            size: The line's approximate length in bytes.
            make: Formats the line, without a line end. The writer's thread calls it with the arguments.
            *arguments: Arguments of `make`. They must not change later.
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
        """Wait at most `seconds` until all lines are written. Return True if they are."""
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
                texts.append(self._notice(dropped))  # Last, because the queue was full when lines were dropped.
            try:
                self._write("\n".join([*texts, ""]).encode("utf-8", "backslashreplace"))
            except OSError:  # The reader is gone, or the disk is full.
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
            except BlockingIOError:  # Another process made the file non-blocking.
                writable = select.poll()
                writable.register(self._descriptor, select.POLLOUT)
                writable.poll()


def _made(make: Callable[..., str], arguments: tuple[Any, ...]) -> str:
    try:
        return make(*arguments)
    except Exception as error:  # The thread must not end.
        return f"a line of the log cannot be made: {error!r}"


class _Redirected:
    """A standard stream that was replaced by a pipe, and the thread that reads the pipe."""

    def __init__(
        self, descriptor: int, writer: Writer, shape: Callable[[str], str], is_held: Callable[[str], bool]
    ) -> None:
        self._descriptor, self._writer, self._shape, self._is_held = descriptor, writer, shape, is_held
        self._mark = f"slipway-{os.urandom(8).hex()}"
        self._marked = threading.Event()
        self._reader, write_end = os.pipe()
        with contextlib.suppress(OSError):  # The total size of a user's pipes is limited.
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.dup2(write_end, descriptor)
        os.close(write_end)
        threading.Thread(target=self._read, name="output", daemon=True).start()

    def drain(self, seconds: float) -> None:
        """Wait at most `seconds` until all text that was written to the stream has reached the writer."""
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
                # A progress bar overwrites its line. Only the last state is kept.
                text = line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
                if text == self._mark:
                    self._marked.set()
                elif text.strip() and not self._holds(text):
                    self._writer.add(len(text), self._shape, text)

    def _holds(self, text: str) -> bool:
        try:
            return self._is_held(text)
        except Exception:  # The thread must not end: processes would block on a full pipe.
            return False


class Output:
    """Standard output and standard error of this process."""

    def __init__(
        self,
        notice: Callable[[int], str],
        shape: Callable[[str, str], str] | None = None,
        is_held: Callable[[str, str], bool] = lambda stream, line: False,
    ) -> None:
        """Start the threads.

        Args:
            notice: Formats the line that reports a number of dropped lines.
            shape: Formats a line that was not logged. The arguments are the stream's name (`stdout`, `stderr`) and the
                line. None if the streams are not replaced.
            is_held: Returns True for a line that must not be written. It has the same arguments as `shape`.
        """
        _open_missing()
        self._redirected: list[_Redirected] = []
        self.stderr: int | None = None  # The descriptor of the original standard error. None if it was not replaced.
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
            self._redirected.append(_Redirected(descriptor, writer, partial(shape, name), partial(is_held, name)))

    @property
    def log(self) -> Writer:
        """The writer of standard output."""
        return self._writers[0]

    @property
    def dropped(self) -> int:
        return sum(writer.dropped for writer in self._writers)

    def flush(self, seconds: float) -> None:
        """Wait at most `seconds` until all text that was written has been passed to the reader."""
        deadline = time.monotonic() + seconds
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # A model's code may have closed the stream.
                stream.flush()
        for redirected in self._redirected:
            with contextlib.suppress(OSError):
                redirected.drain(max(deadline - time.monotonic(), 0.0))
        for writer in self._writers:
            writer.flush(max(deadline - time.monotonic(), 0.0))


def _open_missing() -> None:
    """Open /dev/null in place of each standard stream that was closed when the process started."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
        if getattr(sys, name) is None:  # Python sets the stream to None if the descriptor is closed.
            stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
