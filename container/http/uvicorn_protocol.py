"""uvicorn's HTTP protocol with what it lacks: limits, joined writes, HTTP/1.0, protocol offers, half-closed clients.

The one module that touches uvicorn's internals. It was run with uvicorn 0.54.0; `check_uvicorn` refuses other releases
when the server starts, and tests/live/test_uvicorn_seam.py fails where one of these has moved:

- `HttpToolsProtocol`: the callbacks of httptools' parser, of the transport and of the server that are overridden below,
  and its fields `cycle`, `pipeline`, `scope`, `headers`, `url`, `parser`, `flow` and `timeout_keep_alive_task`; `scope`
  has a method once the head is complete;
- `RequestResponseCycle`: `chunked_encoding`, `expected_content_length`, `response_started`, `response_complete`,
  `more_body`, `disconnected`, `message_event` and `waiting_for_100_continue`; its `send` waits while writing is paused,
  and at no other time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

UVICORN = "0.54."
"""How the versions of uvicorn begin that this module is written for."""
BREAK_OFF = "slipway.break_off"
"""In `scope["extensions"]`: a function that drops the connection at once, with all that waits in it."""

_TCP_CLOSE = 7
"""The state of a TCP connection that is reset, as the first byte of TCP_INFO has it."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_LEADING_ZERO = b"0"
"""Of the size of the chunk that comes next."""
_LOOKS_WITH_PROBE = (0, 3)
"""The second is for a proxy that has taken the first, and only then finds that its client has left."""

_OVERRIDDEN = (
    *("on_headers_complete", "on_body", "on_response_complete", "_should_upgrade", "_start_asgi_task"),
    *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing", "resume_writing"),
    *("send_400_response", "shutdown", "_unset_keepalive_if_required", "timeout_keep_alive_handler"),
)


def check_uvicorn() -> None:
    """Refuse to serve with a uvicorn whose internals may have moved.

    Raises:
        RuntimeError: its version is another, or a method is missing.
    """
    if not uvicorn.__version__.startswith(UVICORN):
        raise RuntimeError(f"Slipway needs uvicorn {UVICORN}x, and uvicorn {uvicorn.__version__} is installed")
    if missing := [name for name in _OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]:
        raise RuntimeError(f"this uvicorn is not one that Slipway knows: it has no {', '.join(missing)}")


class Cork:
    """Has everything flushed that was written in one turn of the event loop, in one call at its end.

    A cork belongs to one server, and so to one event loop.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """Have `flush` called at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.append(flush)

    def _flush_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flush in waiting:
            try:
                flush()
            except Exception:  # of one connection; the others have theirs to send
                logger.exception("a reply cannot be sent")


class CorkedTransport:
    """A transport that sends what is written in one turn of the event loop as one piece.

    Where a client may be sending still, `close` ends our side only. The connection is closed when the
    client has ended its own side, or `linger_seconds` later: a client that sends before it reads would lose its reply
    otherwise.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        cork: Cork,
        still_sends: Callable[[], bool] = lambda: False,
        closing: Callable[[], None] = lambda: None,
        linger_seconds: float = 0.0,
    ) -> None:
        """`still_sends`: whether the client may be sending. `closing`: called when it is closed."""
        self._transport, self._cork = transport, cork
        self._still_sends, self._closing, self._linger_seconds = still_sends, closing, linger_seconds
        self._pieces: list[bytes] = []
        self._end: asyncio.TimerHandle | None = None
        self.lingering = False
        """Our side is ended; what comes from the client now is for nobody."""

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Keep the data until the end of this turn."""
        if not self._pieces:
            self._cork.add(self.flush)
        self._pieces.append(data)

    def flush(self) -> None:
        """Hand over what was written. A connection that does not take it is broken off."""
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
        """Close once all is sent, and the client has had time to read it."""
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
        """The connection is gone."""
        if self._end is not None:
            self._end.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _AnyLength(int):
    """The length that uvicorn is to expect of a body that ends with its connection: whatever comes fits."""

    def __lt__(self, length: int) -> bool:
        return False

    def __sub__(self, length: int) -> _AnyLength:
        return self


class _Refused(Exception):
    """A request that cannot be served, though httptools can read it; the message is for the client."""


