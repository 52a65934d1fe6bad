"""HTTP routes for the route declarations of contracts (`handlers.route_declarations`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from container.http.request_head import RequestHead
from container.http.route import AppState, Found, HttpRoute
from container.http.router import ANY_METHOD, WITH_SLASHES, ByKind, Router
from container.models.registry import Model
from engines.errors import NotServed, RequestError
from handlers.contract import Call, Reply, ReplyWriter, Running
from handlers.djl_errors import front_end_refusal
from handlers.loaded_service import Service
from handlers.management import MAX_BODY, Management
from handlers.parsing.forms import form_text, is_form
from handlers.parsing.json_limits import JsonDecoder, off_the_loop
from handlers.route_declarations import (
    OWN_HANDLER,
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    InvocationRoute,
    ManagementRoute,
    ModelView,
    RenderedChat,
    Route,
    takes,
)

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"
_NO_CHATS = "chats need the vLLM engine (option.rolling_batch=vllm)"

# The contracts' own health routes. Like `/ping`, they need no API key for GET requests.
_PROBES = ("/", "/health", "/liveness", "/readiness", "/v2/health/live", "/v2/health/ready")
# Paths that vLLM serves in addition to the paths of its contract.
_OF_FASTAPI = ("/health", "/metrics", "/docs", "/openapi.json")

_LONG_TEXT = 4096  # Bytes. Requests with longer bodies are answered in a thread, because tokenizing takes long.
_THREADS = 2  # The number of such requests that are answered at a time. Each may take seconds and 256 MB.

T = TypeVar("T")


def add_contracts(router: Router, state: AppState, contracts: Sequence[ContractRoutes]) -> None:
    """Add the routes that contracts declare, except the routes for management."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    declarations: dict[tuple[str, str], list[tuple[Route, HttpRoute]]] = {}
    for contract in contracts:
        for declared in contract.routes:
            match declared:
                case GenerationRoute():
                    route: HttpRoute = _GenerationHttpRoute(state, contract, declared)
                case InvocationRoute():
                    route = _InvocationHttpRoute(state, contract, declared)
                case InfoRoute():
                    route = _InfoHttpRoute(state, contract, declared, threads)
                case ManagementRoute():
                    continue
            for method in declared.methods:
                declarations.setdefault((declared.path, method), []).append((declared, route))
    for (path, method), routes in declarations.items():
        without_key = path in _PROBES and method in ("GET", "HEAD")
        router.add(path, method, _of_kind(routes), without_key=without_key)
    for contract in contracts:
        paths = [route.path for route in contract.routes if isinstance(route, GenerationRoute | InfoRoute)]
        for path in paths:
            _refuse_other_methods(router, state, contract, path)
        for path in (*paths, *_OF_FASTAPI) if contract.redirects else ():
            _redirect(router, state, contract, path)


def add_management(
    router: Router, state: AppState, contracts: Iterable[ContractRoutes], management: Management
) -> None:
    """Add the routes that manage models and adapters."""
    for contract in contracts:
        for declared in contract.routes:
            if not isinstance(declared, ManagementRoute):
                continue
            route = _ManagementHttpRoute(state, contract, declared, management)
            for method in declared.methods:
                router.add(declared.path, method, route)
            if declared.wrong_method is None:
                _refuse_other_methods(router, state, contract, declared.path, same_site=True)
            if contract.redirects:
                _redirect(router, state, contract, declared.path, refuse=declared.refuse, same_site=True)


def _of_kind(routes: Sequence[tuple[Route, HttpRoute]]) -> HttpRoute | ByKind:
    """Return the route for a path and method. If there are two, the kind of the model decides which one answers."""
    generating, pooling = (
        [(declared, route) for declared, route in routes if takes(declared, pooling=pools)] for pools in (False, True)
    )
    if generating == pooling or not generating or not pooling:
        return _shared(generating or pooling)
    return ByKind(_shared(generating), _shared(pooling))


def _shared(routes: Sequence[tuple[Route, HttpRoute]]) -> HttpRoute:
    """Return the only route, or a route that chooses between two routes by a field of the body."""
    if len(routes) == 1:
        return routes[0][1]
    for (declared, route), (_, other) in (routes, reversed(routes)):
        if isinstance(declared, GenerationRoute | InfoRoute) and declared.with_field is not None:
            return _FieldChoice(declared.with_field, route, other)
    raise AssertionError(f"several contracts declare {routes[0][1].path}")


