"""Serves a route: reads each request, has the request answered, counts it and logs it.

A route also writes the server's errors (model not loaded yet, body too large, internal error), so that they have the
form of the route's contract.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from container.http.body_limits import UNCOUNTED, BodyMemory, BodyReader, Receive, announced_size
from container.http.cross_site import KnownHosts
from container.http.disconnect import ClientGone, DisconnectWatch
from container.http.reply import OVERLOADED, Headers, HttpReply, RetryAfter, Send
from container.http.request_head import LONGEST_PATH, REQUEST_ID, RequestHead
from container.http.uvicorn_protocol import BREAK_OFF, received_body
from container.models.life_cycle import Lifecycle
from container.models.registry import Model, Models
from container.observability.error_rates import CLIENT_GONE, ErrorRates
from container.observability.logs import access_log
from container.settings.server import ServerConfig
from engines.errors import (
    BodyTimeout,
    BodyTooLarge,
    CrossSite,
    InternalError,
    InvalidParameter,
    NotReady,
    Overloaded,
    RequestError,
    Unauthorized,
)
from engines.statistics import Distribution
from handlers.contract import Call, ContractError, Reply, ReplyWriter, Running, asked_explanation
from handlers.explanation import explain
from handlers.loaded_service import Service
from handlers.route_declarations import ContractRoutes

logger = logging.getLogger("slipway.access")

_DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# The model of a request, or the reply to the request. None if the choice needs the body, or if the route needs no
# model.
Found = Model | Reply | None


class HttpCounts:
    """Counts requests by route and status, and measures their durations."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.duration = Distribution(_DURATION_BUCKETS)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is a path of the route table, with `{name}` for variable parts."""
        self.requests[route, status] += 1
        self.duration.observe(seconds)


class AppState:
    """The objects that all routes of one server share."""

    def __init__(self, models: Models, server_config: ServerConfig, counts: HttpCounts) -> None:
        self.models, self.server_config, self.counts = models, server_config, counts
        self.error_rates = ErrorRates(
            {
                "wlm": server_config.error_rate_wlm,
                "server": server_config.error_rate_server,
                "model": server_config.error_rate_model,
                "any": server_config.error_rate_any,
            },
            refusals=frozenset({server_config.throttle_error_http_code, server_config.wlm_error_http_code}),
        )
        self.searches = asyncio.Lock()  # Held while an explained call searches for the fields that set each parameter.
        self.id_header = server_config.request_id_header.lower().encode()
        self.retry_after = RetryAfter()
        cors = {
            b"access-control-allow-origin": server_config.cors_allowed_origin,
            b"access-control-allow-methods": server_config.cors_allowed_methods,
            b"access-control-allow-headers": server_config.cors_allowed_headers,
        }
        self.hosts = KnownHosts(server_config.allowed_hosts)
        self.bodies = BodyMemory(server_config)
        self.cors_headers: Headers = [(name, value.encode("latin-1")) for name, value in cors.items() if value]


