"""Replies to clients of HTTP/1.0, which knows no chunks: without a length, a reply ends with its connection.

Source: RFC 9112 sections 6.1 and 6.3. uvicorn sends chunks to any client, and closes the connection of one of HTTP/1.0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Application = Callable[[Any, Any, Any], Awaitable[None]]

_CHUNKS_SINCE = "1.1"


def knows_chunks(scope: Any) -> bool:
    """Whether the request's version of HTTP has them."""
    version: str = scope["http_version"]
    return version >= _CHUNKS_SINCE


def until_closed(cycle: RequestResponseCycle, application: Application) -> Application:
    """An application whose replies without a length go out as they are, and end with the connection."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        framed = True

        async def send_plain(message: Any) -> None:
            nonlocal framed
            if message["type"] == "http.response.start":
                framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not framed:
                    cycle.chunked_encoding = False
            elif not framed:
                # uvicorn has a reply be of exactly the length that was announced.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await application(scope, receive, send_plain)

    return serve
