"""The route table. `Router.dispatch` decides which route answers a request."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.routing import compile_path

from container.http.custom_attributes import CUSTOM_ATTRIBUTES, is_plain_path, named_route
from container.http.request_head import REQUEST_ID, RequestHead
from container.http.route import HttpRoute
from engines.errors import SHOWN, InvalidRequest, UnknownModel
from handlers.contract import Reply
from handlers.route_declarations import MODEL_VERSION

Application = Callable[[Any, Any, Any], Awaitable[None]]

ANY_METHOD = "*"  # The entry for all methods that have no other entry for the path.
WITH_SLASHES = "/"  # This key replaces the method. Its entry serves the path with trailing slashes.
FOR_BROWSERS = "text/html"  # This key replaces the method. Its entry serves GET to clients that accept text/html.
_ENCODED_SLASH = re.compile("%2f", re.IGNORECASE)
# LMI's paths, which may end in slashes (DJL Serving, `InferenceRequestHandler` and `ManagementRequestHandler`). vLLM
# and happy_vllm redirect such a path (`WITH_SLASHES`). In other contracts, such a path is unknown.
_ENDS_IN_SLASHES = re.compile(r"/(?:ping|invocations|predictions|models|adapters|workflows|server)(?:/.*)?/").fullmatch
# Replaces an encoded slash while a route is looked up. An encoded slash is part of a name, not a separator (RFC 3986,
# section 2.2). No decoded path contains this character.
_SLASH_IN_NAME = "\udc2f"
_ROUTE = "`route` in X-Amzn-SageMaker-Custom-Attributes"


@dataclass(frozen=True, slots=True)
class Mount:
    """Another application, for the paths below a prefix. The container's own routes take precedence."""

    prefix: str
    application: Application
    endpoints: tuple[str, ...] = ()  # The SageMaker endpoints that the application serves, for the console.
    # Waits for the application's background work to finish, at most for the given number of seconds.
    drain: Callable[[float], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class ByKind:
    """The routes of two contracts for one path. The kind of the model decides which route answers.

    The kind may be unknown if the server has several models, or if the model is not loaded yet. In that case,
    `generating` answers, the route for models that generate text.
    """

    generating: HttpRoute
    pooling: HttpRoute

    def route(self, head: RequestHead) -> HttpRoute:
        """Return the route for a request."""
        try:
            service = self.generating.state.models.called(head.path_parameters).lifecycle.service
        except UnknownModel:
            service = None
        return self.generating if service is None or service.pooling is None else self.pooling


Entry = Application | HttpRoute | ByKind


class Router:
    """An ASGI application that passes each request to its route. Most paths are found without a search."""

    def __init__(
        self,
        not_found: Application | HttpRoute,
        mounts: Sequence[Mount] = (),
        not_found_below: Mapping[str, HttpRoute] | None = None,
        id_header: bytes = REQUEST_ID,
    ) -> None:
        """Create a router without routes.

        Args:
            not_found: Answers paths that are not served.
            mounts: Further applications.
            not_found_below: Maps prefixes of contracts to the routes that answer unknown paths below them.
            id_header: The header with the client's request id, in lower case.
        """
        self._plain: dict[str, dict[str, Entry]] = {}
        # Sorted by the number of parameters: `/models/{model}/invoke` precedes `/models/{model}/{version}`.
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Entry]]] = {}
        self._mounts = tuple(mounts)
        self._not_found = not_found
        self._not_found_below = sorted((not_found_below or {}).items(), key=lambda known: len(known[0]), reverse=True)
        self._open: set[tuple[str, str]] = set()
        self.id_header = id_header

    def add(self, path: str, method: str, entry: Entry, *, without_key: bool = False) -> None:
        """Serve a path.

        If a path and method are added twice, the first entry is kept.

        Args:
            path: The path, in which `{name}` stands for a segment.
            method: An HTTP method, `ANY_METHOD`, `WITH_SLASHES` or `FOR_BROWSERS`.
            entry: Serves the requests.
            without_key: Whether callers need no API key even if the server has keys. The path must have no `{name}`.
        """
        if without_key:
            self._open.add((path, method))
        if "{" not in path:
            self._plain.setdefault(path, {}).setdefault(method, entry)
            return
        if path not in self._patterns:
            self._patterns[path] = (compile_path(path)[0], {})
            self._patterns = dict(sorted(self._patterns.items(), key=lambda known: known[0].count("{")))
        self._patterns[path][1].setdefault(method, entry)

    def methods(self, path: str) -> list[str]:
        """Return the HTTP methods that were added for a path, sorted."""
        methods = self._patterns[path][1] if path in self._patterns else self._plain.get(path, {})
        return sorted(methods.keys() - {ANY_METHOD, WITH_SLASHES, FOR_BROWSERS})

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return asyncio.sleep(0)  # Other connections, such as WebSockets, are ignored.
        head = RequestHead(scope, self.id_header)
        route, refusal = self.dispatch(head)
        if isinstance(route, HttpRoute):
            return route.serve(head, refusal, receive, send)
        # Starlette's key "app". Through it, a mounted application can call the container's own routes.
        scope.setdefault("app", self)
        return route(scope, receive, send)

    def dispatch(self, head: RequestHead) -> tuple[Application | HttpRoute, Reply | None]:
        """Decide which route answers a request. The route itself finds the model.

        The head then holds the path's parameters and the path to answer.

        Returns:
            The route, and a refusal if the attribute `route` is invalid.
        """
        route = self._entry(head)
        if isinstance(route, ByKind):
            return route.route(head), None
        if head.attributes and isinstance(route, HttpRoute):
            named = named_route(head.headers[CUSTOM_ATTRIBUTES])
            if named is not None and (names := route.names(head)) is not None:
                return self._named(head, route, names, named)
        return route, None

    def _named(
        self, head: RequestHead, route: HttpRoute, names: tuple[str | None, str | None], named: bytes
    ) -> tuple[HttpRoute, Reply | None]:
        """Return the route that the request's attribute `route` names. It replaces the route of the request's path.

        Args:
            head: The request.
            route: The route of the request's own path.
            names: The names of the model and the version in the head.
            named: The value of the attribute.
        """
        target = copy.copy(head)
        target.path, target.raw_path, target.path_parameters = named.decode("latin-1"), named, {}
        other = self._entry(target) if is_plain_path(named) else None
        if isinstance(other, ByKind):
            other = other.route(target)
        if not isinstance(other, HttpRoute) or not other.by_attribute:
            fault = (
                f"{_ROUTE} must be the path of a POST route that generates or tokenizes, such as /v1/chat/completions, "
                f"got {head.method} {named[:SHOWN].decode('latin-1')}"
            )
            return route, route.refuse(InvalidRequest(fault))
        asked, given = head.path_parameters.get("model"), target.path_parameters.get("model")
        if asked and given and asked != given:
            # SageMaker has chosen the model of a multi-model endpoint, and may have checked the client's rights to the
            # model.
            fault = f"{_ROUTE} must not name another model than {asked}, which the call is for, got {given}"
            return route, route.refuse(InvalidRequest(fault))
        name, version = names
        if not target.path_parameters and name is not None:
            try:
                route.state.models.versions(name, version)
            except UnknownModel as error:
                return route, route.refuse(error)
            target.path_parameters = {"model": name} | ({} if version is None else {MODEL_VERSION: version})
        head.path, head.raw_path, head.path_parameters = target.path, target.raw_path, target.path_parameters
        return other, None

    def _entry(self, head: RequestHead) -> Entry:
        """Return the table's entry for a path and method. The head then holds the path's parameters.

        Trailing slashes that LMI allows are also removed from the head, because contracts compare paths.
        """
        path = served = head.path if b"%2" not in head.raw_path else _with_marked_slashes(head)
        if path.endswith("/"):
            bare = path.rstrip("/")
            methods = (self._plain.get(bare) or self._match(head, bare)) if bare else None
            if methods is not None and WITH_SLASHES in methods:
                return methods[WITH_SLASHES]
            served = without_slashes(path)
        methods = self._plain.get(served) or self._match(head, served)
        if methods is None:
            mounted = next((mount.application for mount in self._mounts if path.startswith(mount.prefix)), None)
            return mounted or self._unknown(head)
        if served != path:
            head.path = head.path[: len(served) - len(path)]
            head.raw_path = head.raw_path.rstrip(b"/")
        method = head.method
        if FOR_BROWSERS in methods and method == "GET" and b"text/html" in head.headers.get(b"accept", b""):
            return methods[FOR_BROWSERS]
        # HEAD is served on every path that has GET (RFC 9110, section 9.1). The HTTP server omits the body.
        found = methods.get(method) or methods.get(ANY_METHOD) or (methods.get("GET") if method == "HEAD" else None)
        return found or self._unknown(head)

    def _match(self, head: RequestHead, path: str) -> dict[str, Entry] | None:
        for pattern, methods in self._patterns.values():
            if (found := pattern.fullmatch(path)) is not None:
                head.path_parameters = {
                    key: text.replace(_SLASH_IN_NAME, "/") for key, text in found.groupdict().items()
                }
                return methods
        return None

    def _unknown(self, head: RequestHead) -> Application | HttpRoute:
        path = head.raw_path.decode("latin-1") + "/"
        return next((route for prefix, route in self._not_found_below if path.startswith(prefix)), self._not_found)

    def is_open(self, head: RequestHead) -> bool:
        """Return True if a request needs no API key."""
        path = without_slashes(head.path if b"%2" not in head.raw_path else _with_marked_slashes(head))
        if path.endswith("/") and WITH_SLASHES in self._plain.get(path.rstrip("/"), {}):
            path = path.rstrip("/")
        methods = (ANY_METHOD, "GET" if head.method == "HEAD" else head.method)
        return any((path, method) in self._open for method in methods)


def without_slashes(path: str) -> str:
    """Return one of LMI's paths without its trailing slashes, and any other path unchanged."""
    return path.rstrip("/") if path.endswith("/") and _ENDS_IN_SLASHES(path) else path


def _with_marked_slashes(head: RequestHead) -> str:
    return unquote(_ENCODED_SLASH.sub(_SLASH_IN_NAME, head.raw_path.decode("ascii")))
