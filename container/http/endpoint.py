"""What every route has in common: from an ASGI request to whoever answers it, and back.

An `Endpoint` reads the request, has it answered, counts and logs. What the server itself has to say (not loaded yet,
body too large, a fault of our own) it says in the error form of the route's contract.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from container.error_rates import CLIENT_GONE, ErrorRates
from container.http.body_limits import UNCOUNTED, BodyMemory, BodyReader, Receive
from container.http.cross_site import KnownHosts
from container.http.reply import Headers, HttpReply, OpenStreams, RetryAfter, Send
from container.http.uvicorn_protocol import BREAK_OFF
from container.logs import access_log
from container.models.registry import Model, ModelNotNamed, Models, NoWorkers
from container.settings.settings import ServerSettings
from engines.errors import (
    BodyTimeout,
    BodyTooLarge,
    CrossSite,
    InternalError,
    NotReady,
    Overloaded,
    RequestError,
    Unauthorized,
    UnknownModel,
)
from engines.statistics import Distribution
from handlers.contract import Call, ContractError, Handler, Reply, Running
from handlers.djl_errors import JSON, front_end_reply
from handlers.entry_point import Service

logger = logging.getLogger("slipway.access")

INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
"""SageMaker's header for the client's own id; it counts where the configured one is absent."""
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
_LOWER = ("x-request-id", "x-synchronous", "x-starting-token", "x-next-token", "x-max-items", "x-priority")
"""Headers that LMI's own documentation writes in lower case."""

_OVERLOADED = (429, 503)
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Scope = dict[str, Any]
Find = Callable[[Scope, dict[bytes, bytes]], "Model | Reply | None"]
"""Finds the model of a request by its head (scope and headers), or a reply where there is nothing more to be read; None
if the body has to be read. May raise RequestError."""
FindByBody = Callable[[Scope, dict[bytes, bytes], Call], Awaitable["Model | Reply | None"]]
"""The same for a whole call, where the head does not say it."""
Wants = Callable[[bytes], Awaitable[bool]]
"""InfoRoute whether an endpoint is meant by a call with this body."""
Answer = Callable[[Call, HttpReply, "Model | None"], Awaitable["Running | None"]]
"""Answers a call, for the model that was found; returns what cancels it, None if the reply is complete. May raise
RequestError and ContractError."""

Refuse = Callable[[RequestError], Reply]
"""Words an error in the form of a route's contract."""


class HttpCounts:
    """Requests by route and status, and how long they took."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.duration = Distribution(_DURATION_BUCKETS)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. The route is one of ours, with `{name}` for what is in a path."""
        self.requests[route, status] += 1
        self.duration.observe(seconds)


class AppState:
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
        self.streams, self.retry_after = OpenStreams(), RetryAfter()
        cors = {
            b"access-control-allow-origin": settings.cors_allowed_origin,
            b"access-control-allow-methods": settings.cors_allowed_methods,
            b"access-control-allow-headers": settings.cors_allowed_headers,
        }
        self.hosts = KnownHosts(settings.allowed_hosts)
        self.bodies = BodyMemory(settings)
        self.cors_headers: Headers = [(name, value.encode("latin-1")) for name, value in cors.items() if value]


