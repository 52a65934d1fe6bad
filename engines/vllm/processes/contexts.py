"""Starts vLLM's processes, ends them together with the server, and reports errors of their start.

vLLM starts its processes with the multiprocessing context that `get_mp_context` returns. The server starts the engine
process, and the coordinator if there are several data-parallel ranks. The engine process starts its workers. Slipway's
contexts make each process run a function first (`_Tied`).

Start: if possible, the processes are forked from a process that has imported vLLM (`fork_server`). A forked process
inherits the fork server's old environment. So Slipway sets the current environment in the process. Some variables have
an effect only when a library is loaded. The process repeats these effects (`fork_server.apply_environment`).

End: when the server's main thread ends for any reason, the kernel kills the fork server. When the fork server ends, the
kernel kills the forked processes. A spawned process ends with the thread that started it. vLLM's own mechanism is not
enough: its workers notice the end of the engine process only between two steps, and a suspended process notices
nothing. If a worker has died, the workers that wait for it are killed, so that the engine process reports the death at
once.
tests/live/test_health_live.py kills a server and checks that no process is left.

Workers elsewhere: the engine process reports the workers that run in Ray or on other machines (`elsewhere`).

Failures: vLLM only logs the errors of its processes. With this module, the processes also report their errors to the
server. The engine process reports an error of the vLLM function that runs in the process. Each worker reports an error
of `WorkerProc()`.
tests/live/test_management_live.py makes an engine run out of memory.

Each engine process has its own process group. Ctrl-C in a terminal goes to a whole group, and would otherwise end the
engine while the server finishes its requests. tests/live/test_process_live.py checks that. All groups stay in the
server's session, because Linux first divides processor time between sessions (sched(7), autogroup). With a separate
session for the engine, the throughput of one-token requests on two cores fell to a fifth (`python -m benchmarks`).
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
from vllm.v1.executor.abstract import Executor

from engines import stacks
from engines.start_failure import StartFailure, failure_of
from engines.vllm.copies import core_client
from engines.vllm.copies.continuation import advance
from engines.vllm.patches import grammars, processes
from engines.vllm.processes import fork_server
from engines.vllm.processes.cpu import Pause, token_ranks, usage_without_page_cache
from engines.vllm.processes.elsewhere import workers_elsewhere

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_ERRORS = 2  # The descriptor of the standard error.
_WORKER = "VLLM::Worker"  # The beginning of a worker's title.
_SEMAPHORE = "sem."  # The beginning of a semaphore's file name.
_EXIT_SECONDS = 10.0  # A killed process first frees its GPU memory, which may take seconds.


class _Tied:
    """The main function of a process. It sets the environment, and then runs `prepare` and `function`."""

    def __init__(
        self, function: Callable[..., None], prepare: Callable[[Connection], None], report: Connection
    ) -> None:
        self._function, self._prepare, self._report = function, prepare, report
        self._environment: Mapping[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Just before `Process.start` pickles this object, vLLM sets environment variables for the new process alone. So
        # they are copied here.
        return vars(self) | {"_environment": dict(os.environ)}

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if fork_server.is_forked():
            fork_server.apply_environment(self._environment)
        _end_with_parent()
        faulthandler.enable(_ERRORS)  # If the process crashes, its stacks go to the log.
        stacks.register()
        self._prepare(self._report)
        _name_shared_memory()
        with _reporting_failure(self._report):
            self._function(*arguments, **options)


def tied(
    context: BaseContext,
    prepare: Callable[[Connection], None],
    report: Connection,
    started: list[BaseProcess] | None = None,
) -> BaseContext:
    """Return a context whose processes run `prepare` first, end with their parent, and report failures.

    Args:
        started: The processes are added to this list.
    """

    def process(*, target: Callable[..., None], **options: Any) -> BaseProcess:
        made: BaseProcess = context.Process(target=_Tied(target, prepare, report), **options)  # type: ignore[attr-defined]
        if started is not None:
            started.append(made)
        return made

    own = copy.copy(context)
    setattr(own, "Process", process)  # noqa: B010
    return own


_this_thread = threading.local()


@contextlib.contextmanager
def tied_to_this_thread(
    processors: Collection[int] = (), *, spawned: bool = False, started: list[BaseProcess] | None = None
) -> Iterator[Connection]:
    """Make vLLM start its processes as the module describes, in the `with` block.

    Yields the connection for `first_failure` and `told_elsewhere`.

    Several threads may start engines at the same time, one for each model or copy. If processes are spawned, the
    calling thread must outlive them.

    Args:
        processors: The processors to which the threads of workers are bound. Empty: vLLM chooses.
        spawned: Whether to spawn the processes even if there is a fork server. vLLM binds only spawned processes to
            NUMA nodes.
        started: The processes are added to this list, for `kill_started`.
    """
    _remove_shared_memory(())  # A failed start may have left shared memory.
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        _this_thread.report, _this_thread.processors, _this_thread.spawned = writer, processors, spawned
        _this_thread.started = started
        try:
            yield reader
        finally:
            _this_thread.report = None


def first_failure(reports: Connection) -> StartFailure | None:
    """Return the first reported failure, which is the cause of the others; None if nothing was reported yet."""
    while reports.poll():
        if isinstance(report := reports.recv(), StartFailure):
            return report
    return None


def told_elsewhere(reports: Connection) -> tuple[str, ...]:
    """Return the engine processes' reports of workers that run in Ray or on other machines.

    Call it when the engine has started.
    """
    found: list[str] = []
    while reports.poll():
        if isinstance(report := reports.recv(), str):
            found.append(report)
    return tuple(found)


def kill_started(started: Collection[BaseProcess]) -> None:
    """Kill processes that still load the model, and their workers. The load then fails.

    vLLM could end the processes only after the load.
    """
    for process in started:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # At first, the process has no group of its own.
                os.killpg(process.pid, signal.SIGKILL)


def end_processes(client: EngineCoreClient, seconds: float) -> None:
    """End the processes of vLLM's client, and wait until they have ended and have freed their GPU memory.

    Args:
        client: The client.
        seconds: The time after which processes that still run are killed.
    """
    engines = core_client.engine_process_ids(client)
    with contextlib.ExitStack() as stack:
        ends = _ends_of_groups(set(engines))
        for end in ends:
            stack.callback(os.close, end)
        client.shutdown(seconds)
        for engine in engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine, signal.SIGKILL)
        deadline = time.monotonic() + _EXIT_SECONDS
        for end in ends:
            if not wait([end], max(deadline - time.monotonic(), 0.0)):
                logger.warning("a process of vLLM has not ended %g s after it was killed", _EXIT_SECONDS)
    _remove_shared_memory(engines)


def _server_name() -> str:
    """Return a name that is unique to this server. The names of vLLM's shared memory begin with it."""
    return Path(envs.VLLM_RPC_BASE_PATH).name


