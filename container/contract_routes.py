"""Endpoints for the routes that the families of clients declare."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from container.http.endpoint import AppState, Endpoint, Scope, handed_to
from container.http.reply import HttpReply
from container.models.registry import Model, Models
from engines.errors import NotServed
from handlers.contract import Call, Handler, Reply
from handlers.contract_routes import OWN_HANDLER, ContractRoutes, GenerationRoute, InfoRoute, OpenAIRoute
from handlers.entry_point import Service
from handlers.json_cost import JsonDecoder, off_the_loop
from handlers.openai.constraints import CHAT, COMPLETIONS

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"

_LONG_TEXT = 4096
"""Bytes above which a body is answered in a thread: tokenizing takes longer than reading."""
_THREADS = 2
"""Long bodies that are answered at a time, however many clients ask: each may take seconds, and 256 MB."""


def family_endpoints(state: AppState, families: Iterable[ContractRoutes]) -> dict[tuple[str, str], Endpoint]:
    """An endpoint for each path and method. Where two routes want one, that with `where` is asked first."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    endpoints: dict[tuple[str, str], Endpoint] = {}
    for family in families:
        for route in family.routes:
            for method in route.methods:
                if isinstance(route, InfoRoute):
                    endpoint = _telling(state, family, route, threads)
                else:
                    endpoint = _generating(state, family, route)
                key = (route.path, method)
                first = endpoints.setdefault(key, endpoint)
                if first is not endpoint:
                    if isinstance(route, InfoRoute) and route.with_field:
                        endpoint.otherwise, endpoints[key] = first, endpoint
                    else:
                        first.otherwise = endpoint
    return endpoints


def _telling(state: AppState, family: ContractRoutes, route: InfoRoute, threads: Executor) -> Endpoint:
    async def answer(call: Call, reply: HttpReply, _: Model | None) -> None:
        if route.answer_all is not None and not state.models.single:
            reply.reply(route.answer_all(call, [model.lifecycle.view() for model in state.models]))
            return
        model = model_of(state.models, family, call.path_parameters, await _name(family, state.models, call))
        view = model.lifecycle.view()
        if len(call.body) < _LONG_TEXT:
            reply.reply(route.answer(call, view))
        else:
            reply.reply(await asyncio.get_running_loop().run_in_executor(threads, route.answer, call, view))

    wants = None if route.with_field is None else _Having(route.with_field)
    return Endpoint(state, route.path, answer, family.refuse, wants=wants)


def _generating(state: AppState, family: ContractRoutes, route: GenerationRoute | OpenAIRoute) -> Endpoint:
    models = state.models

    def find(scope: Scope, _: dict[bytes, bytes]) -> Model | Reply | None:
        if family.body_names_model and not models.single:
            return None
        return chosen(scope.get("path_params", {}))

    async def find_by_body(scope: Scope, _: dict[bytes, bytes], call: Call) -> Model | Reply:
        return chosen(scope.get("path_params", {}), await _name(family, models, call))

    def chosen(names: dict[str, str], named: str = "") -> Model | Reply:
        model = model_of(models, family, names, named)
        if isinstance(route, GenerationRoute) and route.refuse_path is not None:
            return route.refuse_path(names, model.lifecycle.model) or model
        return model

    if isinstance(route, GenerationRoute):
        queued = not route.streams_refusals
    else:
        queued = route.path.removeprefix(route.prefix) in (CHAT, COMPLETIONS)
    answer = handed_to(partial(_handler, route))
    return Endpoint(state, route.path, answer, family.refuse, find=find, find_by_body=find_by_body, queued=queued)


def _handler(route: GenerationRoute | OpenAIRoute, service: Service) -> Handler:
    """What answers a route; raises NotServed where the model cannot."""
    handler: Handler | None
    if isinstance(route, GenerationRoute):
        handler = service.generation.get(route.path)
    else:
        handler = service.invocations if service.custom is not None and route.own_handler else service.openai
    if handler is not None:
        return handler
    if service.custom is not None:
        raise NotServed(OWN_HANDLER)
    raise NotServed(_UNUSABLE if isinstance(route, GenerationRoute) else _NOT_VLLM)


async def _name(family: ContractRoutes, models: Models, call: Call) -> str:
    """The model that the body names, where that counts."""
    if models.single or not family.body_names_model:
        return ""
    return await _named_in(call.body)


def model_of(models: Models, family: ContractRoutes, names: Mapping[str, str], named: str = "") -> Model:
    """The model that a call is for: by its path, by the name in its body, or the startup one.

    Raises UnknownModel where its path names another, and ModelNotNamed where there is not exactly one startup model.
    """
    if models.single:
        return models.startup()
    if "model" in names:
        return models.choose(names["model"])
    found = [model for model in models if _is_called(model, named)]
    if len(found) == 1:
        return found[0]  # of several versions, the one that has the adapter
    return models.choose(found[0].name) if found else models.startup()


def _is_called(model: Model, name: str) -> bool:
    """Tell whether a body may call the model so: by one of its names, or by that of an adapter."""
    if name == model.name or name in model.lifecycle.model.served_model_names:
        return True
    service = model.lifecycle.service
    return service is not None and service.adapters is not None and name in service.adapters


class _Naming(msgspec.Struct):
    """A body as far as it names the model."""

    model: msgspec.Raw = msgspec.Raw()


_decode_naming = JsonDecoder[_Naming](_Naming).decode


async def _named_in(body: bytes) -> str:
    """The model that a JSON object names, "" without one; whoever answers says what is wrong with the body."""
    try:
        given = bytes((await off_the_loop(body, _decode_naming, body)).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(msgspec.json.decode(given)) if given.startswith(b'"') else ""


class _Having:
    """InfoRoute whether a body is a JSON object with a field."""

    def __init__(self, name: str) -> None:
        self._mark = f'"{name}"'.encode()
        shape = msgspec.defstruct("Having", [("field", msgspec.Raw, msgspec.Raw())], rename={"field": name})
        self._decode = JsonDecoder[Any](shape).decode

    async def __call__(self, body: bytes) -> bool:
        return await off_the_loop(body, self._look, body)

    def _look(self, body: bytes) -> bool:
        if self._mark not in body:
            return False
        try:
            return bool(bytes(self._decode(body).field))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
