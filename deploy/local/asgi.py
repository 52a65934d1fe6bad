"""ASGI for the routes of the local endpoint: bounded bodies, whole replies, clients that leave or stand still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any

from container.request_body import bounded_body
from container.settings import ServerSettings
from deploy.local.errors import payload_timed_out, payload_too_large
from deploy.local.parameters import Headers

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


READ_SECONDS = ServerSettings().request_read_timeout
"""That a client may send nothing in the middle of a body: as many as a container allows."""


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """A request's whole body.

    Raises:
        RuntimeApiError: ValidationError with status 413, it has more than `limit` bytes; with 408, it does not go on.
        ClientGone: the client went away while it sent it.
    """
    body = await bounded_body(headers, receive, limit, READ_SECONDS, payload_too_large, payload_timed_out)
    if body is None:
        raise ClientGone
    return body


async def unless_gone(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """Run `answering` to its end, or cancel it as soon as the client has left."""
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(_closed(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        finished = answer.done()
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    if finished:
        answer.result()


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a reply with its length."""
    framing = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [framing, *headers]})
    await send({"type": "http.response.body", "body": body})
