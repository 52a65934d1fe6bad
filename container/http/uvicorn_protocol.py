"""Extends uvicorn's HTTP protocol: limits, joined writes, HTTP/1.0, protocol offers, half-closed clients.

No other module touches uvicorn's internals. This one was run with uvicorn 0.54.0. `check_uvicorn` refuses other
releases when the server starts. tests/live/test_uvicorn_internals.py fails if one of these names has moved:

- `HttpToolsProtocol`: the callbacks of httptools' parser, of the transport and of the server that are overridden below,
  and its fields `cycle`, `pipeline`, `scope`, `headers`, `url`, `parser`, `flow` and `timeout_keep_alive_task`; `scope`
  has a method once the head is complete;
- `RequestResponseCycle`: `flow`, `transport`, `chunked_encoding`, `expected_content_length`, `response_started`,
  `response_complete`, `body`, `more_body`, `disconnected`, `message_event` and `waiting_for_100_continue`; its `send`
  waits while writing is paused, and at no other time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

UVICORN = "0.54."  # The beginning of the versions for which this module is written.
# In `scope["extensions"]`: a function that drops the connection at once, with everything that waits to be sent.
BREAK_OFF = "slipway.break_off"

_TCP_CLOSE = 7  # The state of a reset TCP connection in the first byte of TCP_INFO.
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO = b"0"  # Begins the size of the next chunk.
_LOOKS_WITH_PROBE = (0, 3)  # A proxy may have taken the first probe before it found that its client has left.

_OVERRIDDEN = (
    *("on_headers_complete", "on_body", "on_response_complete", "_should_upgrade", "_start_asgi_task"),
    *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing"),
    *("send_400_response", "shutdown", "_unset_keepalive_if_required", "timeout_keep_alive_handler"),
)


def check_uvicorn() -> None:
    """Refuse to serve with a uvicorn whose internals may have moved.

    Raises:
        RuntimeError: uvicorn has another version, or lacks a method.
    """
    if not uvicorn.__version__.startswith(UVICORN):
        raise RuntimeError(f"Slipway needs uvicorn {UVICORN}x, and uvicorn {uvicorn.__version__} is installed")
    if missing := [name for name in _OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]:
        raise RuntimeError(f"this uvicorn is not one that Slipway knows: it has no {', '.join(missing)}")


class Cork:
    """Calls flush functions at the end of a turn of the event loop, so that the writes of the turn are sent together.

    A cork belongs to one server, and so to one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """Call `flush` at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.append(flush)

    def _flush_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flush in waiting:
            try:
                flush()
            except Exception:  # the other connections must be flushed too
                logger.exception("a reply cannot be sent")


def _never() -> bool:
    return False


def _nothing() -> None:
    return


class CorkedTransport:
    """A transport that joins the writes of one turn of the event loop.

    If the client may still be sending, `close` ends only the server's side. The connection is closed when the client
    ends its side, or after `linger_seconds`. Otherwise a client that reads only after it has sent everything would lose
    its reply.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        cork: Cork,
        still_sends: Callable[[], bool] | None = None,
        closing: Callable[[], None] | None = None,
        linger_seconds: float = 0.0,
    ) -> None:
        """Create the transport.

        Args:
            transport: The transport to write to.
            cork: The cork of the server.
            still_sends: Returns True if the client may still be sending.
            closing: Called when the transport is closed.
            linger_seconds: The longest time for which the client may send after that.
        """
        self._transport, self._cork = transport, cork
        self._still_sends, self._closing = still_sends or _never, closing or _nothing
        self._linger_seconds = linger_seconds
        self._pieces: list[bytes] = []
        self._end: asyncio.TimerHandle | None = None
        self.lingering = False  # The server's side has ended. Further data of the client is dropped.

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Keep the data until the end of this turn. Nothing is written after `close`."""
        if self.lingering:
            return
        if not self._pieces:
            self._cork.add(self.flush)
        self._pieces.append(data)

    def flush(self) -> None:
        """Pass the held writes on. The connection is dropped if that fails."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces = []
        if self._transport.is_closing():
            return
        try:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception:
            logger.exception("a connection cannot be written to: it is broken off")
            self._transport.abort()

    def close(self) -> None:
        """Close when everything is sent and the client has had time to read it."""
        if self.is_closing():
            return
        self.flush()
        if self._still_sends():
            self._transport.write_eof()
            self._transport.resume_reading()
            self.lingering = True
            self._end = asyncio.get_running_loop().call_later(self._linger_seconds, self._transport.close)
        else:
            self._transport.close()
        self._closing()

    def closed(self) -> None:
        """Note that the connection is closed. The callbacks are dropped: they hold the object that holds this one."""
        if self._end is not None:
            self._end.cancel()
        self._still_sends, self._closing = _never, _nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def chunk_writer(send: Any) -> Callable[[bytes], bool] | None:
    """Return a function that sends a part of a stream, in less time than uvicorn's `send` takes.

    The function returns False if the part has to go through `send`: the connection takes no more now, or the reply has
    no chunks.

    Args:
        send: ASGI's callable. The result is None if it is not that of uvicorn: code that wraps it has to see all parts.
    """
    cycle = getattr(send, "__self__", None)
    return partial(_write_chunk, cycle) if isinstance(cycle, RequestResponseCycle) else None


