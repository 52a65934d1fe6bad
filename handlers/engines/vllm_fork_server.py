"""A process that has imported vLLM and forks vLLM's processes: each would import it anew otherwise, for 8 seconds.

It is Python's own fork server (`multiprocessing`), which runs `vllm_preload` first. It is started with the server's
process, so that both import vLLM at the same time, and ends with it.

`VLLM_WORKER_MULTIPROC_METHOD=spawn` in the environment switches it off: each process of vLLM starts from nothing then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

logger = logging.getLogger(__name__)

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_PRELOAD = "handlers.engines.vllm_preload"


class _ForkServer:
    """The fork server of this process."""

    def __init__(self) -> None:
        self._wanted: bool | None = None
        self._lock = threading.Lock()
        self._problems: dict[int | None, str] = {}
        """What was found out about a fork server, by its process id."""

    def start(self) -> None:
        """Start it, or start it again if it has ended; it imports vLLM meanwhile.

        To be called from the main thread: the kernel ends the fork server with the thread that started it.
        """
        if self._wanted is None:
            # Looked at once: vLLM sets the variable itself when it is configured for a CPU.
            self._wanted = not os.environ.get(_METHOD) and not _is_wsl()
        if not self._wanted:
            return
        multiprocessing.set_forkserver_preload([_PRELOAD])
        with _environment():
            forkserver.ensure_running()

    def context(self) -> ForkServerContext | None:
        """What starts processes; None where they have to be spawned. Waits until vLLM is imported."""
        if not self._wanted:
            return None
        with self._lock:
            context = multiprocessing.get_context("forkserver")
            process: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
            if process not in self._problems:
                self._problems[process] = found = _problem(context)
                if found:
                    logger.warning("vLLM's processes are not forked, and take longer to start: %s", found)
            return None if self._problems[process] else context


_server = _ForkServer()
start, context = _server.start, _server.context


def is_forked() -> bool:
    """Whether this process is from the fork server; multiprocessing gives only those a list."""
    return forkserver.get_inherited_fds() is not None


def apply_environment(environment: Mapping[str, str]) -> None:
    """Make a forked process one of that environment: PyTorch and OpenMP have read theirs in the fork server."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))
    if affinity := environment.get("GOMP_CPU_AFFINITY"):
        _bind_threads([int(cpu) for cpu in affinity.split()])


def _bind_threads(cpus: Sequence[int]) -> None:
    """Bind each OpenMP thread to a processor of its own, and this one to the first.

    As libgomp does for GOMP_CPU_AFFINITY, which vLLM sets for its workers on a CPU. Its threads stay, so that it holds
    for all that they run later.
    """
    openmp = ctypes.CDLL(None)
    run, thread_number = openmp.GOMP_parallel, openmp.omp_get_thread_num

    def bind(_: Any) -> None:
        os.sched_setaffinity(0, {cpus[thread_number()]})

    run(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(cpus), 0)


def _problem(context: ForkServerContext) -> str:
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_tell_problem, args=(writer,), name="fork-server-check")
    try:
        process.start()
        writer.close()
        problem: str = reader.recv()
    except (EOFError, OSError) as error:
        return f"the fork server has ended ({error})"
    finally:
        reader.close()
    process.join()
    return problem


def _tell_problem(writer: Connection) -> None:
    from handlers.engines import vllm_preload

    writer.send(vllm_preload.problem)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment that the fork server is to see.

    It imports from where this process does, and never from the working directory, which may be a model's. OpenBLAS
    starts no threads, which a fork would lose.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _is_wsl() -> bool:
    """On WSL the NVIDIA driver's library does not work after a fork; vLLM spawns there as well."""
    return "microsoft" in " ".join(os.uname()).lower()
