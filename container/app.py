"""Creates the ASGI applications of the server, and adds every route to the route table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import FileResponse, HTMLResponse, Response

from container.api_keys import ApiKeys
from container.batch_transform import execution_parameters
from container.console import page as console
from container.console.state import console_state
from container.contract_routes import add_contracts, add_management
from container.http.cross_site import KnownHosts
from container.http.request_head import KEY_SALT, RequestHead
from container.http.route import AppState, HttpCounts, HttpRoute
from container.http.router import ANY_METHOD, FOR_BROWSERS, Application, Mount, Router
from container.models.management import ModelManagement
from container.models.registration import Registrar
from container.models.registry import Models
from container.observability.black_box import BlackBoxes
from container.observability.metrics import Metrics
from container.observability.prometheus_text import CONTENT_TYPE
from container.observability.traffic_capture import RecordFiles, RequestCapture
from container.openapi import openapi_document, swagger_assets, swagger_page
from container.ping import ping
from container.settings.server import ServerConfig
from container.settings.settings import ServerReport
from engines.errors import CrossSite
from engines.statistics import Distribution
from handlers.all_contracts import all_contracts
from handlers.contract import JSON, Call, Reply
from handlers.djl_errors import front_end_refusal
from handlers.model_config import ModelConfig

# The API description shows this model if the server has several models or no models.
_ANY_CONFIG = ModelConfig(name="{model}", model_dir=Path(), model_id="")


@dataclass(frozen=True, slots=True)
class Applications:
    """The application of each listener."""

    router: Router  # The main listener's router. The server's own calls go to it directly, without an API key.
    management_router: Router | None  # None if the main listener also serves the management API.
    keys: ApiKeys | None
    refusal: HttpRoute  # Refuses calls without a key to the server's pages and to mounted applications.
    records: RecordFiles | None = None  # The files for the records of inference requests.

    @property
    def main(self) -> Application:
        return self.guarded(self.router)

    @property
    def management(self) -> Application | None:
        router = self.management_router
        return None if router is None else self._guarded(router, router)

    def guarded(self, application: Application) -> Application:
        """Return an application that checks the API key, records inference requests, and calls `application`.

        It checks keys only if the server has keys, and records requests only if the server has a directory for records.
        `application` serves the main routes.
        """
        if self.records is not None:
            application = RequestCapture(application, self._infers, self.records)
        return self._guarded(application, self.router)

    def _infers(self, scope: Any) -> bool:
        """Return True if a request is for a route that runs inference or tokenizes."""
        if scope["method"] in ("HEAD", "OPTIONS"):
            return False
        route, _ = self.router.dispatch(head := RequestHead(scope))
        return isinstance(route, HttpRoute) and (route.by_attribute or route.names(head) is not None)

    def _guarded(self, application: Application, router: Router) -> Application:
        return application if self.keys is None else _Guarded(application, router, self.keys, self.refusal)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Forwards each call that has an API key to an application. Calls without a key reach only the open routes.

    The application does not receive the key.
    """

    application: Application
    router: Router  # The routes that the application serves.
    keys: ApiKeys
    refusal: HttpRoute  # Refuses calls without a key to the server's pages and to mounted applications.

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if scope["type"] == "http":
            found_key = self.keys.taken_from(scope["headers"])
            if found_key is not None:
                headers, salt = found_key
                scope = {**scope, "headers": headers, KEY_SALT: salt}
            elif not self.router.is_open(head := RequestHead(scope, self.router.id_header)):
                route, _ = self.router.dispatch(head)
                if isinstance(route, HttpRoute):
                    return route.serve(head, route.unauthorized(head.method), receive, send)
                in_browser = b"text/html" in head.headers.get(b"accept", b"")
                return self.refusal.serve(head, self.refusal.unauthorized(in_browser=in_browser), receive, send)
        return self.application(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the server itself. Requests for it are neither counted nor logged."""

    show: Callable[[], Response | Awaitable[Response]]
    hosts: KnownHosts | None = None  # Refuses other sites' requests. None if the page reveals nothing about the server.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.hosts is not None and (fault := self.hosts.fault(dict(scope["headers"]))):
            response = _response(front_end_refusal(CrossSite(fault)))
        else:
            shown = self.show()
            response = shown if isinstance(shown, Response) else await shown
        await response(scope, receive, send)


def create_app(
    models: Models,
    server_config: ServerConfig,
    registrar: Registrar,
    mounts: Sequence[Mount] = (),
    lag: Distribution | None = None,
    report: ServerReport | None = None,
    boxes: BlackBoxes | None = None,
) -> Applications:
    """Create the applications of one server.

    Args:
        models: The server's models.
        server_config: The server's settings.
        registrar: Loads and unloads models for the management API.
        mounts: Further applications that the main listener serves.
        lag: Delays of the event loop in seconds, for `/metrics`.
        report: The server's settings with their sources, for the console. None if the server has exactly one model:
            the model's report then contains these settings.
        boxes: The black boxes. Clients that may manage models can read the current box.
    """
    counts = HttpCounts()
    state = AppState(models, server_config, counts)
    contracts = all_contracts(server_config.wlm_error_http_code, server_config.server_error_http_code)
    below = {
        prefix: HttpRoute(
            state,
            contract,
            "unknown",
            reply=partial(_not_found, contract.not_found),
        )
        for contract in contracts
        if contract.not_found is not None
        for prefix in contract.prefixes
    }
    not_found = below["/"]
    router = Router(not_found, mounts, below, state.id_header)
    options = _Page(lambda: Response(b"{}\n", media_type=JSON))
    router.add("/", "OPTIONS", options)
    management = router
    if server_config.management_address is not None:
        management = Router(not_found, (), below, state.id_header)
        management.add("/", "OPTIONS", options)
    _add_server_pages(router, state, Metrics(models, counts, lag))
    if server_config.console:
        endpoints = tuple(name for mount in mounts for name in mount.endpoints)
        for path, file in console.files().items():
            router.add(path, "GET", file, without_key=True)
        for listener in (router, management):
            show = partial(console_state, state, report, endpoints, management=listener is management)
            listener.add("/console/state", "GET", _Page(show, state.hosts))
        router.add("/", FOR_BROWSERS, console.front_page())
    if boxes is not None:
        management.add("/server/blackbox", "GET", _Page(boxes.page, state.hosts))
    add_contracts(router, state, contracts)
    add_management(
        management, state, contracts, ModelManagement(models, registrar, multi_model=server_config.multi_model)
    )
    return Applications(
        router,
        None if management is router else management,
        server_config.api_keys,
        not_found,
        None if server_config.capture is None else RecordFiles(Path(server_config.capture)),
    )


def _add_server_pages(router: Router, state: AppState, metrics: Metrics) -> None:
    """Add `/ping`, `/execution-parameters`, `/metrics`, and the API description."""
    models = state.models
    health = _Page(lambda: _response(ping(models, state.server_config, state.error_rates)))
    router.add("/ping", ANY_METHOD, health, without_key=True)
    transform = _Page(lambda: _response(execution_parameters(models, state.server_config)))
    router.add("/execution-parameters", "GET", transform)
    rendered = _Page(lambda: Response(metrics.render(), headers={"content-type": CONTENT_TYPE}), state.hosts)
    for address in ("/metrics", "/server/metrics"):  # LMI serves both paths.
        router.add(address, "GET", rendered)
    router.add("/openapi.json", "GET", _Page(partial(asyncio.to_thread, _Description(models)), state.hosts))
    assets = swagger_assets()
    if assets:
        name = _ANY_CONFIG.name if models.only is None else models.only.name
        router.add("/docs", "GET", _Page(lambda: HTMLResponse(swagger_page(f"Slipway: {name}"))))
    for file, (path, kind) in assets.items():
        router.add(f"/docs/{file}", "GET", _Page(partial(FileResponse, path, media_type=kind)))


def _not_found(reply: Callable[[Call], Reply], head: RequestHead) -> Reply:
    return reply(head.call(b""))


class _Description:
    """The reply of `/openapi.json`. vLLM's own routes are added once a model is loaded. Adding them takes a second.

    vLLM's routes depend on the kind of the model. If a server has models of several kinds, the reply contains the
    routes of all kinds.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._document = b""
        self._of_kinds: dict[str, dict[str, Any]] = {}  # vLLM's API description for each kind of model.

    def __call__(self) -> Response:
        new = not self._document
        for model in self._models:
            service = model.lifecycle.service
            if service is None or service.openai is None:
                continue
            kind = "generation" if service.pooling is None else service.pooling.kind
            if kind not in self._of_kinds:
                self._of_kinds[kind], new = service.openai.openapi(), True
        if new:
            paths: dict[str, Any] = {}
            schemas: dict[str, Any] = {}  # Schemas with the same name are the same for all kinds of models.
            for document in self._of_kinds.values():
                paths |= document.get("paths", {})
                schemas |= document.get("components", {}).get("schemas", {})
            only = self._models.only
            config = _ANY_CONFIG if only is None else only.lifecycle.config
            content = openapi_document(config, {"paths": paths, "components": {"schemas": schemas}})
            self._document = msgspec.json.encode(content)
        return Response(self._document, media_type=JSON)


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.content_type})
