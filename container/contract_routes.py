"""HTTP routes for the routes that contracts declare (`handlers.contract_routes`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from container.http.reply import HttpReply
from container.http.request_head import RequestHead
from container.http.route import AppState, HttpRoute
from container.http.router import ANY_METHOD, ByKind
from container.models.registry import Model, Models
from engines.errors import NotServed, RequestError
from handlers.contract import Call, Handler, Reply
from handlers.contract_routes import (
    OWN_HANDLER,
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    InvocationRoute,
    ManagementRoute,
    ModelView,
    OpenAIRoute,
    RenderedChat,
    Route,
    takes,
)
from handlers.forms import form_text, is_form
from handlers.json_cost import JsonDecoder, off_the_loop
from handlers.management import MAX_BODY, Management
from handlers.openai.routes import QUEUED
from handlers.service import Service

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"
_NO_CHATS = "chats need the vLLM engine (option.rolling_batch=vllm)"

_LONG_TEXT = 4096  # Bytes. Longer bodies are answered in a thread: tokenizing takes longer than reading.
_THREADS = 2  # Long bodies that are answered at a time. Each may take seconds, and 256 MB.

T = TypeVar("T")


def contract_http_routes(
    state: AppState, contracts: Iterable[ContractRoutes]
) -> dict[tuple[str, str], HttpRoute | ByKind]:
    """Return an HTTP route for each path and method that the contracts declare, other than those for management."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    declarations: dict[tuple[str, str], list[tuple[Route, HttpRoute]]] = {}
    for contract in contracts:
        for declared in contract.routes:
            if isinstance(declared, ManagementRoute):
                continue
            if isinstance(declared, InvocationRoute):
                route = _invocation_route(state, contract, declared)
            elif isinstance(declared, InfoRoute):
                answers = _InfoAnswers(state.models, contract, declared, threads)
                route = HttpRoute(
                    state, declared.path, contract.refuse, answer=answers.answer, by_attribute=declared.by_attribute
                )
            else:
                route = _generation_route(state, contract, declared)
            for method in declared.methods:
                declarations.setdefault((declared.path, method), []).append((declared, route))
    return {key: _of_kind(routes) for key, routes in declarations.items()}


def management_http_routes(
    state: AppState, contract: ContractRoutes, management: Management
) -> Iterator[tuple[str, str, HttpRoute]]:
    """Yield path, method and HTTP route of each route that manages models or adapters."""
    for declared in contract.routes:
        if isinstance(declared, ManagementRoute):
            route = HttpRoute(
                state,
                declared.counted or declared.path,
                declared.refuse or contract.refuse,
                answer=partial(_manage, declared, management),
                headers=_headers_of(contract),
                same_site=True,
                max_body=MAX_BODY,
            )
            for method in declared.operations if declared.wrong_method is None else (ANY_METHOD,):
                yield declared.path, method, route


async def _manage(declared: ManagementRoute, management: Management, call: Call, reply: HttpReply) -> None:
    operation = declared.operations.get(call.method)
    if operation is not None:
        reply.reply(await operation(call, management))
    elif declared.wrong_method is not None:
        reply.reply(declared.wrong_method(call))


def _headers_of(contract: ContractRoutes) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in contract.headers]


def _of_kind(routes: Sequence[tuple[Route, HttpRoute]]) -> HttpRoute | ByKind:
    """Return the route of a path and method that contracts declare. The kind of the model may decide between them."""
    generating, pooling = (
        [(declared, route) for declared, route in routes if takes(declared, pooling=pools)] for pools in (False, True)
    )
    if generating == pooling or not generating or not pooling:
        return _shared(generating or pooling)
    return ByKind(_shared(generating), _shared(pooling))


def _shared(routes: Sequence[tuple[Route, HttpRoute]]) -> HttpRoute:
    """Return the one route, or of two the one for bodies with a certain field in front of the other."""
    if len(routes) == 1:
        return routes[0][1]
    for (declared, route), (_, other) in (routes, reversed(routes)):
        if isinstance(declared, GenerationRoute | InfoRoute) and declared.with_field is not None:
            choice = _FieldChoice(declared.with_field, route, other)
            by_attribute = route.by_attribute and other.by_attribute
            return HttpRoute(
                route.state, route.path, route.refuse, find_by_body=choice.find_by_body, by_attribute=by_attribute
            )
    raise AssertionError(f"several contracts declare {routes[0][1].path}")


