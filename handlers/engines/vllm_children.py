"""vLLM's processes end with this one, however that ends: the kernel sees to it, not a handler of a signal.

Written for vLLM 0.32 and 0.33. The server starts the engine process by handing `EngineCoreProc.run_engine_core` to
multiprocessing, and the engine process starts its workers with `WorkerProc.worker_main` in the same way, from its main
thread. Each of them runs a function of ours first. vLLM's own workers notice the end of the engine process only between
two steps, and a process that is stopped notices nothing. tests/live/test_health_live.py kills a server and finds
nothing left.

They are a session of their own: Ctrl-C in a terminal, and whatever else goes to the whole process group, would end them
at once, while the server lets its requests finish. tests/live/test_process_live.py does that.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from handlers.engines.protocol import EngineStartError

_PR_SET_PDEATHSIG = 1


def _original(owner: type, name: str) -> Any:
    function = getattr(owner, name, None)
    if not callable(function):
        raise EngineStartError(f"this vLLM is not one that Slipway knows: {owner.__name__} has no {name}")
    return function


_run_engine_core = _original(EngineCoreProc, "run_engine_core")
_worker_main = _original(WorkerProc, "worker_main")


_lock = threading.Lock()
_open = 0


@contextlib.contextmanager
def tied_to_this_thread() -> Iterator[None]:
    """Engine processes that are started meanwhile end when the calling thread does; it has to outlive them.

    Several threads may be at it at a time, one for each model.
    """
    _replace(+1)
    try:
        yield
    finally:
        _replace(-1)


def _replace(change: int) -> None:
    global _open
    with _lock:
        _open += change
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core if _open else _run_engine_core)


def run_engine_core(*arguments: Any, **options: Any) -> None:
    """What the engine process runs in the place of vLLM's function, which it then calls."""
    _end_with_parent()
    os.setsid()
    WorkerProc.worker_main = staticmethod(worker_main)
    _run_engine_core(*arguments, **options)


def worker_main(*arguments: Any, **options: Any) -> None:
    """The same in a worker of the engine process."""
    _end_with_parent()
    _worker_main(*arguments, **options)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it had ended before the kernel was asked
        os._exit(1)
