"""Programs that begin with their modules imported: they are forked from a process that has imported them.

An import of vLLM takes ten seconds of processor time. Each server needs such an import, and the server's fork server
needs another import. A live run starts about fifty servers, and ten programs that use vLLM or transformers without
Slipway. `start` forks a program together with a spare process, which becomes the program's fork server. After the fork,
the program runs as if it had been started by `python -m`.

Two kinds of servers are started in the same way as users start them: servers whose environment changes the imports, and
servers in the tests of starts (`tests.live.server.Server.forked`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from container.gpus import gpu_count

_MODULES = (
    "slipway.cli",
    "container.server",
    "handlers.entry_point",
    "handlers.openai.vllm.app",
    "engines.vllm.engine",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.coordinator",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
_FREE = (
    *("SERVING_", "OPTION_", "AWS_", "SAGEMAKER_", "TMPDIR"),
    *("VLLM_API_KEY", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_RESPONSES_API_STORE"),
    *("HF_MODEL_ID", "MAX_BEST_OF", "MAX_INPUT_LENGTH", "MAX_TOTAL_TOKENS", "MESSAGES_API_ENABLED", "SM_NUM_GPUS"),
    *("LORA_ADAPTERS", "OTEL_BSP_", "OTEL_EXPORTER_", "PERMITTED_STEPS", "RECORDED", "TORCHINDUCTOR_CACHE_DIR"),
)
"""The beginnings of variables' names. `can_start` allows new values of these variables.

Some of these variables are read by no import. For the others, `_serve` applies the new values.

