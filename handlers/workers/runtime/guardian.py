"""The end of a worker and all that it has started, however the worker or the server ends."""

from __future__ import annotations

import os
import select
import signal
from typing import NoReturn

_MOST_DESCRIPTORS = 1 << 16


def end_process_group() -> NoReturn:
    """End this process and all that it started: the server has gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def guard_group(server: int) -> None:
    """Start a process that ends this process's group when this process or the server ends.

    To be called before there are threads. It ends them even while a call holds the interpreter's lock. It belongs to
    the group itself, so that it ends with it. Before Linux 5.3, which has no file descriptors for processes, there is
    none; a worker then ends once it sees that the connection to the server is closed.
    """
    if os.getpgrp() != os.getpid():
        return
    try:
        watched = [os.pidfd_open(os.getpid()), os.pidfd_open(server)]
    except OSError:
        return
    if os.fork():
        for descriptor in watched:
            os.close(descriptor)
        return
    try:
        _wait_for_an_end(watched)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def _wait_for_an_end(processes: list[int]) -> None:
    # The worker's socket and pipe must be closed here: their other ends wait for the end of all copies.
    for place, descriptor in enumerate(processes):
        os.dup2(descriptor, place)
    os.closerange(len(processes), _MOST_DESCRIPTORS)
    end = select.poll()
    for place in range(len(processes)):
        end.register(place, select.POLLIN)
    end.poll()
