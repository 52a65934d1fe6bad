"""Extends uvicorn's HTTP protocol: limits, joined writes, HTTP/1.0, protocol offers, half-closed clients.

No other module touches uvicorn's internals. This module is tested with uvicorn 0.54.0. `check_uvicorn` refuses other
releases when the server starts. test_uvicorn_protocol.py fails if one of these names has moved:

- `HttpToolsProtocol`: the methods in `_OVERRIDDEN`, which are overridden or called below; and the fields `cycle`,
  `pipeline`, `scope`, `headers`, `url`, `parser`, `flow` and `timeout_keep_alive_task`. `scope` contains a method once
  the head is complete.
- `RequestResponseCycle`: `flow`, `transport`, `chunked_encoding`, `expected_content_length`, `response_started`,
  `response_complete`, `body`, `more_body`, `disconnected`, `message_event` and `waiting_for_100_continue`. Its `send`
  waits only while writing is paused.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

UVICORN = "0.54."  # The supported versions of uvicorn begin with this.
# The key of a function in `scope["extensions"]`. The function closes the connection at once and drops all unsent data.
BREAK_OFF = "slipway.break_off"

_TCP_CLOSE = 7  # If the first byte of TCP_INFO has this value, the TCP connection was reset.
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO = b"0"  # A leading zero of the next chunk's size, which clients ignore.
# The calls of `_look_for_client` that send a probe, counted from 0. A proxy may accept the first probe before it
# notices that the client has left.
_LOOKS_WITH_PROBE = (0, 3)

_OVERRIDDEN = (
    *("on_headers_complete", "on_body", "on_response_complete", "_should_upgrade", "_start_asgi_task"),
    *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing"),
    *("send_400_response", "shutdown", "_unset_keepalive_if_required", "timeout_keep_alive_handler"),
)


def check_uvicorn() -> None:
    """Refuse to serve with a uvicorn whose internals may have moved.

    Raises:
        RuntimeError: uvicorn has another version, or a method is missing.
    """
    if not uvicorn.__version__.startswith(UVICORN):
        raise RuntimeError(f"Slipway needs uvicorn {UVICORN}x, and uvicorn {uvicorn.__version__} is installed")
    if missing := [name for name in _OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]:
        raise RuntimeError(f"this uvicorn is not one that Slipway knows: it has no {', '.join(missing)}")


# The transports of one server that have unflushed writes. `_flush_all` flushes them at the end of the turn.
Cork = list["CorkedTransport"]


def _flush_all(cork: Cork) -> None:
    waiting = cork.copy()
    cork.clear()
    for transport in waiting:
        transport.flush()


class CorkedTransport:
    """A transport that joins the writes of one turn of the event loop.

    If the client may still be sending, `close` closes only the server's side. The connection is closed when the client
    closes its side, or after some seconds. A client may send its whole request before it reads. If the connection were
    closed at once, such a client would lose the reply.
    """

    def __init__(self, transport: asyncio.Transport, cork: Cork, closing: Callable[[], float] | None = None) -> None:
        """Create the transport.

        Args:
            transport: The transport to write to.
            cork: The server's list of transports with unflushed writes.
            closing: A function that `close` calls. It returns the time for which the client may still send, in seconds.
        """
        self._transport, self._cork = transport, cork
        self.pieces: list[bytes] = []
        # `HttpProtocol` clears `closing` when the connection is lost, which breaks a reference cycle.
        self.closing = closing
        self.end: asyncio.TimerHandle | None = None
        self.lingering = False  # Whether the server's side is closed. If so, data from the client is dropped.
        self.paused = False  # Whether writing is paused until the client has read more.
        self.abort, self.get_write_buffer_size = transport.abort, transport.get_write_buffer_size
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Keep the data until the end of this turn. Nothing is written after `close`."""
        if self.lingering:
            return
        if not self.pieces:
            if not self._cork:
                asyncio.get_running_loop().call_soon(_flush_all, self._cork)
            self._cork.append(self)
        self.pieces.append(data)

    def flush(self) -> None:
        """Write the data of this turn. If that fails, the connection is closed."""
        pieces = self.pieces
        if not pieces:
            return
        self.pieces = []
        if self._transport.is_closing():
            return
        try:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception:  # The other connections must be flushed, too.
            logger.exception("a connection cannot be written to: it is broken off")
            self._transport.abort()

    def close(self) -> None:
        """Close once everything is sent and the client has had time to read it."""
        if self.is_closing():
            return
        self.flush()
        if self.closing is not None and (seconds := self.closing()):
            self._transport.write_eof()
            self._transport.resume_reading()
            self.lingering = True
            self.end = asyncio.get_running_loop().call_later(seconds, self._transport.close)
        else:
            self._transport.close()