class Endpoint:
    """An ASGI application for one path and method."""

    def __init__(
        self,
        state: AppState,
        route: str,
        answer: Answer,
        refuse: Refuse,
        *,
        find: Find = lambda *_: None,
        find_by_body: FindByBody | None = None,
        headers: Headers | None = None,
        wants: Wants | None = None,
        same_site: bool = False,
        queued: bool = False,
        most: int | None = None,
    ) -> None:
        """Take what answers and what words refusals.

        `headers`: of every reply of the route, beside the request's id and CORS. `wants`: `otherwise` takes the calls
        that are not wanted. `same_site`: refuse requests that a browser sends for another site, and send no CORS
        headers. `queued`: every call needs a place in the model's queue, so that a long body is not read while that is
        full. `most`: bytes of a body, if fewer are allowed than by `max_request_size`.
        """
        self._state, self._route = state, route
        self._answer, self._refuse, self._find, self._wants = answer, refuse, find, wants
        self._find_by_body = find_by_body
        self._same_site, self._queued = same_site, queued
        self._headers = [*(headers or []), *([] if same_site else state.cors_headers)]
        settings = state.settings
        self._most = settings.max_request_size if most is None else min(most, settings.max_request_size)
        self.otherwise: Endpoint | None = None
        """Answers calls that this endpoint does not want."""

    def for_strangers(self, method: str = "") -> Endpoint:
        """Return what answers a call without a key, before its body is read: 401 in the form of the contract.

        A browser asks whether it may send a key before it sends one (CORS's preflight); it is told so.
        """
        reply = self._refuse(Unauthorized())
        reply = replace(reply, headers=(*reply.headers, ("www-authenticate", "Bearer")))
        if method == "OPTIONS" and self._state.cors_headers and not self._same_site:
            reply = Reply(200, "", b"")
        return answered_early(self._state, self._route, reply, same_site=self._same_site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()
        state = self._state
        headers: dict[bytes, bytes] = dict(scope["headers"])
        identity = request_id(headers.get(state.id_header) or headers.get(INFERENCE_ID))
        reply_headers = [(b"x-request-id", identity.encode()), *self._headers]
        break_off = scope.get("extensions", {}).get(BREAK_OFF)
        reply = HttpReply(send, reply_headers, state.streams, state.retry_after, break_off)
        state.models.open_calls += 1
        try:
            await self._serve(scope, headers, identity, receive, reply)
        finally:
            reply.close()
            state.models.open_calls -= 1
        seconds = time.perf_counter() - started
        # A client that went away before the end is counted as proxies do.
        status = reply.status if reply.finished else CLIENT_GONE
        state.counts.count(self._route, status, seconds)
        if state.error_rates.limited and state.models.loaded:  # before that, refusals are no errors
            state.error_rates.count(status)
        # Never a query, a prompt or an answer; the path as it was sent, since a decoded one may have line ends.
        path = scope["raw_path"].decode("ascii", "backslashreplace")
        size = reply.bytes_sent
        access_log.add(f"{scope['method']} {path} {status} {seconds * 1000:.1f} ms {size} bytes", identity)

    async def _serve(
        self, scope: Scope, headers: dict[bytes, bytes], identity: str, receive: Receive, reply: HttpReply
    ) -> None:
        endpoint, watch, state = self, _Watch(receive), self._state
        reader = BodyReader(state.bodies)
        running: Running | None = None
        try:
            if self._same_site and (fault := state.hosts.fault(headers)):
                raise CrossSite(fault)
            found = self._find(scope, headers)
            if isinstance(found, Model):
                service = found.service()  # a body that nobody is going to read need not be waited for
                if self._queued and _is_long(headers):
                    service.check_place()
            if not isinstance(found, Reply):
                seconds = state.settings.request_read_timeout
                body = await reader.read(headers, receive, self._most, seconds, state.models.reading)
                if body is None:
                    return
                if self.otherwise is not None and self._wants is not None and not await self._wants(body):
                    endpoint = self.otherwise
                call = _call(scope, headers, body, identity)
                if state.settings.log_prompts:
                    logger.info("body: %s", _shown(body), extra={"request_id": identity})
                if found is None and endpoint._find_by_body is not None:
                    found = await endpoint._find_by_body(scope, headers, call)
            if isinstance(found, Reply):
                reply.reply(found)
            else:
                running = await watch.unless_gone(endpoint._answer(call, reply, found))
        except _Gone:
            return
        except ContractError as error:
            self._log_refusal(error.reason, error.reply, identity)
            reply.reply(error.reply)
        except RequestError as error:
            if isinstance(error, BodyTimeout) and state.models.draining:
                error = NotReady("the server is stopping")
            refusal = endpoint._refuse(error)
            self._log_refusal(error.message, refusal, identity)
            reply.headers.extend(for_the_connection(error, body_read=reader.complete))
            reply.reply(refusal)
        except Exception:
            logger.exception("internal error", extra={"request_id": identity})
            if not reply.status:
                reply.reply(endpoint._refuse(InternalError()))
        finally:
            if running is None:
                reader.let_go()
        if running is None:
            await reply.drain()  # the client may not have taken the reply before this one
            return
        try:
            await watch.closed(running)
        finally:
            reader.let_go()

    def _log_refusal(self, reason: str, reply: Reply, identity: str) -> None:
        # Where the server is full or not ready, the access log's line is enough; another would cost a sixth more.
        level = logging.DEBUG if reply.status in _OVERLOADED else logging.INFO
        logger.log(level, "refused: %s", reason, extra={"request_id": identity})


def answered_early(
    state: AppState, route: str, reply: Reply | Callable[[Call], Reply], *, same_site: bool = False
) -> Endpoint:
    """An endpoint that replies before the body is read, by method and path alone."""

    def find(scope: Scope, _: dict[bytes, bytes]) -> Reply:
        if isinstance(reply, Reply):
            return reply
        return reply(Call(body=b"", request_id="", method=scope["method"], path=scope["path"]))

    async def answer(call: Call, _: HttpReply, __: Model | None) -> None:
        raise AssertionError(f"{call.path} was answered before its body was read")

    return Endpoint(state, route, answer, front_end_refusal, find=find, same_site=same_site)


def handed_to(handler_of: Callable[[Service], Handler]) -> Answer:
    """An answer by one of the handlers of a model's service."""

    async def answer(call: Call, reply: HttpReply, model: Model | None) -> Running | None:
        assert model is not None, "the endpoint's `find` has found it"
        handler = handler_of(model.service())
        model.lifecycle.open_calls += 1
        reply.on_close = model.lifecycle.end_call
        return await handler.handle(call, reply)

    return answer


def front_end_refusal(error: RequestError, not_ready: int = 503, otherwise: int = 500) -> Reply:
    """The error of LMI's front end for a request that could not be read, carried out or handed to a model."""
    match error:
        case BodyTooLarge():
            return Reply(413, JSON, b"")
        case BodyTimeout():
            return front_end_reply(408, "BadRequestException", error.message)
        case ModelNotNamed():
            return front_end_reply(400, "BadRequestException", f"Parameter model_name is required: {error.message}")
        case UnknownModel():
            return front_end_reply(404, "ModelNotFoundException", error.message)
        case NoWorkers():
            return front_end_reply(503, "WlmShutdownException", error.message)
        case Unauthorized():
            return front_end_reply(401, "UnauthorizedException", error.message)
        case CrossSite():
            return front_end_reply(403, "ForbiddenException", error.message)
        case NotReady():
            return front_end_reply(not_ready, "ServiceUnavailableException", error.message)
        case Overloaded():
            return front_end_reply(error.status, "WlmCapacityException", error.message)
        case _:
            return front_end_reply(otherwise, "InternalServerException", error.message)


def request_id(header: bytes | None) -> str:
    """The client's own id if it is short visible ASCII (it is written into headers and logs), else a new UUID."""
    if header is not None and _ACCEPTABLE(header):
        return header.decode("ascii")
    return str(uuid.uuid4())


@lru_cache(maxsize=512)
def _canonical(name: bytes) -> str:
    text = name.decode("latin-1")
    if text in _LOWER or "_" in text:
        return text
    prefix = "x-amzn-sagemaker-"
    if text.startswith(prefix):
        return "X-Amzn-SageMaker-" + "-".join(map(str.capitalize, text.removeprefix(prefix).split("-")))
    return "-".join(map(str.capitalize, text.split("-")))


def _call(scope: Scope, headers: dict[bytes, bytes], body: bytes, identity: str) -> Call:
    query: bytes = scope["query_string"]
    return Call(
        body=body,
        content_type=headers.get(b"content-type", b"").decode("latin-1"),
        request_id=identity,
        headers=tuple([(_canonical(name), value.decode("latin-1")) for name, value in scope["headers"]]),
        query=tuple(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else (),
        method=scope["method"],
        path=scope["path"],
        path_parameters=scope.get("path_params") or {},
    )


def _shown(body: bytes) -> str:
    """Return a body for the log: the first `UNCOUNTED` bytes, since a line of many megabytes holds up the process."""
    text = body[:UNCOUNTED].decode(errors="replace")
    return text if len(body) <= UNCOUNTED else f"{text}... ({len(body)} bytes)"


def _is_long(headers: dict[bytes, bytes]) -> bool:
    length = headers.get(b"content-length", b"")
    return length.isdigit() and int(length) > UNCOUNTED


def for_the_connection(error: RequestError, *, body_read: bool) -> Headers:
    """Return what a refusal tells about the connection and the next attempt."""
    match error:
        case NotReady():
            return [(b"retry-after", b"5"), (b"connection", b"close")]
        case BodyTooLarge() | BodyTimeout() | Overloaded() if not body_read:
            return [(b"connection", b"close")]  # the rest of the body is not going to be read
        case _:
            return []


class _Gone(Exception):
    """The client has gone before its call reached the engine; the call was cancelled."""


@dataclass(slots=True)
class _Watch:
    """Waits for a client to leave.

    While its call is on the way to the engine, a task listens for that, but only once the call waits for something,
    such as the tokens of a long prompt; most calls reach the engine without.
    """

    _receive: Receive
    _answering: asyncio.Task[None] | None = None
    """The task that is cancelled if the client leaves."""
    _listener: asyncio.Task[None] | None = None

    async def unless_gone(self, answer: Awaitable[Running | None]) -> Running | None:
        """What `answer` gives.

        Raises:
            _Gone: the client has left before that; `answer` was cancelled.
        """
        self._answering = task = asyncio.current_task()
        assert task is not None
        listen = asyncio.get_running_loop().call_soon(self._listen)
        running: Running | None = None
        try:
            running = await answer
        except asyncio.CancelledError:
            if self._listener is not None and self._listener.done() and task.uncancel() == 0:
                raise _Gone from None
            raise
        finally:
            self._answering = None
            listen.cancel()
            if self._listener is not None and running is None:
                self._listener.cancel()
        return running

    def _listen(self) -> None:
        self._listener = asyncio.create_task(disconnected(self._receive))
        self._listener.add_done_callback(self._gone)

    def _gone(self, _: object) -> None:
        if self._answering is not None:
            self._answering.cancel()

    async def closed(self, running: Running) -> None:
        """Wait until the reply is complete or the client has gone, and then cancel what runs for it."""
        try:
            await (self._listener or disconnected(self._receive))
        finally:
            running.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the reply is complete or the client has gone; ASGI reports both as a disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
