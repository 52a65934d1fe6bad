"""HTTP routes for the routes that contracts declare (`handlers.contract_routes`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from container.http.body_limits import Receive
from container.http.reply import HttpReply, Send
from container.http.request_head import RequestHead, Scope
from container.http.route import AppState, HandlerRoute, HttpRoute
from container.models.registry import Model, Models
from engines.errors import NotServed, RequestError, UnknownModel
from handlers.contract import Call, Handler, Reply
from handlers.contract_routes import (
    OWN_HANDLER,
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    ModelView,
    OpenAIRoute,
    RenderedChat,
    takes,
)
from handlers.forms import form_text, is_form
from handlers.json_cost import JsonDecoder, off_the_loop
from handlers.openai.routes import QUEUED
from handlers.service import Service

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"
_NO_CHATS = "chats need the vLLM engine (option.rolling_batch=vllm)"

MODEL_VERSION = "model_version"  # The parameter of the path for the version that SageMaker's attributes name.
_LONG_TEXT = 4096  # Bytes. Longer bodies are answered in a thread: tokenizing takes longer than reading.
_THREADS = 2  # Long bodies that are answered at a time. Each may take seconds, and 256 MB.

T = TypeVar("T")


def contract_http_routes(state: AppState, contracts: Iterable[ContractRoutes]) -> dict[tuple[str, str], HttpRoute]:
    """Return an HTTP route for each path and method that the contracts declare."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    declarations: dict[tuple[str, str], list[InfoHttpRoute | GenerationHttpRoute]] = {}
    for contract in contracts:
        for declared in contract.routes:
            route: InfoHttpRoute | GenerationHttpRoute
            if isinstance(declared, InfoRoute):
                route = InfoHttpRoute(state, contract, declared, threads)
            else:
                route = GenerationHttpRoute(state, contract, declared)
            for method in declared.methods:
                declarations.setdefault((declared.path, method), []).append(route)
    return {key: _of_kind(routes) for key, routes in declarations.items()}


def _of_kind(routes: Sequence[InfoHttpRoute | GenerationHttpRoute]) -> HttpRoute:
    """Return the route of a path and method that contracts declare. The kind of the model may decide between them."""
    generating, pooling = (
        [route for route in routes if takes(route.declared, pooling=pools)] for pools in (False, True)
    )
    if generating == pooling or not generating or not pooling:
        return _shared(generating or pooling)
    return KindHttpRoute(_shared(generating), _shared(pooling))


def _shared(routes: Sequence[InfoHttpRoute | GenerationHttpRoute]) -> HttpRoute:
    """Return the one route, or of two that which takes only bodies with a certain field in front of the other."""
    if len(routes) == 1:
        return routes[0]
    for route, other in (routes, reversed(routes)):
        if route.with_field is not None:
            return SharedHttpRoute(route, route.with_field, other)
    raise AssertionError(f"several contracts declare {routes[0].path}")


class InfoHttpRoute(HttpRoute):
    """A route that describes the model, or works on text without generating any."""

    def __init__(self, state: AppState, contract: ContractRoutes, declared: InfoRoute, threads: Executor) -> None:
        super().__init__(state, declared.path, by_attribute=declared.by_attribute)
        self.contract, self.declared, self._threads = contract, declared, threads
        self.with_field = declared.with_field

    def refuse(self, error: RequestError) -> Reply:
        return self.contract.refuse(error)

    async def answer(self, call: Call, reply: HttpReply, _: Model | None) -> None:
        declared, models = self.declared, self.state.models
        if declared.answer_all is not None and not models.single:
            reply.reply(declared.answer_all(call, [model.lifecycle.view() for model in models]))
            return
        named = await _name_in_body(self.contract, models, call)
        lifecycle = model_of(models, call.path_parameters, named).lifecycle
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
    """Return the prompt that a chat becomes, or the reason why it has none."""
    if service is None or service.openai is None:
        return NotServed(_NO_CHATS)
    try:
        return await service.openai.render(chat)
    except RequestError as error:
        return error