class _GenerationHttpRoute(HttpRoute):
    """A route that generates text, vectors or scores. The path or, in some contracts, the body names the model."""

    def __init__(self, state: AppState, contract: ContractRoutes, declared: GenerationRoute) -> None:
        super().__init__(state, contract, declared.path)
        self.by_attribute, self.queued, self._declared = declared.by_attribute, declared.queued, declared

    def find(self, head: RequestHead) -> Found:
        if self.contract.body_names_model and self.state.models.only is None:
            return None
        return self._model(head, "")

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        return self._model(head, await _name_in_body(self, call))

    def _model(self, head: RequestHead, named: str) -> Model | Reply:
        model = self.state.models.called(head.path_parameters, named)
        if self._declared.refuse_path is not None:
            return self._declared.refuse_path(head.path_parameters, model.lifecycle.config) or model
        return model

    def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> Awaitable[Running | None]:
        assert service is not None, "a model was found"
        declared, custom = self._declared, service.custom is not None
        if custom and declared.own_handler:
            return service.invocations.handle(call, reply)
        handler = service.openai if declared.contract is None else service.generation.get(declared.path)
        if handler is None:
            unusable = _NOT_VLLM if declared.contract is None else _UNUSABLE
            raise NotServed(OWN_HANDLER if custom else unusable)
        return handler.handle(call, reply)


class _InvocationHttpRoute(HttpRoute):
    """A route that the handler of `/invocations` answers. The request head or a form in the body names the model."""

    queued = True

    def __init__(self, state: AppState, contract: ContractRoutes, declared: InvocationRoute) -> None:
        super().__init__(state, contract, declared.counted)
        self.by_attribute, self._declared = declared.by_attribute, declared

    def names(self, head: RequestHead) -> tuple[str | None, str | None]:
        return self._declared.names(self.state.models, head)

    def find(self, head: RequestHead) -> Found:
        if (refusal := self._declared.refuse_head(head)) is not None:
            return refusal
        name, version = self._declared.names(self.state.models, head)
        if name is None and b"form" in head.headers.get(b"content-type", b"").lower():
            return None
        return self._model(head, name, version)

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        name = await off_the_loop(call.body, form_text, call.body, call.content_type, self._declared.form_field)
        return self._model(head, name, self.names(head)[1])

    def _model(self, head: RequestHead, name: str | None, version: str | None) -> Model | Reply:
        model = self.state.models.startup() if name is None else self.state.models.choose(name, version)
        return self._declared.options if head.method == "OPTIONS" else model

    def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> Awaitable[Running | None]:
        assert service is not None, "a model was found"
        return service.invocations.handle(call, reply)


class _InfoHttpRoute(HttpRoute):
    """A route that describes the model, or processes text without running the model."""

    def __init__(self, state: AppState, contract: ContractRoutes, declared: InfoRoute, threads: Executor) -> None:
        super().__init__(state, contract, declared.path)
        self.by_attribute, self._declared, self._threads = declared.by_attribute, declared, threads

    async def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> None:
        declared, models = self._declared, self.state.models
        if declared.answer_all is not None and models.only is None:
            reply.reply(declared.answer_all(call, [model.lifecycle.view() for model in models]))
            return
        lifecycle = models.called(call.path_parameters, await _name_in_body(self, call)).lifecycle
        view = lifecycle.view()
        if declared.chat is not None and (chat := await self._run(declared.chat, call, view)) is not None:
            view = replace(view, rendered=await _rendered(chat, lifecycle.service))
        reply.reply(await self._run(declared.answer, call, view))

    async def _run(self, function: Callable[[Call, ModelView], T], call: Call, view: ModelView) -> T:
        """Call a function, in a thread if the body is long."""
        if len(call.body) < _LONG_TEXT:
            return function(call, view)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, call, view)


async def _rendered(chat: Call, service: Service | None) -> RenderedChat | RequestError:
    """Return the prompt that is rendered from a chat, or the reason why it cannot be rendered."""
    if service is None or service.openai is None:
        return NotServed(_NO_CHATS)
    try:
        return await service.openai.render(chat)
    except RequestError as error:
        return error