def chunked_connection(send: Any) -> CorkedTransport | None:
    """Return the connection of a reply that has begun. Writing chunks to it is faster than calling `send`.

    Args:
        send: ASGI's callable.

    Returns:
        The connection. None if the reply is not chunked, or if other code wraps uvicorn's `send`, because that code has
        to see all parts.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    transport: Any = cycle.transport
    return transport if isinstance(transport, CorkedTransport) else None


def received_body(receive: Any, most: int = sys.maxsize) -> bytes | None:
    """Return the body of a request if the whole body has arrived. This is faster than uvicorn's `receive`.

    Call this function only once: it empties uvicorn's buffer.

    Args:
        receive: ASGI's callable.
        most: The maximum size of the body, in bytes.

    Returns:
        The body. None if the body is larger, if a part is missing, or if the client has left. Also None if other code
        wraps uvicorn's `receive`, because that code has to see all parts.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or cycle.more_body or cycle.disconnected or cycle.response_complete:
        return None
    if len(cycle.body) > most:
        return None
    cycle.waiting_for_100_continue = False  # The body has arrived, so no 100 is sent (RFC 9110, section 10.1.1).
    cycle.message_event.clear()
    cycle.flow.resume_reading()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def _ended_by_close(application: Any, cycle: RequestResponseCycle) -> Any:
    """Return an application whose replies may have any length. The end of a reply is the end of the connection."""

    async def unbounded(scope: Any, receive: Any, send: Any) -> None:
        async def send_part(message: Any) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await application(scope, receive, send_part)

    return unbounded


