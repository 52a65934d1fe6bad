"""The worker's end of the connection."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

from .frames import Frame, FrameReader, Kind, encode_frame

_READ_SIZE = 256 * 1024
_PR_SET_PDEATHSIG = 1


class Channel:
    """Frames over the inherited socket. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, *frames: tuple[Kind, int, bytes]) -> None:
        """Send frames together."""
        data = b"".join(encode_frame(kind, call, body) for kind, call, body in frames)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            end_process_group()

    def read(self) -> Iterator[Frame]:
        """Frames as they come, until the server has gone."""
        reader = FrameReader()
        while data := self._receive():
            yield from reader.feed(data)

    def close(self) -> None:
        """Tell the server that nothing more comes, even if threads of the handler keep the process alive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_READ_SIZE)
        except OSError:
            return b""


def end_process_group() -> None:
    """End this process and all that it started: there is no server any more."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the server ends, even while a call holds the interpreter's lock.

    The kernel watches the server's thread that started this process; that is its event loop.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):  # not Linux: the closed connection must do
        logging.getLogger(__name__).debug("no prctl", exc_info=True)
    if os.getppid() != parent:
        end_process_group()
