"""A process that has imported vLLM and forks vLLM's processes: each would import it anew otherwise, for 8 seconds.

It is Python's own fork server (`multiprocessing`), which runs `preload` first. It is started with the server's
process, so that both import vLLM at the same time, and ends with it.

`VLLM_WORKER_MULTIPROC_METHOD=spawn` in the environment switches it off: each process of vLLM starts from nothing then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

logger = logging.getLogger(__name__)

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_PR_SET_PDEATHSIG = 1
_PRELOAD = "engines.vllm.processes.preload"
MUST_NOT_FORK = 70  # The exit code of the fork server.


class _ForkServer:
    def __init__(self) -> None:
        self._wanted: bool | None = None
        self._started = False

    def start(self) -> None:
        """Start it, or start it again if it was killed; does not wait until it has imported vLLM.

        To be called from the main thread: the kernel ends the fork server with the thread that started it.
        """
        if self._wanted is None:
            # Looked at once: vLLM sets the variable itself when it is configured for a CPU.
            self._wanted = not os.environ.get(_METHOD) and not _needs_spawn()
        if self._wanted and _must_not_fork():
            self._wanted = False  # Another one would find the same, after seconds.
            if self._started:
                self._ended()
        if not self._wanted:
            return
        multiprocessing.set_forkserver_preload([_PRELOAD])
        with _environment():
            type(forkserver._forkserver).ensure_running(forkserver._forkserver)
        self._started = True
        start_no_other()

    def context(self) -> ForkServerContext | None:
        """Return what starts processes; None where they have to be spawned.

        Blocks until vLLM is imported. The fork server ends if it must not fork, and logs the reason.
        """
        if not self._started:
            return None
        context = multiprocessing.get_context("forkserver")
        try:
            trial = context.Process(target=int, name="fork-server-check")
            trial.start()
            trial.join()
        except (EOFError, OSError):
            self._ended()
            return None
        return context

    def _ended(self) -> None:
        self._started = False
        logger.warning("vLLM's processes are not forked, and take longer to start: the fork server has ended")


_server = _ForkServer()
start, context = _server.start, _server.context


def _must_not_fork() -> bool:
    """Return True if the fork server has ended because it must not fork (`preload`), and reap it then."""
    process = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if process is None:
        return False
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None or (ended.si_code, ended.si_status) != (os.CLD_EXITED, MUST_NOT_FORK):
        return False
    os.waitpid(process, 0)
    return True


def start_no_other() -> None:
    """Have multiprocessing use the fork server there is; it would start another in its children and in any thread."""
    setattr(forkserver._forkserver, "ensure_running", lambda: None)  # noqa: B010


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_forked() -> bool:
    """Return True if this process is from the fork server; multiprocessing gives a list only to such processes."""
    return forkserver.get_inherited_fds() is not None


def apply_environment(environment: Mapping[str, str]) -> None:
    """Give a forked process this environment, also in PyTorch and OpenMP, which have read the fork server's."""
    import torch._dynamo

    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.config.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))
    if affinity := environment.get("GOMP_CPU_AFFINITY"):
        _bind_threads([int(cpu) for cpu in affinity.split()])


def _bind_threads(cpus: Sequence[int]) -> None:
    """Bind each OpenMP thread to one processor, and this thread to the first.

    As libgomp does for GOMP_CPU_AFFINITY, which vLLM sets for its workers on a CPU. Its threads stay, so that it holds
    for all that they run later.
    """
    openmp = ctypes.CDLL(None)
    run, thread_number = openmp.GOMP_parallel, openmp.omp_get_thread_num

    def bind(_: Any) -> None:
        os.sched_setaffinity(0, {cpus[thread_number()]})

    run(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(cpus), 0)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the environment that the fork server is to see, for a while.

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


def _needs_spawn() -> bool:
    """Return True if a setting takes effect only in a process that is executed, not forked.

    On WSL the NVIDIA driver's library does not work after a fork; vLLM spawns there as well. CUDA's libraries for older
    drivers are found through LD_LIBRARY_PATH, which vLLM sets. Intel's OpenMP binds its threads when it is loaded.
    """
    compatibility = os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0") not in ("", "0")
    intel = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libiomp", "libomp"))
    return compatibility or intel or "microsoft" in " ".join(os.uname()).lower()