An import does read TORCHINDUCTOR_CACHE_DIR, but this is only the place of compiled code.
"""
_PROGRAM_SECONDS = 400.0
_OWN = {"OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": ""}  # OpenBLAS starts no threads: a fork would lose them.
_MOST_BYTES = 1 << 20  # The maximum size of a message.
_FORK_SERVER = "multiprocessing.forkserver"


class ForkedProgram:
    """A forked program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, source: _Source, pid: int) -> None:
        self.pid = pid
        self._source = source

    @property
    def returncode(self) -> int | None:
        return self._source.codes.get(self.pid)

    def poll(self) -> int | None:
        self._source.read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Source:
    """The tests' end of the connection to the process that forks programs."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}  # Exit codes by process id.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reading = threading.Lock()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-c", f"from tests.live.preloaded import run; run({theirs.fileno()})"]
            self._process = subprocess.Popen(
                command, env=_environment_of_imports() | _OWN, pass_fds=[theirs.fileno()], start_new_session=True
            )

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProgram:
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        with self._reading:
            socket.send_fds(self._socket, [json.dumps(order | {"directory": os.getcwd()}).encode()], [log])
            while "forked" not in (answer := self._receive()):
                self._note(answer)
        self.codes.pop(pid := answer["forked"], None)
        return ForkedProgram(self, pid)

    def read(self) -> None:
        """Read the exit codes that have arrived."""
        with self._reading:
            while select.select([self._socket], [], [], 0)[0]:
                self._note(self._receive())

    def _receive(self) -> dict[str, int]:
        message = self._socket.recv(_MOST_BYTES)
        assert message, "the process that forks servers has ended"
        answer: dict[str, int] = json.loads(message)
        return answer

    def _note(self, answer: dict[str, int]) -> None:
        self.codes[answer["ended"]] = answer["code"]


_source: _Source | None = None


def can_start(environment: Mapping[str, str]) -> bool:
    """Compare an environment with the environment of the imports. Return True if only variables in `_FREE` differ."""
    imported = _environment_of_imports()
    names = imported.keys() | environment.keys()
    return all(name.startswith(_FREE) for name in names if imported.get(name) != environment.get(name))


def _environment_of_imports() -> dict[str, str]:
    return plain_environment() | {"HF_HUB_OFFLINE": "1"}


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
) -> ForkedProgram | subprocess.Popen[bytes]:
    """Start `python -m module` in a new session.

    On a machine with a GPU nothing is forked: the modules of vLLM's worker access the GPU when they are imported.

    Args:
        module: The name of the module.
        arguments: The arguments after the module.
        environment: All variables.
        log: The descriptor of the file for its output.
    """
    if gpu_count():
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
    global _source
    if _source is None:
        _source = _Source()
    return _source.start(module, arguments, environment, log)


def result_of(module: str, order: Any, **variables: str) -> Any:
    """Run a program that answers an order (`answer_order`), and return its result.

    Args:
        module: The program.
        order: Its order, as JSON takes it.
        variables: Variables that no import reads.
    """
    with tempfile.TemporaryDirectory(prefix="slipway-test-") as name:
        directory = Path(name)
        (directory / "order").write_text(json.dumps(order))
        with (directory / "log").open("wb") as log:
            program = start(module, [name], _environment_of_imports() | variables, log.fileno())
        try:
            code = program.wait(_PROGRAM_SECONDS)
        finally:
            program.kill()
        written = (directory / "log").read_text(errors="replace")
        assert code == 0, written[-4000:]
        assert "processes are not forked" not in written, written  # Each would import vLLM.
        return json.loads((directory / "result").read_text())


def answer_order(answer: Callable[[Any], Any]) -> None:
    """Run a program: read its order from the directory in its argument, and write the result there."""
    directory = Path(sys.argv[1])
    (directory / "result").write_text(json.dumps(answer(json.loads((directory / "order").read_text()))))


@cache
def plain_environment() -> dict[str, str]:
    """Return this process's environment as it was at the first call, without pytest's variables.

    Later, an import of vLLM sets variables that a user does not set.
    """
    left_out = ("PYTEST_", "VLLM_WORKER_MULTIPROC_METHOD")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


# The process that forks.


def run(control: int) -> None:
    """Import the modules, and fork a program for each order."""
    orders = socket.socket(fileno=control)
    _import()
    children: set[int] = set()
    while True:
        if select.select([orders], [], [], 0.05)[0]:
            message, (*files,), _, _ = socket.recv_fds(orders, _MOST_BYTES, 1)
            if not message:
                return
            order = json.loads(message)
            if not (pid := os.fork()):
                orders.close()
                _serve(order, files[0])
                return  # The interpreter then ends in the same way as after `python -m`.
            os.close(files[0])
            children.add(pid)
            orders.send(json.dumps({"forked": pid}).encode())
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                with contextlib.suppress(BrokenPipeError):
                    orders.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _import() -> None:
    gc.disable()
    torch = importlib.import_module("torch")
    for library in sorted((Path(str(torch.__file__)).parents[1] / "torch.libs").glob("libgomp*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # Like the fork server (engines.vllm.processes.preload).
    for name in _MODULES:
        importlib.import_module(name)
    # setproctitle's first call finds the room for titles, next to the environment that the process was started with.
    importlib.import_module("setproctitle").getproctitle()
    gc.freeze()
    gc.enable()


def _serve(order: dict[str, Any], log: int) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    tempfile.tempdir = None  # It was set by the first import that asked for it.
    _keep_a_fork_server()
    _configure_vllms_logs_later()
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _keep_a_fork_server() -> None:
    """Fork the process that becomes the server's fork server, while no other thread runs in this process."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    if not (spare := os.fork()):
        orders.close()
        _become_fork_server(theirs, server)
    theirs.close()
    spawn, unused = util.spawnv_passfds, [spare]

    def start_process(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if _FORK_SERVER not in str(arguments[-1]) or not unused:
            return int(spawn(path, arguments, descriptors))
        passed = [*descriptors, 1, 2]  # The server may have replaced its output since the fork.
        order = {"command": arguments[-1], "descriptors": passed, "environment": dict(os.environ)}
        socket.send_fds(orders, [json.dumps(order).encode()], passed)
        orders.close()
        return unused.pop()

    util.spawnv_passfds = start_process


def _become_fork_server(orders: socket.socket, server: int) -> NoReturn:
    from engines.vllm.processes.fork_server import end_with_parent

    end_with_parent()
    if os.getppid() != server:
        os._exit(0)
    message, received, _, _ = socket.recv_fds(orders, _MOST_BYTES, 8)
    if not message:
        os._exit(0)
    order = json.loads(message)
    # The command has the numbers of the descriptors. All descriptors first get higher numbers, so that none is
    # overwritten.
    wanted = order["descriptors"]
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(wanted) + 1) for descriptor in received]
    for descriptor in (*received, orders.detach()):
        os.close(descriptor)
    for descriptor, number in zip(moved, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    _configure_vllms_logs()
    try:
        exec(order["command"], {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _configure_vllms_logs_later() -> None:
    """Have vLLM configure its logs once the server has set their configuration. vLLM itself configures them at its
    import.
    """
    from container.observability import logs

    configure = logs.configure_vllm

    def configured(*arguments: Any) -> None:
        configure(*arguments)
        _configure_vllms_logs()

    logs.configure_vllm = configured


def _configure_vllms_logs() -> None:
    from vllm import logger

    logger._configure_vllm_root_logger()
