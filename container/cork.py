"""One system call for all that is written to a connection in one turn of the event loop.

A reply's head and body are two writes, and an engine that is ahead of us brings several tokens for one client at a
time. uvloop hands each write to the kernel at once, and a write to a client on the same machine wakes it as well; so
writes are collected and go out when the event loop has run what was ready.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Cork:
    """The connections with something to send."""

    def __init__(self) -> None:
        self._waiting: list[CorkedTransport] = []

    def add(self, transport: CorkedTransport) -> None:
        """Have a connection flushed in this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.append(transport)

    def _flush_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


class CorkedTransport:
    """A transport whose writes wait for the end of the turn; everything else passes through."""

    def __init__(self, transport: asyncio.Transport, cork: Cork) -> None:
        self._transport = transport
        self._cork = cork
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Keep the data until the end of this turn."""
        if not self._pieces:
            self._cork.add(self)
        self._pieces.append(data)

    def flush(self) -> None:
        """Hand over what was written."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces = []
        if not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_CORK = Cork()
BREAK_OFF = "slipway.break_off"
"""In `scope["extensions"]`: what drops the connection at once, with all that waits in it."""


class CorkedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on a corked transport, with a limit on a request's head, which uvicorn does not have."""

    MAX_HEAD = 256 * 1024
    """Bytes of request line and headers."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head: int | None = None

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._head = 0
        super().on_message_begin()
        # ASGI has no way to break a connection off whose client does not take what was sent.
        self.scope["extensions"] = {BREAK_OFF: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > self.MAX_HEAD:
                self.send_400_response("Request header is too large.")

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(CorkedTransport(transport, _CORK))  # type: ignore[arg-type]