def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or not data:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def received_body(receive: Any, most: int = sys.maxsize) -> bytes | None:
    """Take the body of a request, once, if all of it has come. It is faster than uvicorn's `receive`.

    Args:
        receive: ASGI's callable.
        most: The largest size of a body that is taken, in bytes.

    Returns:
        The body. None if it is larger, if a part is missing, if the client has left, or if `receive` is not uvicorn's:
        code that wraps it has to see all parts.
    """
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or cycle.more_body or cycle.disconnected or cycle.response_complete:
        return None
    if len(cycle.body) > most:
        return None
    cycle.waiting_for_100_continue = False  # The client did not wait (RFC 9110, section 10.1.1).
    cycle.message_event.clear()
    cycle.flow.resume_reading()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def _ended_by_close(application: Any, cycle: RequestResponseCycle) -> Any:
    """Return an application whose body may have any length: the end of the connection ends it."""

    async def unbounded(scope: Any, receive: Any, send: Any) -> None:
        async def send_part(message: Any) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await application(scope, receive, send_part)

    return unbounded


class _Refused(Exception):
    """A request that httptools can read but the server refuses. The message is for the client."""


def _new_parser(protocol: HttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn
    return parser


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It differs from uvicorn's protocol in these points:

    - It limits heads, pipelined requests, and the time in which a client sends or takes nothing.
    - Clients of HTTP/1.0 know no chunks (nginx's `proxy_pass` is one by default). The end of the connection ends
      replies without a length for them.
    - A request that offers another protocol is served as plain HTTP.
    - Unreadable data is refused only after the requests before it were answered.
    - Every request is told when its client has left.

    A client that has ended its side of the connection (RFC 9112, section 9.6) looks like one that has left. They differ
    when something is sent to them: the system of the one that left answers with a reset. If the reply is not complete
    after `LOOK_SECONDS`, both get bytes that clients of HTTP/1.1 have to ignore: an interim reply, or a leading zero of
    the next chunk's size in the middle of a stream. HTTP/1.0 has neither, so its clients count as gone.
    """

    MAX_HEAD = 256 * 1024  # Bytes of request line and headers, or of trailers.
    HEAD_SECONDS = 60.0  # From the first byte of a head to its last.
    SEND_SECONDS = 120.0  # A client has to take a part of the waiting data within this time.
    LINGER_SECONDS = 10.0  # A refused client may send its body and read its reply for so long.
    # The time before the server first looks if a client that has ended its side has left. Each further look takes twice
    # the time, up to a second.
    LOOK_SECONDS = 0.02
    MAX_HEADER_NAME = 256  # `container.http.request_head` keeps the names that it has seen.
    MAX_PIPELINED = 100  # Requests of a connection that may wait for the one before them. uvicorn has no limit.

    def __init__(self, *args: Any, cork: Cork | None = None, **keywords: Any) -> None:
        """Create the protocol of a connection. `cork` is shared by all connections of a server."""
        super().__init__(*args, **keywords)
        self._cork = cork or Cork()
        self.parser = _new_parser(self)
        self._overhead = 0  # Bytes since the last head, or the last part of a body.
        self._head_limit: asyncio.TimerHandle | None = None
        self._send_limit: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._unreadable = ""  # The fault of unreadable data. Nothing more is read after it.
        self._look: asyncio.TimerHandle | None = None  # Set when the client has ended its side.

    # The transport's callbacks.

    def connection_made(self, transport: Any) -> None:
        self._connection = CorkedTransport(
            transport, self._cork, self._still_sends, self._limit_sending, self.LINGER_SECONDS
        )
        # ASGI has no way to drop the connection of a client that does not read.
        self._extensions = {BREAK_OFF: transport.abort}
        super().connection_made(self._connection)  # type: ignore[arg-type]
        self._limit_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.closed()
        self._unset_keepalive_if_required()
        self._unset_head_limit()
        self._unset_send_limit()
        if self._look is not None:
            self._look.cancel()
        # uvicorn tells only the request that was read last, which may not have begun yet.
        self.pipeline.clear()
        running = self._answering
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self._answering = self.parser = None  # They hold this object.
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
        elif self.scope is not None and "method" not in self.scope:  # in the middle of a head
            if self._head_limit is None:
                self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        elif self.cycle is None or self.cycle.response_complete:
            self._limit_idleness()  # uvicorn does so after each reply, and cancels it when any byte comes

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if the client has ended its side and a whole request has no complete answer yet."""
        self._connection.flush()  # a reply may have been written in this turn
        unfinished = self._unfinished()
        if self.pipeline and self.pipeline[0][0] is unfinished:
            self.pipeline.popleft()
        if not self._answers() or self._answering is unfinished:
            return False
        self._look = self.loop.call_later(self.LOOK_SECONDS, self._look_for_client, 0)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._connection.is_closing():
            self._unset_send_limit()

    # The parser, and its callbacks.

    def _should_upgrade(self) -> bool:
        """Return True, so that uvicorn does not answer an offer of another protocol. `data_received` does."""
        return True

    def _without_offer(self, rest: bytes) -> bytes:
        """Return the current request without the protocol that it offers, for a new parser.

        Without the offer the request is plain HTTP (RFC 9110, section 7.8). httptools stops at the end of its head, and
        `rest` follows that. Java's HttpClient offers HTTP/2 with the first request of each connection.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = _new_parser(self)
        return b"\r\n".join([*lines, b"", rest])

    def on_headers_complete(self) -> None:
        self._overhead = 0
        if self._head_limit is not None:
            self._unset_head_limit()
        self.scope["extensions"] = self._extensions
        self._check_head()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            return
        # Trailers come through the same callback. They are no headers (RFC 9110, section 6.5.1) and are not used.
        self.headers = []
        if len(self.pipeline) > self.MAX_PIPELINED:
            self._connection.abort()

    def _check_head(self) -> None:
        # CONNECT stops the parser as an offer of another protocol does. Without the offer nothing is left to serve.
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

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    # The request that is answered.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] < "1.1":
            cycle.chunked_encoding = False
            app = _ended_by_close(app, cycle)
            cycle.waiting_for_100_continue = False  # HTTP/1.0 does not have it (RFC 9110, section 10.1.1)
        super()._start_asgi_task(cycle, app)

    def _still_sends(self) -> bool:
        """Return True if a reply is complete before its request, or the end of the request is not known."""
        answered = self._answering is not None and self._answering.response_complete
        return bool(self._unreadable) or (answered and self._unfinished() is not None)

    def _answers(self) -> bool:
        """Return True if a request is being answered."""
        return self._answering is not None and not self._answering.response_complete

    def _unfinished(self) -> RequestResponseCycle | None:
        """Return the request whose body is not complete."""
        return self.cycle if self.cycle is not None and self.cycle.more_body else None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answers() or self._connection.is_closing():
            return
        if self._unreadable:
            super().send_400_response(self._unreadable)
        elif self._look is not None:
            self._connection.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse unreadable data after the requests before it are answered. Close if its own reply has begun."""
        unfinished = self._unfinished()
        if self.pipeline and self.pipeline[0][0] is unfinished:
            self.pipeline.popleft()
        self._unreadable = msg
        answering = self._answering
        if answering is None or answering.response_complete:
            super().send_400_response(msg)
        elif answering is not unfinished:
            return
        elif answering.response_started:
            self._connection.close()
        else:
            super().send_400_response(msg)

    def _look_for_client(self, looks: int) -> None:
        """Drop the connection if the client has left, and not only ended its side."""
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
        """Return True if the client's system answered with a reset. Only Linux shows that before the next write."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        connection = self._connection.get_extra_info("socket")
        return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)

    def shutdown(self) -> None:
        """End with the server, without waiting for the rest of an incomplete request."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._connection.close()

    # The limits on time.

    def _limit_idleness(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self.cycle is not None and not self.cycle.response_complete:  # do not cut off its reply
            self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        else:
            self._connection.close()

    def _unset_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _limit_sending(self) -> None:
        """Watch the data that waits to be sent. None is added while writing is paused or the connection closes."""
        self._unset_send_limit()
        waiting: int = self._connection.get_write_buffer_size()
        self._send_limit = self.loop.call_later(self.SEND_SECONDS, self._check_sending, waiting)

    def _check_sending(self, waited: int) -> None:
        if self._connection.get_write_buffer_size() < waited:
            self._limit_sending()
            return
        logger.warning("a client has taken nothing for %g s: its connection is broken off", self.SEND_SECONDS)
        self._connection.abort()

    def _unset_send_limit(self) -> None:
        if self._send_limit is not None:
            self._send_limit.cancel()
            self._send_limit = None
