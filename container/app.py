"""The ASGI application: every route, in one table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import compile_path

from container.api_keys import ApiKeys
from container.console import page as console
from container.console.state import console_state
from container.contract_routes import family_endpoints
from container.health import ping
from container.http.cross_site import KnownHosts
from container.http.endpoint import AppState, Endpoint, HttpCounts, answered_early, front_end_refusal
from container.invocations import invocations
from container.management import adapter_routes, management_endpoints, wrong_method
from container.metrics import CONTENT_TYPE, Metrics
from container.models.registration import Registrar
from container.models.registry import Models
from container.openapi import openapi_document, swagger_assets, swagger_page
from container.settings.settings import ServerReport, ServerSettings
from engines.errors import CrossSite
from engines.model_settings import ModelSettings
from engines.statistics import Distribution
from handlers.contract import Call, Reply
from handlers.contracts import CONTRACTS
from handlers.djl_errors import JSON, front_end_reply

Application = Callable[[Any, Any, Any], Awaitable[None]]

_ANY = "*"
"""All methods that a path has nothing else for."""
_INFERENCE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
_PROBES = ("/", "/health", "/liveness", "/readiness", "/v2/health/live", "/v2/health/ready")
"""Paths of the families' own that are asked with GET for the health; like `/ping`, they need no key."""
_ENCODED_SLASH = re.compile("%2f", re.IGNORECASE)
_SLASH_OF_NAME = "\udc2f"
"""Stands for an encoded slash while a route is looked for: that is a character of a name, and separates nothing
(RFC 3986, section 2.2). No path that is decoded has it."""
_ANY_MODEL = ModelSettings(name="{model}", model_dir=Path(), model_id="")
"""What the API description shows where there are several models, or none yet."""


@dataclass(frozen=True, slots=True)
class Mount:
    """An application of someone else for the paths below a prefix; the container's own routes go first."""

    prefix: str
    application: Application
    endpoints: tuple[str, ...] = ()
    """Names of SageMaker's endpoints that it serves, for the console."""


class Routes:
    """Dispatches by path, then by method. Paths without parameters, nearly all that is called, need no search."""

    def __init__(self, not_found: Application, mounts: Sequence[Mount] = ()) -> None:
        self._plain: dict[str, dict[str, Application]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Application]]] = {}
        """Those with the fewest parameters first: `/models/{model}/invoke` before `/models/{model}/{version}`."""
        self._mounts = tuple(mounts)
        self._not_found = not_found
        self._open: set[tuple[str, str]] = set()

    def add(self, path: str, method: str, application: Application, *, without_key: bool = False) -> None:
        """Serve a path, which may have `{name}` for a segment; what was added first stays.

        `without_key`: callers need no key for it, also if the server asks for keys. Such a path has no `{name}`.
        """
        if without_key:
            self._open.add((path, method))
        if "{" not in path:
            self._plain.setdefault(path, {}).setdefault(method, application)
            return
        if path not in self._patterns:
            self._patterns[path] = (compile_path(path)[0], {})
            self._patterns = dict(sorted(self._patterns.items(), key=lambda known: known[0].count("{")))
        self._patterns[path][1].setdefault(method, application)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.find(scope)(scope, receive, send)

    def find(self, scope: Any) -> Application:
        """Return what serves a request."""
        path = _path(scope)
        methods = self._plain.get(path) or self._match(scope, path)
        if methods is None:
            scope["app"] = self  # Starlette's key: a mounted application may call the container's own routes
            return next((m.application for m in self._mounts if path.startswith(m.prefix)), self._not_found)
        return methods.get(scope["method"]) or methods.get(_ANY) or self._head(scope["method"], methods)

    def is_open(self, scope: Any) -> bool:
        """Tell whether a request needs no key."""
        path, method = _path(scope), scope["method"]
        return not self._open.isdisjoint({(path, _ANY), (path, "GET" if method == "HEAD" else method)})

    def _head(self, method: str, methods: Mapping[str, Application]) -> Application:
        """HEAD is served wherever GET is (RFC 9110, section 9.1); the HTTP server leaves the body out."""
        return (methods.get("GET") if method == "HEAD" else None) or self._not_found

    def _match(self, scope: Any, path: str) -> Mapping[str, Application] | None:
        for pattern, methods in self._patterns.values():
            if (found := pattern.fullmatch(path)) is not None:
                scope["path_params"] = {
                    key: text.replace(_SLASH_OF_NAME, "/") for key, text in found.groupdict().items()
                }
                return methods
        return None

    def methods(self, path: str) -> list[str]:
        methods = self._patterns[path][1] if path in self._patterns else self._plain.get(path, {})
        return sorted(methods.keys() - {_ANY})


