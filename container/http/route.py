"""The base of every route: an ASGI application that reads a request, has it answered, counts it and logs it.

A subclass says which model a call is for, how it is answered, and how an error is worded. It words the server's errors
as well (model not loaded yet, body too large, internal error), so that these have the form of the route's contract.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from container.error_rates import CLIENT_GONE, ErrorRates
from container.http.body_limits import UNCOUNTED, BodyMemory, BodyReader, Receive, announced_size
from container.http.cross_site import KnownHosts
from container.http.disconnect import ClientGone, DisconnectWatch
from container.http.refusals import connection_headers, front_end_refusal
from container.http.reply import Headers, HttpReply, OpenStreams, RetryAfter, Send
from container.http.request_head import LONGEST_PATH, RequestHead, Scope
from container.http.uvicorn_protocol import BREAK_OFF
from container.logs import access_log
from container.models.registry import Model, Models
from container.settings.settings import ServerSettings
from engines.errors import BodyTimeout, CrossSite, InternalError, InvalidRequest, NotReady, RequestError, Unauthorized
from engines.statistics import Distribution
from handlers.contract import Call, ContractError, Handler, Reply, Running
from handlers.service import Service

logger = logging.getLogger("slipway.access")

_OVERLOADED = (429, 503)
_TOO_DEEP = "the body is nested too deeply"
_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpCounts:
    """Requests by route and status, and their durations."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.duration = Distribution(_DURATION_BUCKETS)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is a path of the route table, with `{name}` for variable parts."""
        self.requests[route, status] += 1
        self.duration.observe(seconds)


class AppState:
    """The objects that all routes of one server share."""

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


class HttpRoute:
    """An ASGI application for one path and method. Subclasses override the methods up to `answer`."""

    def __init__(
        self,
        state: AppState,
        path: str,
        *,
        headers: Headers | None = None,
        same_site: bool = False,
        queued: bool = False,
        max_body: int | None = None,
        by_attribute: bool = False,
        id_header: str | None = None,
    ) -> None:
        """Create the route.

        Args:
            state: The objects that all routes share.
            path: The path in the route table, for counts.
            headers: Headers of every reply, beside the request's id and CORS.
            same_site: Refuse requests that a browser sends for a page of another site, and send no CORS headers.
            queued: Every call needs a place in the model's queue. If that is full, a long body is not read.
            max_body: The largest body in bytes, if it is smaller than the setting `max_request_size`.
            by_attribute: The attribute `route` of SageMaker's custom attributes may name it.
            id_header: The contract's name for the header with the request's id, which replies have besides.
        """
        self.state, self.path, self.by_attribute = state, path, by_attribute
        self._same_site, self._queued = same_site, queued
        self._headers = [*(headers or []), *([] if same_site else state.cors_headers)]
        # Headers of every reply. They have the request's id.
        self.id_headers: tuple[bytes, ...] = (b"x-request-id", *([id_header.encode()] if id_header else []))
        limit = state.settings.max_request_size
        self._max_body = limit if max_body is None else min(max_body, limit)

    def refuse(self, error: RequestError) -> Reply:
        """Return the reply to a request that failed, in the form of the route's contract."""
        return front_end_refusal(error)

    def find(self, head: RequestHead) -> Model | Reply | None:
        """Find the model of a request by its head.

        Returns:
            The model; a reply if the request is answered without its body; None if the body has to be read first.

        Raises:
            RequestError: The request is refused.
        """
        return None

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply | None:
        """Find the model if `find` did not. Returns None if the route answers without a model."""
        return None

    async def for_body(self, body: bytes) -> HttpRoute:
        """Return the route that answers a request with this body.

        It is a different route only if two routes share the path.
        """
        return self

    async def answer(self, call: Call, reply: HttpReply, model: Model | None) -> Running | None:
        """Answer a call.

        Returns:
            The running call, or None if the reply is complete.

        Raises:
            RequestError: The call is refused. `refuse` makes the reply.
            ContractError: The call is refused. The error holds the reply.
        """
        raise NotImplementedError

    def chosen(self, scope: Scope) -> HttpRoute:
        """Return the route that answers a request by its head. A header may name a route other than this one."""
        return self

    def unauthorized(self, method: str = "") -> HttpRoute:
        """Return the route that refuses this route's calls if they have no key: 401 in the form of the contract.

        It answers before the body is read. It lets browsers ask whether they may send a key (CORS's preflight).
        """
        reply = self.refuse(Unauthorized())
        reply = replace(reply, headers=(*reply.headers, ("www-authenticate", "Bearer")))
        if method == "OPTIONS" and self.state.cors_headers and not self._same_site:
            reply = Reply(200, "", b"")
        route = FixedReplyRoute(self.state, self.path, reply, same_site=self._same_site)
        route.id_headers = self.id_headers
        return route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()
        state = self.state
        head = RequestHead.of(scope, state.id_header)
        reply_headers = [*[(name, head.request_id.encode()) for name in self.id_headers], *self._headers]
        break_off = scope.get("extensions", {}).get(BREAK_OFF)
        reply = HttpReply(send, reply_headers, state.streams, state.retry_after, break_off)
        state.models.open_calls += 1
        try:
            await self._serve(head, receive, reply)
        finally:
            reply.close()
            state.models.open_calls -= 1
        seconds = time.perf_counter() - started
        # A client that left before the end is counted with the status that proxies use.
        status = reply.status if reply.finished else CLIENT_GONE
        state.counts.count(self.path, status, seconds)
        if state.error_rates.limited and state.models.loaded:  # While models load, refusals do not count as errors.
            state.error_rates.count(status)
        # Queries, prompts and answers are never logged. The path is logged encoded: decoded, it may have line ends.
        path = scope["raw_path"][:LONGEST_PATH].decode("ascii", "backslashreplace")
        size = reply.bytes_sent
        access_log.add(
            f"{scope['method']} {path} {status} {seconds * 1000:.1f} ms {size} bytes",
            reply.request_id or head.request_id,
        )

    async def _serve(self, head: RequestHead, receive: Receive, reply: HttpReply) -> None:
        route, watch, state = self, DisconnectWatch(receive), self.state
        reader = BodyReader(state.bodies)
        running: Running | None = None
        try:
            if self._same_site and (fault := state.hosts.fault(head.headers)):
                raise CrossSite(fault)
            found = self.find(head)
            if isinstance(found, Model):
                service = found.service()  # refuses before the body is read
                if self._queued and announced_size(head.headers) > UNCOUNTED:
                    service.refuse_if_full()
            if not isinstance(found, Reply):
                seconds = state.settings.request_read_timeout
                body = await reader.read(head.headers, receive, self._max_body, seconds, state.models.reading)
                if body is None:
                    return
                route = await self.for_body(body)
                call = head.call(body)
                if state.settings.log_prompts:
                    logger.info("body: %s", _shown(body), extra={"request_id": head.request_id})
                if found is None:
                    found = await route.find_by_body(head, call)
            if isinstance(found, Reply):
                reply.reply(found)
            else:
                running = await watch.unless_gone(route.answer(call, reply, found))
        except ClientGone:
            return
        except ContractError as error:
            _log_refusal(error.reason, error.reply, head)
            reply.reply(error.reply)
        except RequestError as error:
            if isinstance(error, BodyTimeout) and state.models.draining:
                error = NotReady("the server is stopping")
            refusal = route.refuse(error)
            _log_refusal(error.message, refusal, head)
            reply.headers.extend(connection_headers(error, body_read=reader.complete))
            reply.reply(refusal)
        except Exception as error:
            if isinstance(error, RecursionError) and reader.complete and not reply.status:
                # A document can be nested so that it can be read, but not written again further down the stack.
                logger.debug("%s", _TOO_DEEP, exc_info=error, extra={"request_id": head.request_id})
                refusal = route.refuse(InvalidRequest(_TOO_DEEP))
                _log_refusal(_TOO_DEEP, refusal, head)
                reply.reply(refusal)
            else:
                logger.exception("internal error", extra={"request_id": head.request_id})
                if not reply.status:
                    reply.reply(route.refuse(InternalError()))
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


