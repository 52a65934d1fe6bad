"""uvicorn's HTTP protocol with what it lacks: limits, corked writes, replies to HTTP/1.0, offers of other protocols."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)


class Corked(Protocol):
    """What collects what is written to it."""

    def flush(self) -> None:
        """Hand over what was written."""


class Cork:
    """All that has something to hand over at the end of this turn."""

    def __init__(self) -> None:
        self._waiting: list[Corked] = []

    def add(self, corked: Corked) -> None:
        """Have it flushed at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush_all)
        self._waiting.append(corked)

    def _flush_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for corked in waiting:
            try:
                corked.flush()
            except Exception:  # of one connection; the others have theirs to send
                logger.exception("a connection could not be written to")


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


class LingeringTransport(CorkedTransport):
    """A corked transport that is closed after the client has sent its request, or `seconds` later.

    `still_sends` tells, when the connection is closed, whether a reply is out and its request is not yet in.
    `closing` is called then: what the client has not taken may keep the connection for as long as it likes.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        cork: Cork,
        still_sends: Callable[[], bool],
        seconds: float,
        closing: Callable[[], None],
    ) -> None:
        super().__init__(transport, cork)
        self._still_sends, self._seconds, self._closing = still_sends, seconds, closing
        self._end: asyncio.TimerHandle | None = None

    @property
    def lingering(self) -> bool:
        """What comes from the client now is for nobody."""
        return self._end is not None

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close once all is sent, and the client has had time to read it."""
        if self.is_closing():
            return
        if self._still_sends():
            self.flush()
            self._transport.write_eof()
            self._transport.resume_reading()
            self._end = asyncio.get_running_loop().call_later(self._seconds, self._transport.close)
        else:
            super().close()
        self._closing()

    def closed(self) -> None:
        """The connection is gone."""
        if self._end is not None:
            self._end.cancel()


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


_CORK = Cork()
BREAK_OFF = "slipway.break_off"
"""In `scope["extensions"]`: what drops the connection at once, with all that waits in it."""


class _Parser:
    """httptools' parser, for which a request that offers another protocol is plain HTTP (RFC 9110 section 7.8).

    httptools stops at the end of such a request's head, and never sees its body. Java's HttpClient makes such an offer,
    of HTTP/2, with the first request of each connection.
    """

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol
        self._parser = _new_parser(protocol)

    def feed_data(self, data: bytes) -> None:
        while not self._protocol.transport.is_closing():
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                # Read once more without the offer, by a parser that has not stopped.
                data = self._protocol.head_without_offer() + data[offer.args[0] :]
                self._parser = _new_parser(self._protocol)
            else:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _new_parser(protocol: HttpProtocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
    return parser


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol on a corked transport, with what uvicorn does not have.

    These are limits on a request's head and on requests that are sent before the one before them is answered, limits on
    the time in which a connection's client says nothing or takes nothing, an answer for requests that offer another
    protocol, and word for every request of a connection that its client has left.
    """

    MAX_HEAD = 256 * 1024
    """Bytes of request line and headers; also of what comes without any of a body, as trailers do."""
    HEAD_SECONDS = 60.0
    """From a head's first bytes to its last."""
    SEND_SECONDS = 120.0
    """That a client may take nothing of what waits for it."""
    LINGER_SECONDS = 10.0
    """That a client may go on to send a body that nobody reads, and take its reply, before its connection is closed."""
    MAX_PIPELINED = 100
    """Requests that wait for the one before them; uvicorn reads on after each answer, however many there are."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.parser = _Parser(self)
        self._in_head = False
        self._overhead = 0
        """Bytes since the last of a body, or since the last head."""
        self._head_limit: asyncio.TimerHandle | None = None
        self._send_limit: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._in_head = True
        super().on_message_begin()
        # ASGI has no way to break a connection off whose client does not take what was sent.
        self.scope["extensions"] = {BREAK_OFF: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head, self._overhead = False, 0
        self._unset_head_limit()
        if self._offers_protocol():
            return
        super().on_headers_complete()
        # Trailers come by the same callback. They are no headers (RFC 9110 section 6.5.1), and nobody reads them.
        self.headers = []
        if len(self.pipeline) > self.MAX_PIPELINED:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._overhead = 0
        if not self._offers_protocol():
            super().on_message_complete()

    def _offers_protocol(self) -> bool:
        # CONNECT stops the parser as well, but it is no offer; uvicorn refuses it.
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes:
        """The head of the request that is being read, without the protocol that it offers."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def data_received(self, data: bytes) -> None:
        if self._connection.lingering:
            return
        self._overhead += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._overhead > self.MAX_HEAD:
            self.send_400_response("Request header is too large.")
        else:
            self._limit_silence()

    def send_400_response(self, msg: str) -> None:
        """Called for what cannot be read. In the middle of a reply the answer would be taken for a part of that."""
        if self._answering is not None and self._answering.response_started and not self._answering.response_complete:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def shutdown(self) -> None:
        """Called by the server when it ends. A request that is not there yet is not waited for."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self.transport.close()

    def _still_sends(self) -> bool:
        answered = self._answering is not None and self._answering.response_complete
        return answered and self.cycle is not None and bool(self.cycle.more_body)

    def _limit_silence(self) -> None:
        if self._in_head:
            if self._head_limit is None:
                self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        elif not self._busy and self.timeout_keep_alive_task is None:
            self._limit_idleness()  # uvicorn does so after each reply, and takes it back at any byte that comes

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_idleness(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _head_is_late(self) -> None:
        self._head_limit = None
        if self._busy:  # with the request before; that one's reply is not to be cut off
            self._head_limit = self.loop.call_later(self.HEAD_SECONDS, self._head_is_late)
        else:
            self.transport.close()

    def _unset_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def pause_writing(self) -> None:
        """Called by the transport."""
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        """Called by the transport."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unset_send_limit()

    def _limit_sending(self) -> None:
        # Nothing is added to it while writing is paused, nor once the connection is being closed.
        self._unset_send_limit()
        waiting: int = self.transport.get_write_buffer_size()
        self._send_limit = self.loop.call_later(self.SEND_SECONDS, self._check_sending, waiting)

    def _check_sending(self, waited: int) -> None:
        if self.transport.get_write_buffer_size() < waited:
            self._limit_sending()
            return
        logger.warning("a client has taken nothing for %g s: its connection is broken off", self.SEND_SECONDS)
        self.transport.abort()

    def _unset_send_limit(self) -> None:
        if self._send_limit is not None:
            self._send_limit.cancel()
            self._send_limit = None

    def connection_made(self, transport: Any) -> None:
        self._connection = LingeringTransport(
            transport, _CORK, self._still_sends, self.LINGER_SECONDS, self._limit_sending
        )
        super().connection_made(self._connection)  # type: ignore[arg-type]
        self._limit_idleness()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.closed()
        self._unset_keepalive_if_required()
        self._unset_head_limit()
        self._unset_send_limit()
        # uvicorn tells the request that was read last, which may not have begun yet.
        self.pipeline.clear()
        running = self._answering
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if not knows_chunks(cycle.scope):
            app = until_closed(cycle, app)
            cycle.waiting_for_100_continue = False  # nor does such a client know what that would be (RFC 9110, 10.1.1)
        super()._start_asgi_task(cycle, app)
