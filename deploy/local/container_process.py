"""The container as a child process: started on a port of its own, told to stop with us, watched."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

_LOOPBACK = "127.0.0.1"
_PARENT_DEATH_SIGNAL = 1
_WATCH_SECONDS = 0.1


class ContainerProcess:
    """`python -m container serve`, with this process's environment, save for the address."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: of `serve`, without address and port."""
        port = _free_port()
        self.url = f"http://{_LOOPBACK}:{port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "container", "serve", *arguments],
            env=_environment(port),
            # A session of its own: Ctrl-C reaches us alone, and the container once, through `stop`.
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )

    def stop(self) -> None:
        """Have it drain; a second time: have it end at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait for its end. A death by signal n gives 128 + n, as in a shell."""
        while self._process.poll() is None:
            await asyncio.sleep(_WATCH_SECONDS)
        code: int = self._process.returncode
        return code if code >= 0 else 128 - code


def _environment(port: int) -> dict[str, str]:
    """Ours, with the address in the variables: they go before a command line."""
    given = {name: value for name, value in os.environ.items() if name != "SAGEMAKER_BIND_TO_PORT"}
    return given | {"SERVING_HOST": _LOOPBACK, "SERVING_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with(parent: int) -> Callable[[], None]:
    """Have the kernel send SIGTERM to the child when its parent dies without a word."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return prepare
