"""A route: reads a request, has it answered, counts it and logs it.

It words the server's errors as well (model not loaded yet, body too large, internal error), so that these have the form
of the route's contract.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from container.error_rates import CLIENT_GONE, ErrorRates
from container.http.body_limits import UNCOUNTED, BodyMemory, BodyReader, Receive, announced_size
from container.http.cross_site import KnownHosts
from container.http.disconnect import ClientGone, DisconnectWatch
from container.http.refusals import connection_headers
from container.http.reply import Headers, HttpReply, RetryAfter, Send
from container.http.request_head import LONGEST_PATH, REQUEST_ID, RequestHead
from container.http.uvicorn_protocol import BREAK_OFF, received_body
from container.logs import access_log
from container.models.life_cycle import Lifecycle
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

# The model of a request, or the reply or the error with which it is answered. None: the body tells, or the route is for
# no model.
Found = Model | Reply | Exception | None


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
        self.retry_after = RetryAfter()
        cors = {
            b"access-control-allow-origin": settings.cors_allowed_origin,
            b"access-control-allow-methods": settings.cors_allowed_methods,
            b"access-control-allow-headers": settings.cors_allowed_headers,
        }
        self.hosts = KnownHosts(settings.allowed_hosts)
        self.bodies = BodyMemory(settings)
        self.cors_headers: Headers = [(name, value.encode("latin-1")) for name, value in cors.items() if value]


class HttpRoute:
    """One path and method. `Router.dispatch` finds the model, or the reply, of its requests."""

    def __init__(
        self,
        state: AppState,
        path: str,
        refuse: Callable[[RequestError], Reply],
        *,
        find: Callable[[RequestHead], Found] | None = None,
        find_by_body: Callable[[RequestHead, Call], Awaitable[Model | Reply | HttpRoute]] | None = None,
        handler_of: Callable[[Service], Handler] | None = None,
        answer: Callable[[Call, HttpReply], Awaitable[None]] | None = None,
        names: Callable[[RequestHead], tuple[str | None, str | None]] | None = None,
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
            refuse: Returns the reply to a request that failed, in the form of the route's contract.
            find: Finds the model of a request by its head. It may raise RequestError.
            find_by_body: Finds the model if the head does not tell it, or the route that answers in place of this one.
            handler_of: Returns the handler of a model's service that answers. It may raise NotServed.
            answer: Answers requests that are for no model. It may raise RequestError and ContractError.
            names: Returns the names of the model and the version in a head. The attribute `route` of SageMaker's
                custom attributes may name another route in place of such a route.
            headers: Headers of every reply, beside the request's id and CORS. Replies that `find` gives lack them.
            same_site: Refuse requests that a browser sends for a page of another site, and send no CORS headers.
            queued: Every call needs a place in the model's queue. If that is full, a long body is not read.
            max_body: The largest body in bytes, if it is smaller than the setting `max_request_size`.
            by_attribute: The attribute `route` of SageMaker's custom attributes may name it.
            id_header: The contract's name for the header with the request's id, which replies have besides.
        """
        self.state, self.path, self.refuse, self.by_attribute, self.names = state, path, refuse, by_attribute, names
        self.find, self.find_by_body, self.handler_of, self.answer = find, find_by_body, handler_of, answer
        self._same_site, self._queued = same_site, queued
        self._cors_headers: Headers = [] if same_site else state.cors_headers
        self._headers = [*(headers or []), *self._cors_headers]
        self._id_header = id_header.encode() if id_header else None
        limit = state.settings.max_request_size
        self._max_body = limit if max_body is None else min(max_body, limit)
        self._short_body = min(UNCOUNTED, self._max_body)

    def unauthorized(self, method: str = "") -> Reply:
        """Return the refusal of a call without a key. Browsers may ask whether they may send one (CORS's preflight)."""
        if method == "OPTIONS" and self._cors_headers:
            return Reply(200, "", b"")
        reply = self.refuse(Unauthorized())
        return replace(reply, headers=(*reply.headers, ("www-authenticate", "Bearer")))

    async def serve(self, head: RequestHead, found: Found, receive: Receive, send: Send) -> None:
        """Serve one request. `found` is what `Router.dispatch` has found."""
        started = time.perf_counter()
        state, route, request_id = self.state, self, head.request_id.encode()
        headers = [(REQUEST_ID, request_id), *(self._cors_headers if isinstance(found, Reply) else self._headers)]
        if self._id_header is not None:
            headers.insert(1, (self._id_header, request_id))
        break_off = head.scope.get("extensions", {}).get(BREAK_OFF)
        reply = HttpReply(send, headers, state.retry_after, break_off)
        watch = DisconnectWatch(receive)
        body: bytes | None = None
        reader: BodyReader | None = None
        running: Running | None = None
        lifecycle: Lifecycle | None = None  # Of the model that answers.
        state.models.open_calls += 1
        try:
            try:
                if self._same_site and (fault := state.hosts.fault(head.headers)):
                    raise CrossSite(fault)
                service = found.service() if isinstance(found, Model) else None  # refuses before the body is read
                if found is None or service is not None:
                    body = received_body(receive, self._short_body)
                    if body is None:
                        if service is not None and self._queued and announced_size(head.headers) > UNCOUNTED:
                            service.refuse_if_full()
                        reader, service = BodyReader(state.bodies), None  # The service may have changed afterwards.
                        seconds, waits = state.settings.request_read_timeout, state.models.reading
                        body = await reader.read(head.headers, receive, self._max_body, seconds, waits)
                if body is not None:
                    call = head.call(body)
                    if state.settings.log_prompts:
                        logger.info("body: %s", _shown(body), extra={"request_id": head.request_id})
                    while found is None and route.find_by_body is not None:
                        told = await route.find_by_body(head, call)
                        if isinstance(told, HttpRoute):
                            route = told
                        else:
                            found = told
                if isinstance(found, Exception):
                    raise found
                if isinstance(found, Reply):
                    reply.reply(found)
                elif body is None:
                    pass  # The client has left.
                elif found is None:
                    assert route.answer is not None, "a route without a model has it"
                    await watch.unless_gone(route.answer(call, reply))
                else:
                    assert route.handler_of is not None, "a route of a model has it"
                    handler = route.handler_of(service or found.service())
                    lifecycle = found.lifecycle
                    lifecycle.open_calls += 1
                    running = await watch.unless_gone(handler.handle(call, reply))
            except ClientGone:
                pass
            except Exception as error:
                route._refuse(error, head, reply, body_read=body is not None)
            if running is not None:
                try:
                    await watch.closed()
                finally:
                    running.cancel()
            else:
                if reader is not None:
                    reader.let_go()
                await reply.drain()  # the client may not have taken the reply before this one
        finally:
            if reader is not None:
                reader.let_go()
            if lifecycle is not None:
                lifecycle.open_calls -= 1
            state.models.open_calls -= 1
        seconds = time.perf_counter() - started
        # A client that left before the end is counted with the status that proxies use.
        status = reply.status if reply.finished else CLIENT_GONE
        state.counts.count(self.path, status, seconds)
        if state.error_rates.limited and state.models.loaded:  # While models load, refusals do not count as errors.
            state.error_rates.count(status)
        # Queries, prompts and answers are never logged. The path is logged encoded: decoded, it may have line ends.
        path = head.raw_path[:LONGEST_PATH].decode("ascii", "backslashreplace")
        access_log.add(
            f"{head.method} {path} {status} {seconds * 1000:.1f} ms {reply.bytes_sent} bytes",
            reply.request_id or head.request_id,
        )

    def _refuse(self, error: Exception, head: RequestHead, reply: HttpReply, *, body_read: bool) -> None:
        """Answer a request that failed."""
        extra = {"request_id": head.request_id}
        if isinstance(error, ContractError):
            reason, refusal = error.reason, error.reply
        elif isinstance(error, RequestError):
            if isinstance(error, BodyTimeout) and self.state.models.draining:
                error = NotReady("the server is stopping")
            reason, refusal = error.message, self.refuse(error)
            reply.headers.extend(connection_headers(error, body_read=body_read))
        elif isinstance(error, RecursionError) and body_read and not reply.status:
            # A document can be nested so that it can be read, but not written again further down the stack.
            logger.debug("%s", _TOO_DEEP, exc_info=error, extra=extra)
            reason, refusal = _TOO_DEEP, self.refuse(InvalidRequest(_TOO_DEEP))
        else:
            logger.error("internal error", exc_info=error, extra=extra)
            if not reply.status:
                reply.reply(self.refuse(InternalError()))
            return
        # If the server is full or not ready, the line in the access log is enough. A second line would make a refusal
        # a sixth more expensive.
        level = logging.DEBUG if refusal.status in _OVERLOADED else logging.INFO
        logger.log(level, "refused: %s", reason, extra=extra)
        reply.reply(refusal)


def _shown(body: bytes) -> str:
    """Return the first `UNCOUNTED` bytes of a body for the log. A line of many megabytes would hold up the process."""
    text = body[:UNCOUNTED].decode(errors="replace")
    return text if len(body) <= UNCOUNTED else f"{text}... ({len(body)} bytes)"
