"""The ASGI applications of the server: adds every route to the route table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import FileResponse, HTMLResponse, Response

from container.adapter_management import adapter_routes
from container.api_keys import ApiKeys
from container.batch_transform import execution_parameters
from container.console import page as console
from container.console.state import console_state
from container.contract_routes import contract_http_routes
from container.health import ping
from container.http.body_limits import Receive
from container.http.cross_site import KnownHosts
from container.http.refusals import front_end_refusal
from container.http.reply import Send
from container.http.request_head import KEY_SALT, LONGEST_PATH, RequestHead, Scope
from container.http.route import AppState, FixedReplyRoute, HttpCounts, HttpRoute, SlashRedirectRoute
from container.http.router import ANY_METHOD, WITH_SLASHES, Application, Mount, Router
from container.invocations import InvocationsRoute
from container.metrics import Metrics
from container.model_management import model_routes, wrong_method
from container.models.registration import Registrar
from container.models.registry import Models
from container.openapi import openapi_document, swagger_assets, swagger_page
from container.prometheus_text import CONTENT_TYPE
from container.request_capture import RecordFiles, RequestCapture
from container.settings.settings import ServerReport, ServerSettings
from engines.errors import CrossSite, RequestError
from engines.model_settings import ModelSettings
from engines.statistics import Distribution
from handlers.all_contracts import CONTRACTS
from handlers.contract import JSON, Call, Reply
from handlers.contract_routes import ContractRoutes
from handlers.djl_errors import front_end_reply
from handlers.openai.handler import OpenAIHandler

_INFERENCE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
# The contracts' own health routes. Like `/ping`, they need no API key if they are asked with GET.
_PROBES = ("/", "/health", "/liveness", "/readiness", "/v2/health/live", "/v2/health/ready")
# Paths that vLLM has as well, besides those of its contract.
_OF_FASTAPI = ("/health", "/metrics", "/docs", "/openapi.json")
# The API description shows this model if the server has several models, or none yet.
_ANY_MODEL = ModelSettings(name="{model}", model_dir=Path(), model_id="")


@dataclass(frozen=True, slots=True)
class Applications:
    """The application of each listener."""

    router: Router  # Of the main listener. The process itself calls it without an API key.
    management_router: Router | None  # None if the main listener serves the management API as well.
    keys: ApiKeys | None
    refusal: HttpRoute  # Refuses calls without a key to paths that are not served.
    records: RecordFiles | None = None  # Get the records of inference requests.

    @property
    def main(self) -> Application:
        return self.guarded(self.router)

    @property
    def management(self) -> Application | None:
        router = self.management_router
        return None if router is None else self._guarded(router, router)

    def guarded(self, application: Application) -> Application:
        """Return an application in front of the main routes that asks for an API key if the server has keys.

        It records inference requests if the server has a directory for them.
        """
        if self.records is not None:
            application = RequestCapture(application, self._infers, self.records)
        return self._guarded(application, self.router)

    def _infers(self, scope: Any) -> bool:
        """Return True if a request is for a route that infers or tokenizes."""
        if scope["method"] in ("HEAD", "OPTIONS"):
            return False
        route = self.router.find({**scope})  # A copy: the search adds the parameters of the path.
        return isinstance(route, InvocationsRoute) or (isinstance(route, HttpRoute) and route.by_attribute)

    def _guarded(self, application: Application, router: Router) -> Application:
        return application if self.keys is None else _Guarded(application, router, self.keys, self.refusal)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Passes calls with an API key on to an application. Calls without a key reach only the open routes.

    The application does not get the key.
    """

    application: Application
    router: Router  # Has the routes that the application serves.
    keys: ApiKeys
    refusal: HttpRoute  # Refuses calls without a key to paths that are not served.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            found_key = self.keys.taken_from(scope["headers"])
            if found_key is not None:
                headers, salt = found_key
                scope = {**scope, "headers": headers, KEY_SALT: salt}
            elif not self.router.is_open(scope):
                found = self.router.find(scope)
                if isinstance(found, HttpRoute):
                    refusal = found.chosen(scope).unauthorized(scope["method"])
                else:
                    refusal = self.refusal
                await refusal(scope, receive, send)
                return
        await self.application(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of the server itself. It is neither counted nor logged."""

    show: Callable[[], Response]
    hosts: KnownHosts | None = None  # Refuses other sites' requests. None if the page says nothing about the server.
    in_thread: bool = False  # `show` may take long.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.hosts is not None and (fault := self.hosts.fault(dict(scope["headers"]))):
            response = _response(front_end_refusal(CrossSite(fault)))
        else:
            response = await asyncio.to_thread(self.show) if self.in_thread else self.show()
        await response(scope, receive, send)


class _NotFoundRoute(HttpRoute):
    """Answers paths that are not served: in the form of the contract with their prefix, or else in LMI's."""

    def __init__(self, state: AppState, contract: ContractRoutes | None = None) -> None:
        super().__init__(state, "unknown", id_header=contract.id_header if contract else None)
        self._contract = contract
        owners = {} if contract else {prefix: owner for owner in CONTRACTS for prefix in owner.prefixes}
        longest_first = sorted(owners, key=len, reverse=True)
        self._of_contracts = {prefix: _NotFoundRoute(state, owners[prefix]) for prefix in longest_first}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await HttpRoute.__call__(self.chosen(scope), scope, receive, send)

    def chosen(self, scope: Scope) -> HttpRoute:
        path = scope["raw_path"].decode("latin-1") + "/"
        return next((route for prefix, route in self._of_contracts.items() if path.startswith(prefix)), self)

    def refuse(self, error: RequestError) -> Reply:
        return super().refuse(error) if self._contract is None else self._contract.refuse(error)

    def find(self, head: RequestHead) -> Reply:
        path = head.scope["path"]
        if self._contract is not None and self._contract.not_found is not None:
            return self._contract.not_found(Call(body=b"", request_id="", method=head.method, path=path))
        return front_end_reply(
            404, "ResourceNotFoundException", f"Requested resource is not found: {path[:LONGEST_PATH]}"
        )


class _WrongMethodRoute(HttpRoute):
    """Answers the methods that a path does not have."""

    def __init__(
        self,
        state: AppState,
        path: str,
        refusal: Callable[[Call], Reply],
        allow: Sequence[tuple[str, str]],
        *,
        same_site: bool = False,
        id_header: str | None = None,
    ) -> None:
        super().__init__(state, path, same_site=same_site, id_header=id_header)
        self._refusal, self._allow = refusal, allow

    def find(self, head: RequestHead) -> Reply:
        reply = self._refusal(Call(body=b"", request_id="", method=head.method, path=head.scope["path"]))
        return replace(reply, headers=(*reply.headers, *self._allow))


def create_app(
    models: Models,
    settings: ServerSettings,
    registrar: Registrar,
    mounts: Sequence[Mount] = (),
    lag: Distribution | None = None,
    report: ServerReport | None = None,
) -> Applications:
    """Create the applications of one server.

    Args:
        models: The server's models.
        settings: The server's settings.
        registrar: Loads and unloads models for the management API.
        mounts: Further applications that the main listener serves.
        lag: Delays of the event loop in seconds, for `/metrics`.
        report: Origins of the server's settings, for the console. None: the report of the server's one model.
    """
    counts = HttpCounts()
    state = AppState(models, settings, counts)
    not_found = _NotFoundRoute(state)
    router = Router(not_found, mounts)
    options = _Page(lambda: Response(b"{}\n", media_type=JSON))
    router.add("/", "OPTIONS", options)
    management = router
    if settings.management_address is not None:
        management = Router(not_found)
        management.add("/", "OPTIONS", options)
    for path in _INFERENCE:
        counted = "/predictions" if path.startswith("/predictions") else path
        router.add(path, ANY_METHOD, InvocationsRoute(state, counted, router))
    _add_server_pages(router, state, Metrics(models, counts, lag))
    contract_routes: dict[tuple[str, str], Application] = dict(contract_http_routes(state, CONTRACTS))
    if settings.console:
        endpoints = tuple(name for mount in mounts for name in mount.endpoints)
        for path, file in console.files().items():
            router.add(path, "GET", file, without_key=True)
        for listener in (router, management):
            show = partial(console_state, state, report, endpoints, management=listener is management)
            listener.add("/console/state", "GET", _Page(show, state.hosts))
        contract_routes["/", "GET"] = console.for_browsers(contract_routes["/", "GET"])
    _add_contracts(router, state, contract_routes)
    _add_management(management, state, registrar)
    return Applications(
        router,
        None if management is router else management,
        settings.api_keys,
        not_found.unauthorized(),
        None if settings.capture is None else RecordFiles(Path(settings.capture)),
    )


def _add_server_pages(router: Router, state: AppState, metrics: Metrics) -> None:
    """Add `/ping`, `/execution-parameters`, `/metrics`, and the API description."""
    models = state.models
    health = _Page(lambda: _response(ping(models, state.settings, state.error_rates)))
    router.add("/ping", ANY_METHOD, health, without_key=True)
    transform = _Page(lambda: _response(execution_parameters(models, state.settings)))
    router.add("/execution-parameters", "GET", transform)
    rendered = _Page(lambda: Response(metrics.render(), headers={"content-type": CONTENT_TYPE}), state.hosts)
    for address in ("/metrics", "/server/metrics"):  # LMI has both.
        router.add(address, "GET", rendered)
    router.add("/openapi.json", "GET", _Page(_Description(models), state.hosts, in_thread=True))
    assets = swagger_assets()
    if assets:
        name = models.startup().name if models.single else _ANY_MODEL.name
        router.add("/docs", "GET", _Page(lambda: HTMLResponse(swagger_page(f"Slipway: {name}"))))
    for file, (path, kind) in assets.items():
        router.add(f"/docs/{file}", "GET", _Page(partial(FileResponse, path, media_type=kind)))


def _add_contracts(router: Router, state: AppState, routes: Mapping[tuple[str, str], Application]) -> None:
    for (path, method), route in routes.items():
        router.add(path, method, route, without_key=path in _PROBES and method in ("GET", "HEAD"))
    for contract in CONTRACTS:
        for declared in contract.routes:
            _refuse_other_methods(router, state, declared.path, contract.wrong_method, id_header=contract.id_header)
    for contract in CONTRACTS:
        for path in (*(declared.path for declared in contract.routes), *_OF_FASTAPI) if contract.redirects else ():
            redirect = SlashRedirectRoute(state, path, contract.refuse, id_header=contract.id_header)
            router.add(path, WITH_SLASHES, redirect)


def _add_management(router: Router, state: AppState, registrar: Registrar) -> None:
    for path, route in adapter_routes(state):
        router.add(path, ANY_METHOD, route)
        if path.startswith("/v1/"):  # vLLM's. LMI's paths may end in slashes.
            router.add(path, WITH_SLASHES, SlashRedirectRoute(state, path, route.refuse, same_site=True))
    of_models = list(model_routes(state, registrar))
    for path, method, operation in of_models:
        router.add(path, method, operation)
    for path, _, _ in of_models:
        _refuse_other_methods(router, state, path, lambda _: wrong_method(), same_site=True)


def _refuse_other_methods(
    router: Router,
    state: AppState,
    path: str,
    refusal: Callable[[Call], Reply],
    *,
    same_site: bool = False,
    id_header: str | None = None,
) -> None:
    """Answer the methods that a path does not have: with an error, and browsers' preflights if CORS is on."""
    allow = (("allow", ", ".join(router.methods(path))),)
    route = _WrongMethodRoute(state, path, refusal, allow, same_site=same_site, id_header=id_header)
    router.add(path, ANY_METHOD, route)
    if state.settings.cors_allowed_origin and not same_site:
        router.add(path, "OPTIONS", FixedReplyRoute(state, path, Reply(200, "", b"", allow)))


class _Description:
    """The API description. vLLM's own routes are added once a model is loaded, which takes a second.

    vLLM has routes for each kind of model. If the server has models of several kinds, it has the routes of all.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._document = b""
        self._of_kinds: dict[str, dict[str, Any]] = {}  # vLLM's documents, by the kind of the model.

    def __call__(self) -> Response:
        new = self._new_kinds()
        if new or not self._document:
            self._of_kinds |= {kind: openai.openapi() for kind, openai in new.items()}
            model = self._models.startup().lifecycle.model if self._models.single else _ANY_MODEL
            content = openapi_document(model, _union(list(self._of_kinds.values())))
            self._document = msgspec.json.format(msgspec.json.encode(content), indent=2)
        return Response(self._document, media_type=JSON)

    def _new_kinds(self) -> dict[str, OpenAIHandler]:
        found: dict[str, OpenAIHandler] = {}
        for model in self._models:
            service = model.lifecycle.service
            if service is None or service.openai is None:
                continue
            kind: str = "generation" if service.pooling is None else service.pooling.kind
            if kind not in self._of_kinds:
                found[kind] = service.openai
        return found


def _union(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the paths and the schemas of all documents. A name means the same in each."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for document in documents:
        paths |= document.get("paths", {})
        schemas |= document.get("components", {}).get("schemas", {})
    return {"paths": paths, "components": {"schemas": schemas}}


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.content_type})
