"""What every route has in common: from an ASGI request to whoever answers it, and back.

An `Endpoint` reads the request, lets one of its targets answer, counts and logs. What the server itself has to say (not
loaded yet, body too large, a fault of our own) it says in the target's own error form.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from container.error_rates import CLIENT_GONE, ErrorRates
from container.http.protocol import BREAK_OFF
from container.http.reply import Continued, Headers, PushedReply, Send, StreamCork, cors_headers
from container.metrics import HttpCounts
from container.models.lifecycle import Lifecycle
from container.models.registry import Models
from container.settings.settings import ServerSettings
from handlers.contracts.protocol import Call, ContractError, Reply
from handlers.entry_point import Service
from handlers.errors import BodyTimeout, BodyTooLarge, InternalError, NotReady, RequestError
from handlers.reply import ReplyWriter, Running

logger = logging.getLogger("slipway.access")


def log_request(scope: dict[str, Any], request_id: str, status: int, seconds: float, size: int) -> None:
    """Log method, path, status, duration and size; never a query string, a prompt or an answer."""
    logger.info(
        "%s %s %d %.1f ms %d bytes",
        scope["method"],
        # As it was sent: decoded it may have line ends, and forge lines of this log.
        scope["raw_path"].decode("ascii", "backslashreplace"),
        status,
        seconds * 1000,
        size,
        extra={"request_id": request_id},
    )


INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
"""SageMaker's header for the client's own id; it counts where the configured one is absent."""
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch


def request_id(header: bytes | None) -> str:
    """The client's own id if it is short visible ASCII (it is written into headers and logs), else a new UUID."""
    if header is not None and _ACCEPTABLE(header):
        return header.decode("ascii")
    return str(uuid.uuid4())


_LOWER = ("x-request-id", "x-synchronous", "x-starting-token", "x-next-token", "x-max-items", "x-priority")
"""Names that LMI's own documentation writes so."""


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """All headers, in order, as text."""
    return tuple((_canonical(name), value.decode("latin-1")) for name, value in headers)


@lru_cache(maxsize=512)
def _canonical(name: bytes) -> str:
    text = name.decode("latin-1")
    if text in _LOWER or "_" in text:
        return text
    prefix = "x-amzn-sagemaker-"
    if text.startswith(prefix):
        return "X-Amzn-SageMaker-" + "-".join(map(str.capitalize, text.removeprefix(prefix).split("-")))
    return "-".join(map(str.capitalize, text.split("-")))


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


Scope = dict[str, Any]
Refuse = Callable[[RequestError], Reply]


class Site:
    """What all endpoints of one server share."""

    def __init__(self, models: Models, settings: ServerSettings, counts: HttpCounts) -> None:
        self.models, self.settings, self.counts = models, settings, counts
        self.error_rates = ErrorRates(
            {
                "wlm": settings.error_rate_wlm,
                "server": settings.error_rate_server,
                "model": settings.error_rate_model,
                "any": settings.error_rate_any,
            },
            refusals=frozenset({settings.throttle_error_http_code, settings.wlm_error_http_code}),
        )
        self.id_header = settings.request_id_header.lower().encode()
        self.cork = StreamCork(settings.coalesce_above)
        self.cors_headers = cors_headers(settings)

    @property
    def lifecycle(self) -> Lifecycle:
        """That of the model that a call means which names none.

        Raises:
            ModelNotNamed: there is not exactly one that was there at the start.
        """
        return self.models.startup().lifecycle

    def service(self) -> Service:
        """The same model, loaded.

        Raises:
            ModelNotNamed: there is not exactly one that was there at the start.
            NotReady: it is still loading, or the server is stopping.
        """
        return self.models.startup().service()


@dataclass(frozen=True, slots=True)
class Target:
    """One who can answer the calls of a route."""

    answer: Callable[[Call, ReplyWriter], Awaitable[Running | None]]
    """None: the reply is complete."""
    refuse: Refuse
    wanted: Callable[[bytes], bool] = lambda _: True
    """Whether it takes a call with this body."""
    early: Callable[[Scope, dict[bytes, bytes]], Reply | None] = lambda _, __: None
    """What is answered before the body is read; may raise RequestError."""