class HttpRoute:
    """Serves one path and method: reads requests, has them answered, counts them and logs them.

    A subclass finds the model of a request (`find`, `find_by_body`), and answers the request (`answer`).
    """

    # Whether the custom attribute `route` may name this route. Only routes that infer or process text allow this.
    by_attribute = False
    # Whether every call needs a place in the model's queue. If True and the queue is full, a long body is not read.
    queued = False

    def __init__(
        self,
        state: AppState,
        contract: ContractRoutes,
        path: str,
        *,
        refuse: Callable[[RequestError], Reply] | None = None,
        reply: Callable[[RequestHead], Reply] | None = None,
        same_site: bool = False,
        max_body: int | None = None,
    ) -> None:
        """Create the route.

        Args:
            state: The objects that all routes share.
            contract: The contract of the route.
            path: The path in the route table, for counts.
            refuse: Returns the reply to a request that failed, if the contract's own form is not used.
            reply: Returns the reply to every request, if the head alone decides it.
            same_site: Whether to refuse requests that browsers send for pages of other sites. The replies to
                other requests then have no CORS headers.
            max_body: The largest body in bytes, if that is less than the setting `max_request_size`.
        """
        self.state, self.contract, self.path, self.refuse = state, contract, path, refuse or contract.refuse
        self._reply, self._same_site = reply, same_site
        self._cors_headers: Headers = [] if same_site else state.cors_headers
        own = contract.headers if reply is None else ()
        self._headers: Headers = [*((name.encode(), value.encode()) for name, value in own), *self._cors_headers]
        self._id_header = contract.id_header.encode() if contract.id_header else None
        limit = state.server_config.max_request_size
        self._max_body = limit if max_body is None else min(max_body, limit)
        self._short_body = min(UNCOUNTED, self._max_body)

    def find(self, head: RequestHead) -> Found:
        """Return the model of a request, or the reply to the request.

        Return None if only `find_by_body` can find the model, or if the route needs no model.

        Raises:
            RequestError: The request is refused.
        """
        return None if self._reply is None else self._reply(head)

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply | HttpRoute | None:
        """Return the model of a request, the reply to the request, or another route that answers the request.

        This method is called if `find` has returned None.

        Raises:
            RequestError: The request is refused.
        """
        return None

    async def explain(
        self, head: RequestHead, call: Call, reply: ReplyWriter, service: Service | None
    ) -> Running | None:
        """Explain a call instead of answering it. A route that generates nothing answers the call as usual.

        Raises:
            ContractError: The call is refused with the reply in the error.
            RequestError: The call is refused.
        """
        if not self.state.server_config.explain:
            off = InvalidParameter("X-Slipway-Explain", "is off on this server (SERVING_EXPLAIN=false)")
            call = replace(call, steering_fault=call.steering_fault or off)
        assert call.explanation is not None
        call.explanation.contract = self.contract.name
        named = any(name == b"route" for name, _ in head.attributes)
        place = f"the path that `route` names, {head.path}," if named else f"the path {head.path}"
        call.explanation.because.insert(0, f"{place} is {self.contract.name}'s")
        return await explain(call, partial(self.answer, service=service), reply, self.state.searches)

    def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> Awaitable[Running | None]:
        """Answer a call. `service` is the model's service, or None if the route needs no model.

        Raises:
            ContractError: The call is refused with the reply in the error.
            RequestError: The call is refused.
        """
        raise NotImplementedError

    def names(self, head: RequestHead) -> tuple[str | None, str | None] | None:
        """Return the names of the model and of the version in a request head.

        None if SageMaker's custom attribute `route` has no effect on this route.
        """
        return None

    def unauthorized(self, method: str = "", *, in_browser: bool = False) -> Reply:
        """Return the refusal of a call without a key. If CORS is on, preflights are answered without a key."""
        if method == "OPTIONS" and self._cors_headers:
            return Reply(200, "", b"")
        reply = self.refuse(Unauthorized(in_browser=in_browser))
        return replace(reply, headers=(*reply.headers, ("www-authenticate", "Bearer")))

    async def serve(self, head: RequestHead, refusal: Reply | None, receive: Receive, send: Send) -> None:
        """Serve one request. `refusal` is the reply if the request was refused before its model was looked up."""
        started = time.perf_counter()
        state, request_id = self.state, head.request_id.encode()
        route: HttpRoute = self
        ids: Headers = [(REQUEST_ID, request_id)]
        if self._id_header is not None:
            ids.append((self._id_header, request_id))
        bare: Headers = [*ids, *self._cors_headers]  # The reply's headers without the contract's headers.
        break_off = head.scope.get("extensions", {}).get(BREAK_OFF)
        headers = [*ids, *self._headers] if refusal is None else bare
        reply = HttpReply(send, headers, state.retry_after, break_off)
        watch = DisconnectWatch(receive)
        body: bytes | None = None
        reader: BodyReader | None = None
        running: Running | None = None
        lifecycle: Lifecycle | None = None  # The life cycle of the model that answers the call.
        state.models.open_calls[head] = self.path, started
        try:
            try:
                if self._same_site and (fault := state.hosts.fault(head.headers)):
                    raise CrossSite(fault)
                found = self.find(head) if refusal is None else refusal
                service = found.service() if isinstance(found, Model) else None  # May refuse the call.
                if found is None or service is not None:
                    body = received_body(receive, self._short_body)
                    if body is None:
                        if service is not None and self.queued and announced_size(head.headers) > UNCOUNTED:
                            explanation, _ = asked_explanation(head.headers, head.attributes)
                            # `refuse_if_full` counts a failed call. A call that asks for an explanation must not be
                            # counted. Its handler checks the queue instead.
                            if explanation is None:
                                service.refuse_if_full()
                        # The service is looked up again, because it may change while the body is read.
                        reader, service = BodyReader(state.bodies), None
                        seconds, waits = state.server_config.request_read_timeout, state.models.reading
                        body = await reader.read(head.headers, receive, self._max_body, seconds, waits)
                if body is not None:
                    call = head.call(body)
                    if state.server_config.log_prompts:
                        logger.info("body: %s", _shown(body), extra={"request_id": head.request_id})
                    while found is None and (told := await route.find_by_body(head, call)) is not None:
                        if isinstance(told, HttpRoute):
                            route = told
                        else:
                            found = told
                if isinstance(found, Reply):
                    reply.headers = bare
                    reply.reply(found)
                elif body is not None:  # The client has not left.
                    if found is not None:
                        service, lifecycle = service or found.service(), found.lifecycle
                        lifecycle.open_calls += 1
                    if call.explanation is None:
                        running = await watch.unless_gone(route.answer(call, reply, service))
                    else:
                        running = await watch.unless_gone(route.explain(head, call, reply, service))
            except ClientGone:
                pass
            except Exception as error:
                route._refuse(error, head, reply, body_read=body is not None)
            if running is not None:
                head.running = running
                try:
                    await watch.closed_or_complete()
                finally:
                    running.cancel()
            else:
                if reader is not None:
                    reader.let_go()
                await reply.drain()  # The reply has to wait if the client has not read the previous reply yet.
        finally:
            if reader is not None:
                reader.let_go()
            if lifecycle is not None:
                lifecycle.open_calls -= 1
            del state.models.open_calls[head]
        seconds = time.perf_counter() - started
        # If the client left before the end, the call is counted with 499, the status that nginx uses.
        status = reply.status if reply.finished else CLIENT_GONE
        state.counts.count(self.path, status, seconds)
        # The client or the model's options set the deadline, so a reply that ended at it is no error. Refusals while
        # no model is loaded are no errors, either.
        if state.error_rates.limited and state.models.loaded and not reply.ended_at_deadline:
            state.error_rates.count(status)
        # The access log has no queries, prompts or answers. The path is logged in its encoded form, because a decoded
        # path may contain line ends.
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
            if isinstance(error, NotReady):
                reply.headers += [(b"retry-after", b"5"), (b"connection", b"close")]
            elif not body_read and isinstance(error, BodyTooLarge | BodyTimeout | Overloaded):
                reply.headers.append((b"connection", b"close"))  # The rest of the body is never read.
        else:
            logger.error("internal error", exc_info=error, extra=extra)
            if not reply.status:
                reply.reply(self.refuse(InternalError()))
            return
        # If the server is full or not ready, the line in the access log is enough. A second line would add a sixth
        # to the cost of a refusal.
        level = logging.DEBUG if refusal.status in OVERLOADED else logging.INFO
        logger.log(level, "refused: %s", reason, extra=extra)
        reply.reply(refusal)


def _shown(body: bytes) -> str:
    """Return the first `UNCOUNTED` bytes of a body for the log. A line of many megabytes would stall the process."""
    text = body[:UNCOUNTED].decode(errors="replace")
    return text if len(body) <= UNCOUNTED else f"{text}... ({len(body)} bytes)"
