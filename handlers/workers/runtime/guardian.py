"""The end of a worker and all that it has started, however the server ends.

The kernel ends a worker together with the server, but not the worker's own children. The server ends those with the
worker's process group; when server and worker have both been killed, the guardian is left to do it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 1 << 16


def end_process_group() -> NoReturn:
    """End this process and all that it started: the server has gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when the server ends, even while a call holds the interpreter's lock.

    The kernel watches the thread of the server that started this process, which runs its event loop.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):  # not Linux: the worker ends when its connection is closed
        logging.getLogger(__name__).debug("no prctl", exc_info=True)
    if os.getppid() != parent:
        end_process_group()


def guard_group() -> None:
    """Start a process that ends this process's group when this process ends. To be called before there are threads.

    The guardian belongs to the group, so that it ends with the group. Before Linux 5.3, which has no file descriptors
    for processes, there is no guardian.
    """
    if os.getpgrp() != os.getpid():
        return
    try:
        worker = os.pidfd_open(os.getpid())
    except OSError:
        return
    if os.fork():
        os.close(worker)
        return
    try:
        _wait_for_end(worker)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def _wait_for_end(worker: int) -> None:
    # The worker's socket and pipes must be closed here: their other ends wait for the end of all copies.
    os.dup2(worker, 0)
    os.closerange(1, _MOST_DESCRIPTORS)
    end = select.poll()
    end.register(0, select.POLLIN)
    end.poll()
