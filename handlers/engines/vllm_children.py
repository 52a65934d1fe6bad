"""vLLM's processes end with this one, however that ends: the kernel sees to it, not a handler of a signal.

Written for vLLM 0.32. The server starts the engine process by handing `EngineCoreProc.run_engine_core` to
multiprocessing, and the engine process starts its workers with `WorkerProc.worker_main` in the same way, from its main
thread. Each of them runs a function of ours first. vLLM's own workers notice the end of the engine process only between
two steps, and a process that is stopped notices nothing. tests/live/test_health_live.py kills a server and finds
nothing left.

They also tell this one why they could not start, which vLLM writes to the log alone: the engine process by what
`run_engine_core` raises, its workers by what `WorkerProc()` raises, since `worker_main` keeps it to itself.
tests/live/test_management_live.py has an engine fail for want of memory.

They are a process group of their own: Ctrl-C in a terminal, and whatever else goes to a whole group, would end them at
once, while the server lets its requests finish. tests/live/test_process_live.py does that. They stay in the server's
session: Linux shares the processors out between sessions first (sched(7), autogroup), and with one for the engine
`python -m benchmarks` on two cores counted a fifth of the one-token requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from handlers.engines.protocol import EngineStartError
from handlers.engines.start_failure import StartFailure, failure_of

_PR_SET_PDEATHSIG = 1


def _original(owner: type, name: str) -> Any:
    function = getattr(owner, name, None)
    if not callable(function):
        raise EngineStartError(f"this vLLM is not one that Slipway knows: {owner.__name__} has no {name}")
    return function


_run_engine_core = _original(EngineCoreProc, "run_engine_core")
_worker_main = _original(WorkerProc, "worker_main")


class Reports:
    """What the processes that are started meanwhile say of their failures."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    @property
    def writer(self) -> Connection:
        """What a process is given to say it with."""
        return self._writer

    def first(self) -> StartFailure | None:
        """The cause of the others; None where none of the processes that have ended by now has said anything."""
        with contextlib.suppress(EOFError, OSError):
            if self._reader.poll():
                failure: StartFailure = self._reader.recv()
                return failure
        return None

    def close(self) -> None:
        """What is said from now on goes nowhere."""
        self._reader.close()
        self._writer.close()


class _ForThisThread:
    """Stands where vLLM has `EngineCoreProc.run_engine_core`: ours for threads that ask for it, and vLLM's for others.

    Several threads may be at it at a time, one for each model.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        reports: Reports | None = getattr(self._local, "reports", None)
        return _run_engine_core if reports is None else partial(run_engine_core, reports.writer)

    def set(self, reports: Reports | None) -> None:
        self._local.reports = reports


_for_this_thread = _ForThisThread()


@contextlib.contextmanager
def tied_to_this_thread() -> Iterator[Reports]:
    """Engine processes that are started meanwhile end when the calling thread does; it has to outlive them."""
    EngineCoreProc.run_engine_core = _for_this_thread
    reports = Reports()
    _for_this_thread.set(reports)
    try:
        yield reports
    finally:
        _for_this_thread.set(None)
        reports.close()


def run_engine_core(report: Connection, *arguments: Any, **options: Any) -> None:
    """What the engine process runs in the place of vLLM's function, which it then calls."""
    _end_with_parent()
    os.setpgid(0, 0)
    WorkerProc.worker_main = staticmethod(partial(worker_main, report))
    with _telling(report):
        _run_engine_core(*arguments, **options)


def worker_main(report: Connection, *arguments: Any, **options: Any) -> None:
    """The same in a worker of the engine process."""
    _end_with_parent()
    start = WorkerProc.__init__

    def telling_start(*own: Any, **named: Any) -> None:
        with _telling(report):
            start(*own, **named)

    WorkerProc.__init__ = telling_start
    _worker_main(*arguments, **options)


@contextlib.contextmanager
def _telling(report: Connection) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # it had started before, so nobody reads it any more
            report.send(failure_of(error))
        raise


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it had ended before the kernel was asked
        os._exit(1)
