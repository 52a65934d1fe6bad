"""The container as a child process: started on a port of its own, told to stop with us, watched."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence

import httpx

_CONNECT_SECONDS, _WRITE_SECONDS, _POOL_SECONDS = 5.0, 60.0, 5.0
_IDLE_SECONDS = 4.0
"""Less than what servers commonly keep an idle connection for (uvicorn: 5), so that we end it, not they."""


class ContainerUnreachable(Exception):
    """No connection could be opened; the container has seen nothing of the call."""


class ContainerBroken(Exception):
    """The connection ended before the answer was complete."""


class ContainerBusy(Exception):
    """All connections are in use."""


class ContainerClient:
    """Connections to one container."""

    def __init__(self, base_url: str, max_connections: int) -> None:
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS, write=_WRITE_SECONDS, pool=_POOL_SECONDS),
            limits=httpx.Limits(max_connections=max_connections, keepalive_expiry=_IDLE_SECONDS),
            follow_redirects=False,
            trust_env=False,
        )
        # The container gets the headers that it would get on the platform, not those of this client.
        for name in ("accept", "accept-encoding", "user-agent"):
            del self._http.headers[name]

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> AsyncIterator[httpx.Response]:
        """The container's reply, its body still unread. Leaving early closes the connection, which ends generation.

        `target`: path and query.

        Raises:
            ContainerUnreachable, ContainerBroken, ContainerBusy: also from within the block, while the body is read.
        """
        # Text that is not ASCII is what httpx would refuse; HTTP has it as the bytes that came.
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        try:
            async with self._http.stream(method, target, headers=raw, content=body) as response:
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ContainerUnreachable(str(error)) from error
        except httpx.PoolTimeout as error:
            raise ContainerBusy from error
        except httpx.TransportError as error:
            raise ContainerBroken(str(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


async def read_up_to(response: httpx.Response, limit: int) -> bytes | None:
    """The whole body, or None if it has more than `limit` bytes."""
    pieces, size = [], 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > limit:
            return None
        pieces.append(piece)
    return b"".join(pieces)


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
