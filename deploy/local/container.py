"""Connections to the container behind the endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import httpx

_CONNECT_SECONDS, _WRITE_SECONDS, _POOL_SECONDS = 30.0, 60.0, 5.0
_IDLE_SECONDS = 4.0
"""Shorter than servers commonly keep an idle connection (uvicorn: 5 s), so that it is closed from this side."""


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