def _new_parser(protocol: HttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
    return parser


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Beyond uvicorn's protocol it limits heads, pipelined requests, and the time in which a client says nothing or takes
    nothing; it ends replies without a length with the connection for clients of HTTP/1.0, which know no chunks (nginx's
    `proxy_pass` is one by default); it serves requests that offer another protocol as plain HTTP; it refuses what it
    cannot read only after it has answered what came before; and every request hears that its client has left.

    A client that ends its own side (RFC 9112, section 9.6) and one that leaves look the same until they are sent
    something: the system of the one that has left answers with a reset. Where the reply is not complete within
    `LOOK_SECONDS`, both are therefore sent what any client of HTTP/1.1 has to understand and ignore: an interim reply
    or, in the middle of a stream, a leading zero of a chunk's size. HTTP/1.0 has neither, so its clients count as gone.
    """

    MAX_HEAD = 256 * 1024
    """Bytes of request line and headers, or of trailers."""
    HEAD_SECONDS = 60.0
    """From a head's first bytes to its last."""
    SEND_SECONDS = 120.0
    """Time in which a client has to take something of what waits for it."""
    LINGER_SECONDS = 10.0
    """Time in which a refused client may go on sending its body and read its reply."""
    LOOK_SECONDS = 0.02
    """After which it is looked whether a client that has ended its own side has left; each further look, in twice the
    time of the one before, in a second at most."""
    MAX_PIPELINED = 100
    """Requests of a connection that may wait for the one before them; uvicorn has no limit."""

    def __init__(self, *args: Any, cork: Cork | None = None, **keywords: Any) -> None:
        """`cork`: of all connections of a server; each has its own otherwise."""
        super().__init__(*args, **keywords)
        self._cork = cork or Cork()
        self.parser = _new_parser(self)
        self._overhead = 0
        """Bytes since the last of a body, or since the last head."""
        self._head_limit: asyncio.TimerHandle | None = None
        self._send_limit: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._unreadable = ""
        """What is wrong with what came after all requests so far; nothing more is read then."""
        self._look: asyncio.TimerHandle | None = None
        """Set once the client has ended its own side."""

    # The transport's callbacks.

    def connection_made(self, transport: Any) -> None:
        self._connection = CorkedTransport(
            transport, self._cork, self._still_sends, self._limit_sending, self.LINGER_SECONDS
        )
        # ASGI has no way to break a connection off whose client does not take what was sent.
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
        # uvicorn tells the request that was read last, which may not have begun yet.
        self.pipeline.clear()
        running = self._answering
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

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
            self._limit_idleness()  # uvicorn does so after each reply, and takes it back at any byte that comes

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has ended its side. Keep the connection where a whole request is still to be answered."""
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
        """Whether the request that stops the parser offers another protocol; uvicorn then takes nothing of it.

        CONNECT stops the parser as well, but it is no offer; uvicorn refuses it.
        """
        return bool(self.parser.get_method() != b"CONNECT")

    def _without_offer(self, rest: bytes) -> bytes:
        """The request that is being read, without the protocol that it offers, for a parser that has not stopped.

        Such a request is plain HTTP (RFC 9110, section 7.8). httptools stops at the end of its head, and `rest` is what
        has come after that. Java's HttpClient offers HTTP/2 with the first request of each connection.
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
        # Trailers come by the same callback. They are no headers (RFC 9110, section 6.5.1), and nobody reads them.
        self.headers = []
        if len(self.pipeline) > self.MAX_PIPELINED:
            self._connection.abort()

    def _check_head(self) -> None:
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
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
            cycle.chunked_encoding, cycle.expected_content_length = False, _AnyLength()
            cycle.waiting_for_100_continue = False  # such a client does not know what that is (RFC 9110, 10.1.1)
        super()._start_asgi_task(cycle, app)

    def _still_sends(self) -> bool:
        """Whether a reply is out and its request is not all in, or it cannot be told where that ends."""
        answered = self._answering is not None and self._answering.response_complete
        return bool(self._unreadable) or (answered and self._unfinished() is not None)

    def _answers(self) -> bool:
        """Whether a request is being answered."""
        return self._answering is not None and not self._answering.response_complete

    def _unfinished(self) -> RequestResponseCycle | None:
        """The request whose body is not all in."""
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
        """Answer what cannot be read, after all that came before it; its own reply may have begun: then close."""
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
        """Break the connection off if the client has left, and not just ended its own side."""
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
        """Whether the client's system has answered with a reset; only Linux tells before the next write."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        connection = self._connection.get_extra_info("socket")
        return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)

    def shutdown(self) -> None:
        """End with the server. A request that is not all here yet is not waited for."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._connection.close()

    # The limits on time.

    def _limit_idleness(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self.cycle is not None and not self.cycle.response_complete:  # its reply is not to be cut off
            self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        else:
            self._connection.close()

    def _unset_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _limit_sending(self) -> None:
        """Watch what waits to be sent. Nothing is added to it while writing is paused, or the connection closes."""
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
