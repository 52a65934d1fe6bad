"""A process that has imported vLLM, and forks vLLM's processes.

Without this fork server, each process takes 8 seconds to import vLLM. It is Python's own fork server
(`multiprocessing`), which first imports `preload`. It starts and ends together with the server. So the server and the
fork server import vLLM at the same time.

`VLLM_WORKER_MULTIPROC_METHOD=spawn` in the environment switches it off. Each process then imports vLLM itself.
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
MUST_NOT_FORK = 70  # The fork server's exit code if a fork is unsafe.


class _ForkServer:
    def __init__(self) -> None:
        self._wanted: bool | None = None
        self._started = False

    def start(self) -> None:
        """Start the fork server, or restart it if it was killed. Does not wait for the import of vLLM.

        Call it from the main thread, because the kernel kills the fork server with the thread that started it.
        """
        if self._wanted is None:
            # Read only once, because vLLM itself sets the variable when it is configured for a CPU.
            self._wanted = not os.environ.get(_METHOD) and not _needs_spawn()
        if self._wanted and _must_not_fork():
            self._wanted = False  # A new fork server would fail for the same reason, after some seconds.
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
        """Return the context that forks processes; None if processes have to be spawned.

        Blocks until the fork server has imported vLLM. If a fork is unsafe, the fork server logs the reason and exits.
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
    """Return True if the fork server exited because `preload` found that a fork is unsafe. Also reap its process."""
    process = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if process is None:
        return False
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None or (ended.si_code, ended.si_status) != (os.CLD_EXITED, MUST_NOT_FORK):
        return False
    os.waitpid(process, 0)
    return True


def start_no_other() -> None:
    """Make multiprocessing use the existing fork server. Otherwise child processes and threads would start another."""
    setattr(forkserver._forkserver, "ensure_running", lambda: None)  # noqa: B010


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_forked() -> bool:
    """Return True if the fork server forked this process. Only such processes have a list of inherited descriptors."""
    return forkserver.get_inherited_fds() is not None


def apply_environment(environment: Mapping[str, str]) -> None:
    """Set the environment of a forked process. Also update PyTorch and OpenMP, which have read the old environment."""
    import torch._dynamo

    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.config.disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if (threads := environment.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(threads))
    if affinity := environment.get("GOMP_CPU_AFFINITY"):
        _bind_threads([int(cpu) for cpu in affinity.split()])


def _bind_threads(cpus: Sequence[int]) -> None:
    """Bind each OpenMP thread to one processor, and this thread to the first processor.

    libgomp does the same for GOMP_CPU_AFFINITY, which vLLM sets for its workers on a CPU. The threads of libgomp stay
    alive, so the binding also applies to their later work.
    """
    openmp = ctypes.CDLL(None)
    run, thread_number = openmp.GOMP_parallel, openmp.omp_get_thread_num

    def bind(_: Any) -> None:
        os.sched_setaffinity(0, {cpus[thread_number()]})

    run(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(bind), None, len(cpus), 0)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the environment for the fork server during the `with` block.

    The fork server imports from the same places as this process. It never imports from the working directory, which may
    be a model directory. OpenBLAS starts no threads, because a fork would lose them.
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
    """Return True if processes must be spawned, because a library or a setting does not work in a forked process.

    On WSL, the library of the NVIDIA driver does not work after a fork, and vLLM itself spawns its processes. Two
    settings take effect only when a program starts: LD_LIBRARY_PATH, which vLLM sets for CUDA's compatibility
    libraries, and the binding of threads by Intel's OpenMP.
    """
    compatibility = os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0") not in ("", "0")
    intel = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libiomp", "libomp"))
    return compatibility or intel or "microsoft" in " ".join(os.uname()).lower()
