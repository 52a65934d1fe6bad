"""A request's body: whole, of bounded size, and not waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from container.models import Models
from container.settings import ServerSettings
from handlers.errors import BodyTimeout, BodyTooLarge, NotReady

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, settings: ServerSettings, models: Models
) -> bytes | None:
    """The whole body, or None if the client went away while sending it.

    Raises:
        BodyTooLarge: there is more of it than `max_request_size`, in bytes.
        BodyTimeout: nothing of it came for `request_read_timeout`, in seconds.
        NotReady: the server ends, and does not wait for the rest.
    """
    limit, seconds = settings.max_request_size, settings.request_read_timeout
    try:
        return await bounded_body(headers, receive, limit, seconds, _too_large, _too_slow, models.reading)
    except BodyTimeout:
        if models.draining:
            raise NotReady("the server is stopping") from None
        raise


async def bounded_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    limit: int,
    seconds: float,
    too_large: Callable[[int], Exception],
    too_slow: Callable[[float], Exception],
    reading: set[asyncio.Timeout] | None = None,
) -> bytes | None:
    """The same for any server; what ends the wait is in `reading` meanwhile.

    Raises:
        Exception: what `too_large` makes of `limit`, in bytes, where there is more of it, or `too_slow` of `seconds`,
            where nothing of it came for so long, or the wait was ended.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise too_large(limit)
    waits = set() if reading is None else reading
    try:
        async with asyncio.timeout(seconds) as patience:
            waits.add(patience)
            try:
                return await _pieces(receive, limit, patience, seconds, too_large)
            finally:
                waits.discard(patience)
    except TimeoutError:
        raise too_slow(seconds) from None


async def _pieces(
    receive: Receive, limit: int, patience: asyncio.Timeout, seconds: float, too_large: Callable[[int], Exception]
) -> bytes | None:
    message = await receive()
    parts, size = [], 0
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)
        patience.reschedule(asyncio.get_running_loop().time() + seconds)
        message = await receive()
    return None


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (max_request_size)")


def _too_slow(seconds: float) -> BodyTimeout:
    return BodyTimeout(f"nothing of the body's rest has come for {seconds:g} s (request_read_timeout)")