class _FieldChoice:
    """Chooses between two contracts of a path by a field of the body."""

    def __init__(self, field: str, with_field: HttpRoute, without_field: HttpRoute) -> None:
        self._with_field, self._without_field = with_field, without_field
        self._mark = f'"{field}"'.encode()
        shape = msgspec.defstruct("WithField", [("field", msgspec.Raw, msgspec.Raw())], rename={"field": field})
        self._decode = JsonDecoder[Any](shape).decode

    async def find_by_body(self, _: RequestHead, call: Call) -> HttpRoute:
        return self._with_field if await off_the_loop(call.body, self._has_field, call.body) else self._without_field

    def _has_field(self, body: bytes) -> bool:
        if self._mark not in body:
            return False
        try:
            return bool(bytes(self._decode(body).field))
        except msgspec.DecodeError:
            return False


@dataclass(frozen=True, slots=True)
class _InfoAnswers:
    """Answers a route that describes the model, or works on text without generating any."""

    models: Models
    contract: ContractRoutes
    declared: InfoRoute
    threads: Executor

    async def answer(self, call: Call, reply: HttpReply) -> None:
        declared, models = self.declared, self.models
        if declared.answer_all is not None and not models.single:
            reply.reply(declared.answer_all(call, [model.lifecycle.view() for model in models]))
            return
        named = await _name_in_body(self.contract, models, call)
        lifecycle = models.called(call.path_parameters, named).lifecycle
        view = lifecycle.view()
        if declared.chat is not None and (chat := await self._run(declared.chat, call, view)) is not None:
            view = replace(view, rendered=await _rendered(chat, lifecycle.service))
        reply.reply(await self._run(declared.answer, call, view))

    async def _run(self, function: Callable[[Call, ModelView], T], call: Call, view: ModelView) -> T:
        """Call a function, in a thread if the body is long."""
        if len(call.body) < _LONG_TEXT:
            return function(call, view)
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, call, view)


async def _rendered(chat: Call, service: Service | None) -> RenderedChat | RequestError:
    """Return the prompt that a chat becomes, or the reason why it has none."""
    if service is None or service.openai is None:
        return NotServed(_NO_CHATS)
    try:
        return await service.openai.render(chat)
    except RequestError as error:
        return error


def _generation_route(state: AppState, contract: ContractRoutes, declared: GenerationRoute | OpenAIRoute) -> HttpRoute:
    """Return the route on which a model generates text, or makes vectors or scores."""
    if isinstance(declared, GenerationRoute):
        queued = not declared.streams_refusals
    else:
        queued = declared.path.removeprefix(declared.prefix) in QUEUED
    choice = _ModelChoice(state.models, contract, declared)
    return HttpRoute(
        state,
        declared.path,
        contract.refuse,
        find=choice.find,
        find_by_body=choice.find_by_body,
        handler_of=partial(_handler_of, declared),
        queued=queued,
        by_attribute=isinstance(declared, GenerationRoute) or declared.by_attribute,
        id_header=contract.id_header,
    )


@dataclass(frozen=True, slots=True)
class _ModelChoice:
    """Finds the model of a generating route: by the path, or by the body if the contract's bodies name it."""

    models: Models
    contract: ContractRoutes
    declared: GenerationRoute | OpenAIRoute

    def find(self, head: RequestHead) -> Model | Reply | None:
        if self.contract.body_names_model and self.models.only is None:
            return None
        return self._model(head, "")

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        return self._model(head, await _name_in_body(self.contract, self.models, call))

    def _model(self, head: RequestHead, named: str) -> Model | Reply:
        model = self.models.called(head.path_parameters, named)
        if isinstance(self.declared, GenerationRoute) and self.declared.refuse_path is not None:
            return self.declared.refuse_path(head.path_parameters, model.lifecycle.model) or model
        return model


def _handler_of(declared: GenerationRoute | OpenAIRoute, service: Service) -> Handler:
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


def _invocation_route(state: AppState, contract: ContractRoutes, declared: InvocationRoute) -> HttpRoute:
    models = state.models
    return HttpRoute(
        state,
        declared.counted,
        contract.refuse,
        find=partial(declared.find, models),
        find_by_body=partial(declared.find_by_body, models),
        handler_of=attrgetter("invocations"),
        names=partial(declared.names, models),
        headers=_headers_of(contract),
        queued=True,
        by_attribute=declared.by_attribute,
    )


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