class _ManagementHttpRoute(HttpRoute):
    """Manages models or adapters."""

    def __init__(
        self, state: AppState, contract: ContractRoutes, declared: ManagementRoute, management: Management
    ) -> None:
        path = declared.counted or declared.path
        super().__init__(state, contract, path, refuse=declared.refuse, same_site=True, max_body=MAX_BODY)
        self._declared, self._management = declared, management

    async def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> None:
        operation, wrong_method = self._declared.operations.get(call.method), self._declared.wrong_method
        if operation is not None:
            reply.reply(await operation(call, self._management))
        elif wrong_method is not None:
            reply.reply(wrong_method(call))


class _FieldChoice(HttpRoute):
    """Chooses between two contracts on one path by a field of the body."""

    def __init__(self, field: str, with_field: HttpRoute, without_field: HttpRoute) -> None:
        super().__init__(with_field.state, with_field.contract, with_field.path)
        self.by_attribute = with_field.by_attribute and without_field.by_attribute
        self._with_field, self._without_field = with_field, without_field
        self._field, self._value = field, _reader_of(field)

    async def find_by_body(self, _: RequestHead, call: Call) -> HttpRoute:
        found = await off_the_loop(call.body, self._value, call.body)
        if call.explanation is not None:
            call.explanation.because.append(f"the body has {'a' if found else 'no'} field `{self._field}`")
        return self._with_field if found else self._without_field


def _reader_of(field: str) -> Callable[[bytes], bytes]:
    """Return a function that returns the encoded value of a field of a JSON object.

    The value is empty if the field is missing or null. The value is also empty if the body is not an object:
    the route that answers the request reports that error.
    """
    shape = msgspec.defstruct("WithField", [("field", msgspec.Raw, msgspec.Raw())], rename={"field": field})
    decode = JsonDecoder[Any](shape).decode

    def read(body: bytes) -> bytes:
        try:
            value = bytes(decode(body).field)
        except msgspec.DecodeError:
            return b""
        return b"" if value == b"null" else value

    return read


_model_in = _reader_of("model")


async def _name_in_body(route: HttpRoute, call: Call) -> str:
    """Return the model that a JSON body or a form names. Empty if no model is named, or if the name does not matter."""
    if route.state.models.only is not None or not route.contract.body_names_model:
        return ""
    if is_form(call.content_type):
        return await off_the_loop(call.body, form_text, call.body, call.content_type, "model") or ""
    given = await off_the_loop(call.body, _model_in, call.body)
    try:
        return str(msgspec.json.decode(given)) if given.startswith(b'"') else ""
    except msgspec.DecodeError:
        return ""


def _refuse_other_methods(
    router: Router, state: AppState, contract: ContractRoutes, path: str, *, same_site: bool = False
) -> None:
    """Answer unsupported methods of a path with an error. If CORS is on, browsers' preflights get 200 instead."""
    allow = ("allow", ", ".join(router.methods(path)))

    def reply(head: RequestHead) -> Reply:
        if head.method == "OPTIONS" and state.server_config.cors_allowed_origin and not same_site:
            return Reply(200, "", b"", (allow,))
        refusal = contract.wrong_method(head.call(b""))
        return replace(refusal, headers=(*refusal.headers, allow))

    route = HttpRoute(state, contract, path, refuse=front_end_refusal, reply=reply, same_site=same_site)
    router.add(path, ANY_METHOD, route)


def _redirect(
    router: Router,
    state: AppState,
    contract: ContractRoutes,
    path: str,
    *,
    refuse: Callable[[RequestError], Reply] | None = None,
    same_site: bool = False,
) -> None:
    """Redirect from a path with trailing slashes to the path without them, as FastAPI does.

    The address is relative to the request's address. So the redirect works behind a proxy that removes a path prefix or
    terminates TLS, and never leads to another host. Clients disagree on the meaning of `../` after several slashes. If
    the path ends in several slashes, the address is therefore an absolute path.
    """

    def reply(head: RequestHead) -> Reply:
        if head.method == "OPTIONS" and state.cors_headers:
            return Reply(200, "", b"")  # Browsers do not follow a redirect of a preflight.
        bare = head.raw_path.rstrip(b"/")
        address = bare if head.raw_path.endswith(b"//") else b"../" + bare.rpartition(b"/")[2]
        location = address + (b"?" + head.query if head.query else b"")
        return Reply(307, "", b"", (("location", location.decode("latin-1")),))

    route = HttpRoute(state, contract, path, refuse=refuse, reply=reply, same_site=same_site)
    router.add(path, WITH_SLASHES, route)
