"""A worker's process: started in a group of its own, with a socket to talk over and pipes for what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import djl_python
from handlers.workers import runtime
from handlers.workers.log_relay import LogRelay

_TAIL_LINES = 20
_REAPINGS, _REAPING_SECONDS = 100, 0.02
_PIPE_PATIENCE = 0.5
"""Seconds that the rest of the output may take after the process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """How to start a worker."""

    python: str
    directory: Path
    environment: Mapping[str, str]


class WorkerProcess:
    """A started process; made by `spawn`."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, relays: list[LogRelay], tail: deque[str]
    ) -> None:
        self._process = process
        self._relays = relays
        self.socket = sock
        self.pid = process.pid
        self.tail = tail
        """The last lines that it printed."""

    @classmethod
    async def spawn(cls, plan: ProcessPlan, name: str) -> WorkerProcess:
        """Start a process.

        The event loop's own thread does it: the kernel ends a worker when the thread that started it ends.

        Raises:
            OSError: the interpreter cannot be run.
        """
        ours, theirs = socket.socketpair()
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        relays: list[LogRelay] = []
        writers: list[int] = []
        try:
            for _ in ("stdout", "stderr"):
                relay, writer = await _relay(name, tail)
                relays.append(relay)
                writers.append(writer)
            arguments = (_script(), str(theirs.fileno()), str(os.getpid()), _folder_of_sdk())
            process = await asyncio.create_subprocess_exec(
                *(plan.python, "-u", "-X", "faulthandler", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writers[0],
                stderr=writers[1],
                cwd=plan.directory,
                env=dict(plan.environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            _close(theirs, writers)
            for relay in relays:
                await relay.finish(_PIPE_PATIENCE)
            raise
        _close(theirs, writers)
        return cls(process, ours, relays, tail)

    async def wait(self) -> str:
        """Wait for the end; returns how it came about, as the end of a sentence."""
        code = await self._process.wait()
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it started and that stayed in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def reap_orphans(self) -> None:
        """Wait for what the ended process has left behind, which is ours where this is a container's first process.

        Nobody else would, and each would stay as a zombie. The group has been sent SIGKILL before.
        """
        with contextlib.suppress(ChildProcessError):  # there is nothing of ours
            for _ in range(_REAPINGS):
                if os.waitpid(-self.pid, os.WNOHANG)[0] == 0:  # noqa: ASYNC222 - it does not wait
                    await asyncio.sleep(_REAPING_SECONDS)

    async def finish_output(self) -> None:
        """Log what it printed last, and close the pipes."""
        for relay in self._relays:
            await relay.finish(_PIPE_PATIENCE)


async def _relay(name: str, tail: deque[str]) -> tuple[LogRelay, int]:
    relay = LogRelay(name, tail)
    reader, writer = os.pipe()
    await asyncio.get_running_loop().connect_read_pipe(lambda: relay, os.fdopen(reader, "rb", 0))
    return relay, writer


def _close(sock: socket.socket, descriptors: list[int]) -> None:
    sock.close()
    for descriptor in descriptors:
        os.close(descriptor)


def _script() -> str:
    return str(Path(runtime.__path__[0]) / "launch.py")


def _folder_of_sdk() -> str:
    return str(Path(djl_python.__path__[0]).absolute())