def _name_shared_memory() -> None:
    """Name this process's shared memory and semaphores after its process group, for `_remove_shared_memory`."""
    prefix = f"/{_server_name()}-{os.getpgrp()}-"
    own: Any = shared_memory
    own._SHM_NAME_PREFIX, own._SHM_SAFE_NAME_LENGTH = prefix, len(prefix) + 8
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = prefix + "mp"


def _remove_shared_memory(ended: Collection[int]) -> None:
    """Remove the shared memory of process groups that have ended. A killed process leaves its shared memory behind.

    Args:
        ended: Groups that have ended. The shared memory of any other group is removed if this group no longer exists.
    """
    for kind, prefix in (("shared_memory", ""), ("semaphore", _SEMAPHORE)):
        begin = f"{prefix}{_server_name()}-"
        for file in _SHARED_MEMORY.glob(f"{begin}*"):
            group = file.name.removeprefix(begin).partition("-")[0]
            if group.isdecimal() and (int(group) in ended or not _exists(int(group))):
                file.unlink(missing_ok=True)
                # Otherwise multiprocessing would look for the file when the server ends.
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
    """Return a descriptor for each process in these process groups. It becomes readable when the process ends."""
    found: list[int] = []
    for process in _of_groups(groups):
        with contextlib.suppress(OSError):  # The process has ended, or no descriptor is free.
            found.append(os.pidfd_open(process))
    return found


def _of_groups(groups: Collection[int]) -> list[int]:
    """Return the ids of the processes in these process groups."""
    found: list[int] = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # The process has ended.
            if os.getpgid(int(name)) in groups:
                found.append(int(name))
    return found


