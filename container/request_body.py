"""A request's body: whole, of bounded size, and not waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from container.models import Models
from container.push import Message
from container.settings import ServerSettings
from handlers.errors import BodyTimeout, BodyTooLarge, NotReady

Receive = Callable[[], Awaitable[Message]]


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, settings: ServerSettings, models: Models
) -> bytes | None:
    """The whole body, or None if the client went away while sending it.

    Raises:
        BodyTooLarge: there is more of it than `max_request_size`, in bytes.
        BodyTimeout: nothing of it came for `request_read_timeout`, in seconds.
        NotReady: the server ends, and does not wait for the rest.
    """
    announced, limit = headers.get(b"content-length", b""), settings.max_request_size
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    seconds = settings.request_read_timeout
    try:
        async with asyncio.timeout(seconds) as patience:
            models.reading.add(patience)
            try:
                return await _pieces(receive, limit, patience, seconds)
            finally:
                models.reading.discard(patience)
    except TimeoutError:
        if models.draining:
            raise NotReady("the server is stopping") from None
        message = f"nothing of the body's rest has come for {seconds:g} s (request_read_timeout)"
        raise BodyTimeout(message) from None


async def _pieces(receive: Receive, limit: int, patience: asyncio.Timeout, seconds: float) -> bytes | None:
    message = await receive()
    parts, size = [], 0
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(parts)
        patience.reschedule(asyncio.get_running_loop().time() + seconds)
        message = await receive()
    return None


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (max_request_size)")