class Endpoint:
    """An ASGI application for one path and method. The first of its targets that wants a call answers it."""

    def __init__(self, site: Site, route: str, targets: Sequence[Target], headers: Headers | None = None) -> None:
        """`headers`: what every reply of the route carries, beside the request's id and CORS."""
        self._site, self._route, self._targets = site, route, tuple(targets)
        self._headers = [*(headers or []), *site.cors_headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()
        site = self._site
        headers: dict[bytes, bytes] = dict(scope["headers"])
        identity = request_id(headers.get(site.id_header) or headers.get(INFERENCE_ID))
        reply_headers = [(b"x-request-id", identity.encode()), *self._headers]
        writer = PushedReply(send, reply_headers, site.cork, scope.get("extensions", _NONE).get(BREAK_OFF, _nothing))
        site.models.open_calls += 1
        try:
            await self._serve(scope, headers, identity, receive, writer, reply_headers)
        finally:
            writer.close()
            site.models.open_calls -= 1
        seconds = time.perf_counter() - started
        # A client that went away before the end is counted as proxies do.
        status = writer.status if writer.finished else CLIENT_GONE
        site.counts.count(self._route, status, seconds)
        if site.error_rates.limited and site.models.loaded:  # before that, refusals are no errors
            site.error_rates.count(status)
        log_request(scope, identity, status, seconds, writer.bytes_sent)

    async def _serve(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        identity: str,
        receive: Receive,
        writer: PushedReply,
        reply_headers: Headers,
    ) -> None:
        target = self._targets[0]
        try:
            if (early := target.early(scope, headers)) is not None:
                writer.reply(early)
                return
            body = await read_body(headers, receive, self._site.settings, self._site.models)
            if body is None:
                return
            target = next((t for t in self._targets if t.wanted(body)), self._targets[-1])
            call = _call(scope, headers, body, identity)
            if self._site.settings.log_prompts:
                logger.info("body: %s", body.decode(errors="replace"), extra={"request_id": identity})
            steps = target.answer(call, writer).__await__()
            try:
                waiting_for = next(steps)
            except StopIteration as done:
                running, watch = done.value, None
            else:
                watch = _Watch(receive)
                running = await watch.unless_gone(Continued(steps, waiting_for))
        except _Gone:
            return
        except ContractError as error:
            logger.info("refused: %s", error.reason, extra={"request_id": identity})
            writer.reply(error.reply)
        except RequestError as error:
            logger.info("refused: %s", error.message, extra={"request_id": identity})
            reply_headers.extend(_for_the_connection(error))
            writer.reply(target.refuse(error))
        except Exception:
            logger.exception("internal error", extra={"request_id": identity})
            if not writer.status:
                writer.reply(target.refuse(InternalError()))
        else:
            if running is not None:
                await _until_closed(watch.closed if watch is not None else _closed(receive), running)


def answered_early(site: Site, route: str, reply: Callable[[Call], Reply]) -> Endpoint:
    """An endpoint that has its answer before the body is read, which it does not look at."""

    def early(scope: Scope, _: dict[bytes, bytes]) -> Reply:
        return reply(Call(body=b"", request_id="", method=scope["method"], path=scope["path"]))

    async def answer(call: Call, writer: ReplyWriter) -> None:
        writer.reply(reply(call))

    return Endpoint(site, route, [Target(answer, lambda _: Reply(500, "", b""), early=early)])


def _call(scope: Scope, headers: dict[bytes, bytes], body: bytes, identity: str) -> Call:
    query: bytes = scope["query_string"]
    return Call(
        body=body,
        content_type=headers.get(b"content-type", b"").decode("latin-1"),
        request_id=identity,
        headers=request_headers(scope["headers"]),
        query=tuple(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else (),
        method=scope["method"],
        path=scope["path"],
        path_parameters=scope.get("path_params") or {},
    )


def _for_the_connection(error: RequestError) -> Headers:
    match error:
        case NotReady():
            return [(b"retry-after", b"5"), (b"connection", b"close")]
        case BodyTooLarge() | BodyTimeout():
            return [(b"connection", b"close")]  # the rest of the body is not going to be read
        case _:
            return []


async def _until_closed(closed: Awaitable[None], running: Running) -> None:
    try:
        await closed
    finally:
        running.cancel()


async def _closed(receive: Receive) -> None:
    """Wait until the reply is complete or the client has gone; ASGI reports both as a disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Gone(Exception):
    """The client has gone before there was anything to cancel but the call itself."""


class _Watch:
    """Waits for the client to leave while its call is still on the way to the engine.

    There are such calls where a long prompt is tokenized or a constraint is tried out; all others are spared it. The
    call goes on in the task that began it, and is cancelled there.
    """

    def __init__(self, receive: Receive) -> None:
        self.closed: asyncio.Task[None] = asyncio.create_task(_closed(receive))

    async def unless_gone(self, answer: Awaitable[Running | None]) -> Running | None:
        """What `answer` gives.

        Raises:
            _Gone: the client has left before that; `answer` was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        self._answering = True
        self.closed.add_done_callback(lambda _: task.cancel() if self._answering else None)
        running: Running | None = None
        try:
            running = await answer
        except asyncio.CancelledError:
            if self.closed.done() and task.uncancel() == 0:
                raise _Gone from None
            raise
        finally:
            self._answering = False
            if running is None:
                self.closed.cancel()
        return running


_NONE: dict[str, Any] = {}


def _nothing() -> None:
    """A server without the extension: what it is given is dropped instead."""
