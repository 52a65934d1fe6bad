"""The server's end of the connection to a worker."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

from handlers.workers.runtime.frames import Frame, FrameError, FrameReader, Kind, encode_frame


class FrameSink(Protocol):
    """Takes what a connection brings."""

    def on_frame(self, frame: Frame) -> None:
        """A frame has come."""

    def on_closed(self, problem: str) -> None:
        """Nothing more comes; `problem` says what was wrong with what came, if anything."""


class Connection(asyncio.Protocol):
    """Frames over a socket, without a task or a queue between."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @classmethod
    async def open(cls, sock: socket.socket, sink: FrameSink) -> Connection:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: cls(sink), sock=sock)
        return connection

    def send(self, kind: Kind, call: int = 0, body: bytes = b"") -> None:
        """Send a frame; dropped if the worker has gone, which the sink is told of."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(kind, call, body))

    def close(self) -> None:
        """Close it at once. A worker takes that as the end of the server, and ends."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._closed:
            return
        try:
            for frame in self._reader.feed(data):
                self._sink.on_frame(frame)
        except FrameError as error:
            self._end(f"sent something that is no frame: {error}")

    def eof_received(self) -> bool:
        """Called by the event loop. The other direction stays open, lest a worker that shuts down be cut short."""
        self._end("")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._end("")

    def _end(self, problem: str) -> None:
        if not self._closed:
            self._closed = True
            self._sink.on_closed(problem)
