"""vLLM's processes: their start, their end with the server, and their errors at the start.

vLLM starts its processes with the multiprocessing context that its `get_mp_context` returns: the server starts the
engine process (and, for several data-parallel ranks, the coordinator), and the engine process starts its workers.
Slipway's contexts make each of them run a function first (`_Tied`).

Start: they are forked from a process that has imported vLLM (`fork_server`), if that is possible. A forked process has
its parent's environment from long ago, so the environment is handed over, and its effects on libraries at their load
are repeated (`fork_server.apply_environment`).

End: however the server ends, the kernel kills the fork server with the server's main thread, and the fork server's
processes with the fork server. A spawned process ends with the thread that started it. vLLM's own workers notice the
end of the engine process only between two steps, and a process that is stopped notices nothing. Workers that wait for
one that has died are killed, so that the engine process reports its death at once. tests/live/test_health_live.py kills
a server and finds nothing left.

Failures: vLLM writes the errors of its processes to the log alone. Here the engine process reports an error of the
function that vLLM runs in it, and each worker reports an error of `WorkerProc()`. tests/live/test_management_live.py
lets an engine fail because memory is short.

Each engine process is a separate process group: Ctrl-C in a terminal goes to a whole group, and would end the engine
while the server lets its requests finish. tests/live/test_process_live.py does that. They stay in the server's session:
Linux divides the processors between sessions first (sched(7), autogroup). With a separate session for the engine, the
throughput of one-token requests on two cores fell to a fifth (`python -m benchmarks`).
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from vllm import envs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.engine.core_client import EngineCoreClient

from engines import stacks
from engines.start_failure import StartFailure, failure_of
from engines.vllm.copies import core_client
from engines.vllm.copies.continuation import advance
from engines.vllm.patches import grammars, processes
from engines.vllm.processes import fork_server
from engines.vllm.processes.cpu import Pause, token_ranks, usage_without_page_cache

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_ERRORS = 2  # The descriptor of the standard error.
_WORKER = "VLLM::Worker"  # Begins the title of a worker.
_SEMAPHORE = "sem."  # Begins the file name of a semaphore.
_EXIT_SECONDS = 10.0  # A killed process frees the memory of its GPU first, which may take seconds.


class _Tied:
    """The function of a process: `prepare`, and vLLM's function in the environment of the moment when it is started."""

    def __init__(
        self, function: Callable[..., None], prepare: Callable[[Connection], None], report: Connection
    ) -> None:
        self._function, self._prepare, self._report = function, prepare, report
        self._environment: Mapping[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Pickled by `Process.start`, around which vLLM sets variables for one process alone.
        return vars(self) | {"_environment": dict(os.environ)}

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if fork_server.is_forked():
            fork_server.apply_environment(self._environment)
        _end_with_parent()
        faulthandler.enable(_ERRORS)  # the log gets the stacks of a process that crashes
        stacks.register()
        self._prepare(self._report)
        _name_shared_memory()
        with _reporting_failure(self._report):
            self._function(*arguments, **options)


def tied(context: BaseContext, prepare: Callable[[Connection], None], report: Connection) -> BaseContext:
    """Return a context whose processes run `prepare` first, end with their parent, and report their failures."""

    def process(*, target: Callable[..., None], **options: Any) -> BaseProcess:
        made: BaseProcess = context.Process(target=_Tied(target, prepare, report), **options)  # type: ignore[attr-defined]
        return made

    own = copy.copy(context)
    setattr(own, "Process", process)  # noqa: B010
    return own


_this_thread = threading.local()


@contextlib.contextmanager
def tied_to_this_thread(processors: Collection[int] = (), *, spawned: bool = False) -> Iterator[Connection]:
    """Start vLLM's processes as the module says.

    The calling thread has to outlive them where they are spawned.

    Several threads may start engines at a time, one for each model or copy. Gives the connection that `first_failure`
    reads.

    Args:
        processors: The processors that the threads of workers are bound to. Empty: vLLM chooses among all.
        spawned: Do not fork them, even with a fork server: vLLM binds a process to a NUMA node when it is spawned.
    """
    _remove_shared_memory(())  # A start that failed may have left some.
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        _this_thread.report, _this_thread.processors, _this_thread.spawned = writer, processors, spawned
        try:
            yield reader
        finally:
            _this_thread.report = None


def first_failure(reports: Connection) -> StartFailure | None:
    """Return the first failure that was reported, which is the cause of the others; None if none has come by now."""
    failure: StartFailure | None = reports.recv() if reports.poll() else None
    return failure


def end_processes(client: EngineCoreClient, seconds: float) -> None:
    """End the processes of a client of vLLM, and wait until they are gone and with them their memory on GPUs.

    Args:
        client: The client.
        seconds: The time until those that have not ended are killed.
    """
    engines = core_client.engine_process_ids(client)
    with contextlib.ExitStack() as stack:
        ends = _ends_of_groups(set(engines))
        for end in ends:
            stack.callback(os.close, end)
        core_client.end_processes(client, seconds)
        for engine in engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine, signal.SIGKILL)
        deadline = time.monotonic() + _EXIT_SECONDS
        for end in ends:
            if not wait([end], max(deadline - time.monotonic(), 0.0)):
                logger.warning("a process of vLLM has not ended %g s after it was killed", _EXIT_SECONDS)
    _remove_shared_memory(engines)