def worker_processes(client: EngineCoreClient) -> dict[psutil.Process, str]:
    """Return the workers of an engine with their titles. Empty if Ray runs the engine."""
    engines = core_client.engine_process_ids(client)
    found = {}
    for number in _of_groups(engines) if engines else []:
        with contextlib.suppress(psutil.Error):  # The process has ended.
            if (title := (process := psutil.Process(number)).name()).startswith(_WORKER):
                found[process] = title
    return found


def ended_workers(workers: Mapping[psutil.Process, str]) -> str:
    """Name the workers that have ended, in a text for people.

    The text has no exit codes, because only the engine process gets them.
    """
    ended = (f"process {worker.pid} ({title}) has ended" for worker, title in workers.items() if _has_ended(worker))
    return "; ".join(ended)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def use_fork_server() -> None:
    """Make vLLM fork its processes from the fork server, and inspect model classes in a forked process."""
    processes.patch_server(_server_context, _in_fork_server)


def _server_context() -> BaseContext:
    report: Connection | None = getattr(_this_thread, "report", None)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # A fork of the server would share its sockets.
    context = processes.default_context()
    if report is None:
        return context
    if not _this_thread.spawned:
        context = fork_server.context() or context
    prepare = partial(prepare_engine, processors=_this_thread.processors)
    return tied(context, prepare, report, _this_thread.started)


def prepare_engine(report: Connection, processors: Collection[int] = ()) -> None:
    """Prepare the engine process, or the coordinator of data-parallel ranks, before it runs vLLM's function."""
    os.setpgid(0, 0)
    if processors:
        processes.use_processors(processors)

    def context() -> BaseContext:
        if not fork_server.is_forked():
            return tied(processes.default_context(), prepare_worker, report)
        fork_server.start_no_other()
        return tied(multiprocessing.get_context("forkserver"), prepare_worker, report)

    def tell(executor: Executor) -> None:
        try:
            if found := workers_elsewhere(executor):
                report.send(found)
        except Exception:  # The engine still serves.
            logger.exception("the server does not learn which workers run elsewhere")

    processes.patch_engine_process(context, _end_workers, _meeting_place)
    processes.patch_executor(tell)
    grammars.patch_grammars(advance)
    if current_platform.is_cpu():
        processes.patch_waiting(Pause())


def _end_workers(workers: Sequence[BaseProcess]) -> None:
    """Wait for the end of the workers, as vLLM does. If one of them has died, kill the others first.

    The others wait for the dead worker. Without the kill, the engine process would wait 8 seconds for them before it
    reports the death.
    """
    if any(worker.exitcode for worker in workers):
        for worker in workers:
            worker.kill()
    processes.await_workers(workers)


def _meeting_place() -> str:
    """Return the URL of the file through which workers find each other. It is deleted together with vLLM's sockets."""
    return f"file://{envs.VLLM_RPC_BASE_PATH}/workers-{uuid.uuid4().hex}"


def prepare_worker(report: Connection) -> None:
    """Prepare a worker of the engine process. vLLM itself would only log the failure of a worker."""
    if fork_server.is_forked():
        _end_with_engine()
    if current_platform.is_cpu():
        processes.patch_token_ranks(token_ranks)
        processes.patch_waiting(Pause())

    processes.patch_worker(_reporting_failure(report), usage_without_page_cache)


def _in_fork_server(function: Callable[[], Any]) -> Any:
    """Call `function` in a new process, because it inspects vLLM's model classes, which may initialize CUDA."""
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
        with contextlib.suppress(OSError):  # The process had already started, so nobody reads the report.
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
    if os.getppid() != expected:  # The parent ended before the kernel was told to watch it.
        os._exit(1)


def _end_with_engine() -> None:
    """End a worker together with the engine process. The worker's parent is the fork server."""
    engine = multiprocessing.parent_process()
    assert engine is not None
    assert engine.pid is not None
    try:
        os.setpgid(0, engine.pid)  # Like a spawned worker. `end_processes` ends the whole group.
    except PermissionError:  # There is no such group: the engine was killed before.
        os._exit(1)

    def wait() -> None:
        engine.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="engine-watch", daemon=True).start()
