"""The container behind the endpoints: connections to it, and its process where we start it."""

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
"""Shorter than servers commonly keep an idle connection (uvicorn: 5 s), so that it is closed from this side."""
_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.1


class ContainerUnreachable(Exception):
    """No connection could be opened; the container has not seen the call."""


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
        # The container gets the caller's headers, as on the platform, and none of httpx's.
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
        # As bytes: httpx would refuse text that is not ASCII.
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
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return None
    return b"".join(pieces)


class ContainerProcess:
    """`python -m container serve` as a child, on a free port, otherwise with this process's environment."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: of `serve`, without address and port."""
        port = _free_port()
        self.url = f"http://{_LOOPBACK}:{port}"
        # The address is in the variables because they take precedence over a command line.
        environment = {**os.environ, "SERVING_HOST": _LOOPBACK, "SERVING_PORT": str(port)}
        environment.pop("SAGEMAKER_BIND_TO_PORT", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "container", "serve", *arguments],
            env=environment,
            # A session of its own, so that Ctrl-C reaches the container only once, through `stop`.
            start_new_session=True,
            preexec_fn=_end_with(os.getpid()),
        )

    def stop(self) -> None:
        """Have it drain; when called again, have it end at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Wait for its end; returns its exit code, or 128 + n after a death by signal n, as in a shell."""
        while self._process.poll() is None:
            await asyncio.sleep(_WATCH_SECONDS)
        code: int = self._process.returncode
        return code if code >= 0 else 128 - code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with(parent: int) -> Callable[[], None]:
    """Have the kernel send SIGTERM to the child when its parent dies."""
    prctl = ctypes.CDLL(None).prctl  # before the fork, after which little may be done

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return prepare