def _path(scope: Any) -> str:
    if b"%2" not in scope["raw_path"]:
        path: str = scope["path"]
        return path
    return unquote(_ENCODED_SLASH.sub(_SLASH_OF_NAME, scope["raw_path"].decode("ascii")))


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Lets callers with a key reach an application, without the key; others reach open routes alone."""

    application: Application
    routes: Routes
    """Those that the application serves."""
    keys: ApiKeys
    elsewhere: Endpoint
    """Refuses calls that no endpoint would answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = self.keys.taken_from(scope["headers"])
            if headers is not None:
                scope = {**scope, "headers": headers}
            elif not self.routes.is_open(scope):
                found = self.routes.find(scope)
                refusal = found.for_strangers(scope["method"]) if isinstance(found, Endpoint) else self.elsewhere
                await refusal(scope, receive, send)
                return
        await self.application(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Applications:
    """The application of each listener."""

    routes: Routes
    """The main listener's routes. The process itself calls these: they ask for no key."""
    management_routes: Routes | None
    """None: the main ones have the management API as well."""
    keys: ApiKeys | None
    refusal: Endpoint
    """Refuses calls without a key that no endpoint would answer."""

    @property
    def main(self) -> Application:
        return self.guarded(self.routes)

    @property
    def management(self) -> Application | None:
        routes = self.management_routes
        return None if routes is None else self._guarded(routes, routes)

    def guarded(self, application: Application) -> Application:
        """Return an application before the main routes, which asks for a key if the server does."""
        return self._guarded(application, self.routes)

    def _guarded(self, application: Application, routes: Routes) -> Application:
        return application if self.keys is None else _Guarded(application, routes, self.keys, self.refusal)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the server's own, which is neither counted nor logged."""

    show: Callable[[], Response]
    hosts: KnownHosts | None = None
    """Refuses other sites' requests; None if the page tells nothing about the server."""
    in_thread: bool = False
    """`show` may take long."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.hosts is not None and (fault := self.hosts.fault(dict(scope["headers"]))):
            response = _response(front_end_refusal(CrossSite(fault)))
        else:
            response = await asyncio.to_thread(self.show) if self.in_thread else self.show()
        await response(scope, receive, send)


def create_app(
    models: Models,
    settings: ServerSettings,
    registrar: Registrar,
    mounts: Sequence[Mount] = (),
    lag: Distribution | None = None,
    report: ServerReport | None = None,
) -> Applications:
    """The applications of one server, and whatever is mounted beside them.

    `lag`: of the event loop, in seconds. `report`: where the server's settings came from; None: from its one model's.
    """
    counts = HttpCounts()
    state = AppState(models, settings, counts)
    metrics = Metrics(models, counts, lag)
    not_found = answered_early(state, "unknown", _not_found)
    options = _Page(lambda: Response(b"{}\n", media_type=JSON))

    routes = Routes(not_found, mounts)
    for path in _INFERENCE:
        routes.add(path, _ANY, invocations(state, "/predictions" if path.startswith("/predictions") else path))
    health = _Page(lambda: _response(ping(models, settings, state.error_rates)))
    routes.add("/ping", _ANY, health, without_key=True)
    rendered = _Page(lambda: Response(metrics.render(), headers={"content-type": CONTENT_TYPE}), state.hosts)
    routes.add("/metrics", "GET", rendered)
    _add_description(routes, models, state.hosts)
    routes.add("/", "OPTIONS", options)
    management = routes
    if settings.management_address is not None:
        management = Routes(not_found)
        management.add("/", "OPTIONS", options)
    endpoints: dict[tuple[str, str], Application] = dict(family_endpoints(state, CONTRACTS))
    if settings.console:
        names = tuple(name for mount in mounts for name in mount.endpoints)
        for path, file in console.files().items():
            routes.add(path, "GET", file, without_key=True)
        for listener in (routes, management):
            show = partial(console_state, state, report, names, management=listener is management)
            listener.add("/console/state", "GET", _Page(show, state.hosts))
        endpoints["/", "GET"] = console.for_browsers(endpoints["/", "GET"])
    for (path, method), endpoint in endpoints.items():
        routes.add(path, method, endpoint, without_key=path in _PROBES and method in ("GET", "HEAD"))
    for family in CONTRACTS:
        for route in family.routes:
            _refuse_other_methods(routes, state, route.path, family.wrong_method)
    own = list(management_endpoints(state, registrar))
    for path, method, endpoint in (*adapter_routes(state), *own):
        management.add(path, method, endpoint)
    for path, _, _ in own:
        _refuse_other_methods(management, state, path, lambda _: wrong_method(), same_site=True)
    separate = None if management is routes else management
    return Applications(routes, separate, settings.api_keys, not_found.for_strangers())


def _refuse_other_methods(
    routes: Routes,
    state: AppState,
    path: str,
    wrong_method: Callable[[Call], Reply],
    *,
    same_site: bool = False,
) -> None:
    """Answer the methods that a path does not have: with an error, and browsers' preflights if CORS is on."""
    allow = (("allow", ", ".join(routes.methods(path))),)

    def reply(call: Call) -> Reply:
        refusal = wrong_method(call)
        return replace(refusal, headers=(*refusal.headers, *allow))

    routes.add(path, _ANY, answered_early(state, path, reply, same_site=same_site))
    if state.settings.cors_allowed_origin and not same_site:
        routes.add(path, "OPTIONS", answered_early(state, path, Reply(200, "", b"", allow)))


class _Description:
    """The API description, which grows by vLLM's own routes once a model is loaded; that takes a second."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._document, self._complete = b"", False

    def __call__(self) -> Response:
        openai = next((s.openai for m in self._models if (s := m.lifecycle.service) and s.openai), None)
        if not self._document or (openai is not None and not self._complete):
            model = self._models.startup().lifecycle.model if self._models.single else _ANY_MODEL
            content = openapi_document(model, openai.openapi() if openai is not None else None)
            self._document = msgspec.json.format(msgspec.json.encode(content), indent=2)
            self._complete = openai is not None
        return Response(self._document, media_type=JSON)


def _add_description(routes: Routes, models: Models, hosts: KnownHosts) -> None:
    routes.add("/openapi.json", "GET", _Page(_Description(models), hosts, in_thread=True))
    assets = swagger_assets()
    if assets:
        name = models.startup().name if models.single else _ANY_MODEL.name
        routes.add("/docs", "GET", _Page(lambda: HTMLResponse(swagger_page(f"Slipway: {name}"))))
    for file, (path, kind) in assets.items():
        routes.add(f"/docs/{file}", "GET", _Page(partial(FileResponse, path, media_type=kind)))


def _not_found(call: Call) -> Reply:
    """The error of a path that is not served: of the family whose prefix it has, or else LMI's."""
    for family in CONTRACTS:
        if family.prefix and family.not_found and call.path.startswith(family.prefix):
            return family.not_found(call)
    message = f"Requested resource is not found: {call.path}"
    return front_end_reply(404, "ResourceNotFoundException", message)


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.content_type})