class _Refused(Exception):
    """A request that httptools can parse but the server refuses. The message is for the client."""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It differs from uvicorn's protocol in these points:

    - It limits heads, pipelined requests, and the time in which a client sends or reads nothing.
    - HTTP/1.0 clients do not know chunks (nginx's `proxy_pass` is such a client by default). For these clients, replies
      without a length end when the connection is closed.
    - A request that offers another protocol is served as plain HTTP.
    - Unreadable data is refused only after the earlier requests were answered.
    - Every request is notified when its client has left.

    A client that has only closed its side of the connection (RFC 9112, section 9.6) looks like a client that has left.
    The server sends data to find the difference: if the client has left, its operating system answers with a reset. If
    the reply is not complete after `LOOK_SECONDS`, the server sends probes, which HTTP/1.1 clients have to ignore.
    Before the reply, a probe is an interim reply. In the middle of a chunked reply, a probe is a `0`, a leading zero of
    the next chunk's size. HTTP/1.0 has no interim replies and no chunks, so an HTTP/1.0 client that closes its side
    counts as gone.
    """

    MAX_HEAD = 256 * 1024  # The largest size of a request line and headers, or of trailers, in bytes.
    HEAD_SECONDS = 60.0  # The time limit from the first byte of a head to its last.
    SEND_SECONDS = 120.0  # If a client reads nothing of the unsent data in this time, its connection is closed.
    LINGER_SECONDS = 10.0  # The time for which a refused client may send its body and read the reply.
    # The time until the server first checks if a client that closed its side has left. Each further check waits twice
    # as long, up to a second.
    LOOK_SECONDS = 0.02
    MAX_HEADER_NAME = 256  # In bytes. `handlers.custom.handler_input` caches the names of headers.
    MAX_PIPELINED = 100  # The maximum number of requests that wait for an earlier request. uvicorn has no limit.

    def __init__(self, *args: Any, cork: Cork | None = None, **keywords: Any) -> None:
        """Create the protocol of a connection. `cork` is shared by all connections of a server."""
        super().__init__(*args, **keywords)
        self._cork = [] if cork is None else cork
        self._overhead = 0  # The number of bytes received since the last head or body part.
        self._head_limit: asyncio.TimerHandle | None = None
        self._send_limit: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._unreadable = ""  # The error message for unreadable data. All data after it is ignored.
        self._look: asyncio.TimerHandle | None = None  # Set when the client has closed its side.

    # Callbacks of the transport.

    def connection_made(self, transport: Any) -> None:
        self._connection = CorkedTransport(transport, self._cork, self._closing)
        # ASGI has no way to drop the connection of a client that does not read.
        self._extensions = {BREAK_OFF: transport.abort}
        super().connection_made(self._connection)  # type: ignore[arg-type]
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.closing = None
        for timer in (
            self.timeout_keep_alive_task,
            self._head_limit,
            self._send_limit,
            self._look,
            self._connection.end,
        ):
            if timer is not None:
                timer.cancel()
        # uvicorn notifies only the latest request. This may be a pipelined request that waits for the running request.
        self.pipeline.clear()
        running = self._answering
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        # These fields refer to objects that refer to this object. Clearing the fields breaks the reference cycles.
        self._answering = self.parser = None
        self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._connection.lingering or self._unreadable:
            return
        self._overhead += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._connection.is_closing():
                self.data_received(self._without_offer(data[offer.args[0] :]))
            return
        except httptools.HttpParserError as error:
            reason = (
                str(error.__context__) if isinstance(error.__context__, _Refused) else "Invalid HTTP request received."
            )
            self.logger.warning(reason)
            self.send_400_response(reason)
            return
        if self._overhead > self.MAX_HEAD:
            self.send_400_response("Request header is too large.")
        elif self.scope is not None and "method" not in self.scope:  # The data ends in the middle of a head.
            if self._head_limit is None:
                self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        elif self.cycle is None or self.cycle.response_complete:
            # No request is running. uvicorn sets this timer only after a reply, and cancels it when any byte arrives.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if the client closed its side but still waits for the answer to a complete request."""
        if self._connection.pieces:
            self._connection.flush()  # A close would lose these data: `flush` writes nothing to a closing transport.
        answering = self._answering
        if answering is None or answering.response_complete:
            return False
        self._drop_unfinished()
        if answering.more_body:
            return False
        self._look = self.loop.call_later(self.LOOK_SECONDS, self._look_for_client, 0)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connection.paused = True
        self._limit_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connection.paused = False
        if self._send_limit is not None and not self._connection.is_closing():
            self._send_limit.cancel()

    # The parser and its callbacks.

    def _should_upgrade(self) -> bool:
        """Return True, so that uvicorn leaves offers of another protocol to `data_received`."""
        return True

    def _without_offer(self, rest: bytes) -> bytes:
        """Return the current request without its offer of another protocol. A new parser reads this request.

        Without the offer, the request is plain HTTP (RFC 9110, section 7.8). httptools stops at the end of the
        request's head, and `rest` is the data after it. Java's HttpClient offers HTTP/2 with the first request of each
        connection.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As in uvicorn.
        return b"\r\n".join([*lines, b"", rest])

    def on_headers_complete(self) -> None:
        self._overhead = 0
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None
        self.scope["extensions"] = self._extensions
        # A CONNECT request stops the parser, as an offer of another protocol does. But a CONNECT request cannot be
        # served as plain HTTP.
        if self.parser.get_method() == b"CONNECT":
            raise _Refused("CONNECT is for proxies, and this server is none.")
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif len(name) > self.MAX_HEADER_NAME:
                raise _Refused("The name of a header is too long.")
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _Refused("The only transfer coding that is known here is chunked.")
        if hosts != 1 and self.parser.get_http_version() == "1.1":
            raise _Refused("A request of HTTP/1.1 needs one Host header.")
        super().on_headers_complete()
        if self.parser.should_upgrade():
            return
        # Trailers arrive through `on_header`, too. They are not headers (RFC 9110, section 6.5.1) and are not used.
        self.headers = []
        if len(self.pipeline) > self.MAX_PIPELINED:
            self._connection.abort()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    # The current request.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] < "1.1":
            cycle.chunked_encoding = False
            app = _ended_by_close(app, cycle)
            cycle.waiting_for_100_continue = False  # HTTP/1.0 has no interim replies (RFC 9110, section 10.1.1).
        super()._start_asgi_task(cycle, app)

    def _closing(self) -> float:
        """Limit the time for unsent data, and return the seconds for which the client may still send."""
        self._limit_sending()
        # The client may still send if its request is incomplete. Unreadable data may be part of an incomplete request.
        answered = self._answering is not None and self._answering.response_complete
        sends = self._unreadable or (answered and self.cycle is not None and self.cycle.more_body)
        return self.LINGER_SECONDS if sends else 0.0

    def _drop_unfinished(self) -> None:
        """Drop the latest request if its body is incomplete and it waits for an earlier request."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._unreadable and self._look is None:
            return
        if (self._answering is not None and not self._answering.response_complete) or self._connection.is_closing():
            return
        if self._unreadable:
            super().send_400_response(self._unreadable)
        else:
            self._connection.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse unreadable data once earlier requests are answered.

        If the unreadable data belongs to a request whose reply has begun, close the connection instead.
        """
        self._drop_unfinished()
        self._unreadable = msg
        answering = self._answering
        if answering is None or answering.response_complete:
            super().send_400_response(msg)
        elif not answering.more_body:
            return
        elif answering.response_started:
            self._connection.close()
        else:
            super().send_400_response(msg)

    def _look_for_client(self, looks: int) -> None:
        """Close the connection if the client has left, but not if it only closed its side."""
        answering = self._answering
        if answering is None or answering.response_complete or self._connection.is_closing():
            return
        if answering.scope["http_version"] < "1.1" or self._is_reset():
            self._connection.abort()
            return
        if looks in _LOOKS_WITH_PROBE:
            if not answering.response_started:
                self._connection.write(_INTERIM)
            elif answering.chunked_encoding:
                self._connection.write(_LEADING_ZERO)
        seconds = min(self.LOOK_SECONDS * 2 ** min(looks + 1, 10), 1.0)
        self._look = self.loop.call_later(seconds, self._look_for_client, looks + 1)

    def _is_reset(self) -> bool:
        """Return True if the client's system has sent a reset. Only Linux reports a reset before the next write."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        connection = self._connection.get_extra_info("socket")
        return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)

    def shutdown(self) -> None:
        """Shut down with the server, without waiting for the rest of an incomplete request."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._connection.close()

    # The limits on time.

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self.cycle is not None and not self.cycle.response_complete:  # A reply is still being written.
            self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        else:
            self._connection.close()

    def _limit_sending(self) -> None:
        """Limit the time for unsent data.

        Called when writing is paused or the connection is closing. Then no data is added, so the amount of unsent data
        shrinks only if the client reads.
        """
        if self._send_limit is not None:
            self._send_limit.cancel()
        waiting: int = self._connection.get_write_buffer_size()
        self._send_limit = self.loop.call_later(self.SEND_SECONDS, self._check_sending, waiting)

    def _check_sending(self, waited: int) -> None:
        if self._connection.get_write_buffer_size() < waited:
            self._limit_sending()
            return
        logger.warning("a client has taken nothing for %g s: its connection is broken off", self.SEND_SECONDS)
        self._connection.abort()