def _server_name() -> str:
    """Return a name that no other server has. It begins the names of the shared memory of vLLM's processes."""
    return Path(envs.VLLM_RPC_BASE_PATH).name


def _name_shared_memory() -> None:
    """Name the shared memory and the semaphores that this process makes after its group (`_remove_shared_memory`)."""
    prefix = f"/{_server_name()}-{os.getpgrp()}-"
    own: Any = shared_memory
    own._SHM_NAME_PREFIX, own._SHM_SAFE_NAME_LENGTH = prefix, len(prefix) + 8
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = prefix + "mp"


def _remove_shared_memory(ended: Collection[int]) -> None:
    """Remove the shared memory of process groups that have ended. A process that is killed leaves its own.

    Args:
        ended: Groups that are known to have ended. The others are looked for.
    """
    for kind, prefix in (("shared_memory", ""), ("semaphore", _SEMAPHORE)):
        begin = f"{prefix}{_server_name()}-"
        for file in _SHARED_MEMORY.glob(f"{begin}*"):
            group = file.name.removeprefix(begin).partition("-")[0]
            if group.isdecimal() and (int(group) in ended or not _exists(int(group))):
                file.unlink(missing_ok=True)
                # multiprocessing would look for it when the server ends.
                resource_tracker.unregister("/" + file.name.removeprefix(prefix), kind)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _ends_of_groups(groups: Collection[int]) -> list[int]:
    """Return a descriptor for each process of these process groups. It is readable when the process has ended."""
    found: list[int] = []
    for process in _of_groups(groups):
        with contextlib.suppress(OSError):  # It has ended, or all descriptors are taken.
            found.append(os.pidfd_open(process))
    return found


def _of_groups(groups: Collection[int]) -> list[int]:
    """Return the processes of these process groups."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # It has ended.
            if os.getpgid(int(name)) in groups:
                found.append(int(name))
    return found


def worker_processes(client: EngineCoreClient) -> dict[psutil.Process, str]:
    """Return the workers of an engine, and their titles. Ray's engine has none here."""
    engines = core_client.engine_process_ids(client)
    found = {}
    for number in _of_groups(engines) if engines else []:
        with contextlib.suppress(psutil.Error):  # It has ended.
            if (title := (process := psutil.Process(number)).name()).startswith(_WORKER):
                found[process] = title
    return found


