"""vLLM's engine process ends with this one, however that ends: the kernel sees to it, not a handler of a signal.

Written for vLLM 0.32 and 0.33, which start it by handing `EngineCoreProc.run_engine_core` to multiprocessing by name.
Its own workers, where there are any, watch a pipe of the engine process and end with it.
tests/live/test_health_live.py kills a server and finds nothing left.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from handlers.engines.protocol import EngineStartError

_PR_SET_PDEATHSIG = 1
_run_engine_core = EngineCoreProc.run_engine_core


@contextlib.contextmanager
def tied_to_this_thread() -> Iterator[None]:
    """Engine processes that are started meanwhile end when the calling thread does; it has to outlive them.

    Raises:
        EngineStartError: this vLLM starts them in another way.
    """
    if not callable(getattr(EngineCoreProc, "run_engine_core", None)):
        raise EngineStartError("this vLLM is not one that Slipway knows: EngineCoreProc has no run_engine_core")
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_run_engine_core)


def run_engine_core(*arguments: Any, **options: Any) -> None:
    """What the engine process runs in the place of vLLM's function, which it then calls."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server = multiprocessing.parent_process()
    if server is not None and os.getppid() != server.pid:  # it had ended before the kernel was asked
        os._exit(1)
    _run_engine_core(*arguments, **options)