class GenerationHttpRoute(HandlerRoute):
    """A route on which a model generates text, or makes vectors or scores."""

    def __init__(self, state: AppState, contract: ContractRoutes, declared: GenerationRoute | OpenAIRoute) -> None:
        if isinstance(declared, GenerationRoute):
            queued = not declared.streams_refusals
        else:
            queued = declared.path.removeprefix(declared.prefix) in QUEUED
        by_attribute = isinstance(declared, GenerationRoute) or declared.by_attribute
        super().__init__(state, declared.path, queued=queued, by_attribute=by_attribute, id_header=contract.id_header)
        self.contract, self.declared = contract, declared
        self.with_field = declared.with_field if isinstance(declared, GenerationRoute) else None

    def refuse(self, error: RequestError) -> Reply:
        return self.contract.refuse(error)

    def find(self, head: RequestHead) -> Model | Reply | None:
        if self.contract.body_names_model and not self.state.models.single:
            return None
        return self._chosen(head.path_parameters)

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        return self._chosen(head.path_parameters, await _name_in_body(self.contract, self.state.models, call))

    def _chosen(self, names: Mapping[str, str], named: str = "") -> Model | Reply:
        model = model_of(self.state.models, names, named)
        if isinstance(self.declared, GenerationRoute) and self.declared.refuse_path is not None:
            return self.declared.refuse_path(names, model.lifecycle.model) or model
        return model

    def handler_of(self, service: Service) -> Handler:
        declared = self.declared
        handler: Handler | None
        if isinstance(declared, GenerationRoute):
            handler = service.generation.get(declared.path)
        else:
            handler = service.invocations if service.custom is not None and declared.own_handler else service.openai
        if handler is not None:
            return handler
        if service.custom is not None:
            raise NotServed(OWN_HANDLER)
        raise NotServed(_UNUSABLE if isinstance(declared, GenerationRoute) else _NOT_VLLM)


class SharedHttpRoute(HttpRoute):
    """A path of two contracts. A field of the body decides which of them is meant."""

    def __init__(self, with_field: HttpRoute, field: str, without_field: HttpRoute) -> None:
        by_attribute = with_field.by_attribute and without_field.by_attribute
        super().__init__(with_field.state, with_field.path, by_attribute=by_attribute)
        self._with_field, self._without_field = with_field, without_field
        self._mark = f'"{field}"'.encode()
        shape = msgspec.defstruct("WithField", [("field", msgspec.Raw, msgspec.Raw())], rename={"field": field})
        self._decode = JsonDecoder[Any](shape).decode

    def refuse(self, error: RequestError) -> Reply:
        return self._with_field.refuse(error)

    async def for_body(self, body: bytes) -> HttpRoute:
        return self._with_field if await off_the_loop(body, self._has_field, body) else self._without_field

    def _has_field(self, body: bytes) -> bool:
        if self._mark not in body:
            return False
        try:
            return bool(bytes(self._decode(body).field))
        except msgspec.DecodeError:
            return False


class KindHttpRoute(HttpRoute):
    """A path of two contracts. The kind of the model decides which of them is meant.

    A server with several models, or a model that is not loaded yet, may not tell the kind. The route of models that
    generate text answers then.
    """

    def __init__(self, generating: HttpRoute, pooling: HttpRoute) -> None:
        by_attribute = generating.by_attribute and pooling.by_attribute
        super().__init__(generating.state, generating.path, by_attribute=by_attribute)
        self._generating, self._pooling = generating, pooling

    def refuse(self, error: RequestError) -> Reply:
        return self._generating.refuse(error)

    def chosen(self, scope: Scope) -> HttpRoute:
        try:
            service = model_of(self.state.models, scope.get("path_params") or {}).lifecycle.service
        except UnknownModel:
            service = None
        return self._generating if service is None or service.pooling is None else self._pooling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.chosen(scope)(scope, receive, send)


def model_of(models: Models, names: Mapping[str, str], named: str = "") -> Model:
    """Return the model of a call: the model in its path, the model that its body names, or the startup model.

    Args:
        models: The server's models.
        names: The parameters of the path.
        named: The name in the body, or an empty string.

    Raises:
        UnknownModel: The path names a model that the server does not have.
        ModelNotNamed: Nothing names the model, and the server did not start with exactly one.
    """
    if models.single:
        return models.startup()
    if "model" in names:
        return models.choose(names["model"], names.get(MODEL_VERSION))
    found = [model for model in models if _is_called(model, named)]
    if len(found) == 1:
        return found[0]  # Of several versions, the version that has the adapter.
    return models.choose(found[0].name) if found else models.startup()


def _is_called(model: Model, name: str) -> bool:
    """Return True if a body may use this name for the model: one of its names, or the name of an adapter."""
    if name == model.name or name in model.lifecycle.model.served_model_names:
        return True
    service = model.lifecycle.service
    return service is not None and service.adapters is not None and name in service.adapters


class _NamedModel(msgspec.Struct):
    """The part of a body that names the model."""

    model: msgspec.Raw = msgspec.Raw()


_decode_name = JsonDecoder[_NamedModel](_NamedModel).decode


async def _name_in_body(contract: ContractRoutes, models: Models, call: Call) -> str:
    """Return the model that a JSON body or a form names. Empty if it names no model, or if the name does not matter.

    Faults of the body are left to the route that answers the call.
    """
    if models.single or not contract.body_names_model:
        return ""
    if is_form(call.content_type):
        return await off_the_loop(call.body, form_text, call.body, call.content_type, "model") or ""
    try:
        given = bytes((await off_the_loop(call.body, _decode_name, call.body)).model)
        return str(msgspec.json.decode(given)) if given.startswith(b'"') else ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