def ended_workers(workers: Mapping[psutil.Process, str]) -> str:
    """Return which workers have ended, for people. Only the engine's process learns their exit codes."""
    ended = (f"process {worker.pid} ({title}) has ended" for worker, title in workers.items() if _has_ended(worker))
    return "; ".join(ended)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def use_fork_server() -> None:
    """Have vLLM fork its processes from the fork server, and look at model classes there too."""
    processes.patch_server(_server_context, _in_fork_server)


def _server_context() -> BaseContext:
    report: Connection | None = getattr(_this_thread, "report", None)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of the server would share its sockets
    context = processes.default_context()
    if report is None:
        return context
    if not _this_thread.spawned:
        context = fork_server.context() or context
    return tied(context, partial(prepare_engine, processors=_this_thread.processors), report)


def prepare_engine(report: Connection, processors: Collection[int] = ()) -> None:
    """Prepare the engine process, or the coordinator of data-parallel ranks, before vLLM's function runs there."""
    os.setpgid(0, 0)
    if processors:
        processes.use_processors(processors)

    def context() -> BaseContext:
        if not fork_server.is_forked():
            return tied(processes.default_context(), prepare_worker, report)
        fork_server.start_no_other()
        return tied(multiprocessing.get_context("forkserver"), prepare_worker, report)

    processes.patch_engine_process(context, _end_workers, _meeting_place)
    grammars.patch_grammars(advance)
    if current_platform.is_cpu():
        processes.patch_waiting(Pause())


def _end_workers(workers: Sequence[BaseProcess]) -> None:
    """Wait for the workers' end, as vLLM does; if one has died, kill the others first.

    They wait for it, and end only after the engine process has waited for them for 8 seconds. It reports nothing until
    then.
    """
    if any(worker.exitcode for worker in workers):
        for worker in workers:
            worker.kill()
    processes.await_workers(workers)


def _meeting_place() -> str:
    """Return the file where workers find each other. vLLM's own stays in /tmp; this one goes with vLLM's sockets."""
    return f"file://{envs.VLLM_RPC_BASE_PATH}/workers-{uuid.uuid4().hex}"


def prepare_worker(report: Connection) -> None:
    """Prepare a worker of the engine process, whose function keeps failures to the log."""
    if fork_server.is_forked():
        _end_with_engine()
    if current_platform.is_cpu():
        processes.patch_token_ranks(token_ranks)
        processes.patch_waiting(Pause())

    def reporting(start: Callable[..., None]) -> Callable[..., None]:
        def reporting_start(*arguments: Any, **options: Any) -> None:
            with _reporting_failure(report):
                start(*arguments, **options)

        return reporting_start

    processes.patch_worker(reporting, usage_without_page_cache)


def _in_fork_server(function: Callable[[], Any]) -> Any:
    """Call `function` in a new process: vLLM looks at model classes, which may initialize CUDA."""
    context = fork_server.context()
    if context is None:
        return processes.run_in_subprocess(function)
    import cloudpickle

    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_call, dict(os.environ), cloudpickle.dumps(function)).result()


def _call(environment: Mapping[str, str], pickled: bytes) -> Any:
    fork_server.apply_environment(environment)
    load_general_plugins()
    return pickle.loads(pickled)()


@contextlib.contextmanager
def _reporting_failure(report: Connection) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # it had started before, so nothing reads it
            report.send(failure_of(error))
        raise


def _end_with_parent() -> None:
    fork_server.end_with_parent()
    if fork_server.is_forked():
        from engines.vllm.processes import preload

        expected: int | None = preload.PROCESS
    else:
        starter = multiprocessing.parent_process()
        expected = None if starter is None else starter.pid
    if os.getppid() != expected:  # it had ended before the kernel was asked
        os._exit(1)


def _end_with_engine() -> None:
    """End a worker with the engine process, which is not its parent if the fork server is."""
    engine = multiprocessing.parent_process()
    assert engine is not None
    assert engine.pid is not None
    os.setpgid(0, engine.pid)  # as a spawned worker; `end_processes` ends the whole group

    def wait() -> None:
        engine.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="engine-watch", daemon=True).start()
