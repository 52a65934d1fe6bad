"""A process beside the worker that ends what the worker has started, where the server cannot do it any more.

The kernel ends a worker with the server, but not the worker's own children. The server ends them with the worker's
process group as long as it lives; when both have been killed, this is left to do it.
"""

from __future__ import annotations

import os
import select
import signal

_MOST_DESCRIPTORS = 1 << 16


def guard_group() -> None:
    """Start the guardian of this process's group; to be called once, before there are threads.

    It is a part of the group, so that whoever ends the group ends it, too. Where the kernel has no file descriptors for
    processes (before Linux 5.3) there is none.
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
    # Nothing else may stay open: others take the end of the worker's socket and pipes for its own.
    os.dup2(worker, 0)
    os.closerange(1, _MOST_DESCRIPTORS)
    end = select.poll()
    end.register(0, select.POLLIN)
    end.poll()