class HandlerRoute(HttpRoute):
    """A route that gives its calls to a handler of the model's service."""

    def handler_of(self, service: Service) -> Handler:
        """Return the handler that answers this route.

        Raises:
            NotServed: The model cannot answer it.
        """
        raise NotImplementedError

    async def answer(self, call: Call, reply: HttpReply, model: Model | None) -> Running | None:
        assert model is not None, "`find` or `find_by_body` has found it"
        handler = self.handler_of(model.service())
        model.lifecycle.open_calls += 1
        reply.on_close = model.lifecycle.end_call
        return await handler.handle(call, reply)


class FixedReplyRoute(HttpRoute):
    """A route that sends the same reply to every request, before the body is read."""

    def __init__(self, state: AppState, path: str, reply: Reply, *, same_site: bool = False) -> None:
        super().__init__(state, path, same_site=same_site)
        self._reply = reply

    def find(self, head: RequestHead) -> Reply:
        return self._reply


class SlashRedirectRoute(HttpRoute):
    """Redirects from a path with slashes at its end to the path without them, as FastAPI does.

    The address is relative to the request's. So it holds behind a proxy that removes a prefix of the path or speaks
    TLS, and never leads to another host. After several slashes it begins at the root, since clients differ in what
    `../` means there.
    """

    def __init__(
        self,
        state: AppState,
        path: str,
        refuse: Callable[[RequestError], Reply],
        *,
        same_site: bool = False,
        id_header: str | None = None,
    ) -> None:
        super().__init__(state, path, same_site=same_site, id_header=id_header)
        self._refuse = refuse

    def refuse(self, error: RequestError) -> Reply:
        return self._refuse(error)

    def find(self, head: RequestHead) -> Reply:
        if head.method == "OPTIONS" and self.state.cors_headers:
            return Reply(200, "", b"")  # Browsers follow no redirect of a preflight.
        path, query = head.scope["raw_path"], head.scope["query_string"]
        bare = path.rstrip(b"/")
        address = bare if path.endswith(b"//") else b"../" + bare.rpartition(b"/")[2]
        location = address + (b"?" + query if query else b"")
        return Reply(307, "", b"", (("location", location.decode("latin-1")),))


def _log_refusal(reason: str, reply: Reply, head: RequestHead) -> None:
    # If the server is full or not ready, the line in the access log is enough. A second line would make a refusal a
    # sixth more expensive.
    level = logging.DEBUG if reply.status in _OVERLOADED else logging.INFO
    logger.log(level, "refused: %s", reason, extra={"request_id": head.request_id})


def _shown(body: bytes) -> str:
    """Return the first `UNCOUNTED` bytes of a body for the log. A line of many megabytes would hold up the process."""
    text = body[:UNCOUNTED].decode(errors="replace")
    return text if len(body) <= UNCOUNTED else f"{text}... ({len(body)} bytes)"
