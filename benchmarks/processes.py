"""Servers under measurement: each in a process group of its own, so that all of it can be stopped and accounted for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

ENGINE_PROCESSES = ("VLLM::EngineCore", "VLLM::Worker")
"""In the titles of vLLM's engine process and its workers, which are siblings where a fork server starts them."""
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 30


class ServerError(Exception):
    """A server did not start or died; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of user and system time since the processes started."""

    front_end: float
    """All processes but the engine's."""
    engine: float

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(self.front_end - earlier.front_end, self.engine - earlier.engine)


class Server:
    """A process and what it starts. Leaving the context ends them all."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str], *, pipes: bool = False
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Raises `ServerError` if the process ends first or takes longer."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.error(f"not ready after {timeout:g} s")
            time.sleep(0.2)

    def check_alive(self) -> None:
        if (status := self._process.poll()) is not None:
            raise self.error(f"ended with status {status}")

    def error(self, what: str) -> ServerError:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ServerError("\n".join([f"{self.name}: {what}; the end of its log:", *lines]))

    def cpu_time(self) -> CpuTime:
        with contextlib.suppress(psutil.NoSuchProcess):
            return _tree_cpu_time(psutil.Process(self._process.pid), engine=False)
        raise self.error("ended")

    def pause(self) -> None:
        """Keep all of it off the processors. vLLM's workers poll for a second after their last step."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """First ask, then make sure that nothing of the group is left."""
        self._signal_group(signal.SIGTERM)
        self.go_on()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _signal_all(self, number: int) -> None:
        """Also what has left the group, as Slipway's engine does."""
        self._signal_group(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _tree_cpu_time(process: psutil.Process, *, engine: bool) -> CpuTime:
    """Raises `psutil.NoSuchProcess` if the process is gone; children that end meanwhile are left out."""
    title = " ".join(process.cmdline())
    engine = engine or any(name in title for name in ENGINE_PROCESSES)
    times = process.cpu_times()
    used = times.user + times.system
    front_end, of_engine = (0.0, used) if engine else (used, 0.0)
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            below = _tree_cpu_time(child, engine=engine)
            front_end += below.front_end
            of_engine += below.engine
    return CpuTime(front_end, of_engine)


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
