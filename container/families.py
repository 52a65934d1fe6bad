"""Endpoints for the routes that the families of clients declare."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import msgspec

from container.http.endpoint import AppState, Endpoint, Scope, handed_to
from container.http.reply import HttpReply
from container.models.registry import Model, Models
from handlers.contracts.family import OWN_HANDLER, Family, Forwards, Generates, Tells
from handlers.contracts.protocol import Call, Handler, Reply
from handlers.entry_point import Service
from handlers.errors import NotServed

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"

_LONG_TEXT = 4096
"""Bytes above which a body is answered in a thread: tokenizing takes longer than reading."""
_THREADS = 2
"""Long bodies that are answered at a time, however many clients ask: each may take seconds, and 256 MB."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def family_endpoints(state: AppState, families: Iterable[Family]) -> dict[tuple[str, str], Endpoint]:
    """An endpoint for each path and method. Where two routes want one, that with `where` is asked first."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    endpoints: dict[tuple[str, str], Endpoint] = {}
    for family in families:
        for route in family.routes:
            for method in route.methods:
                if isinstance(route, Tells):
                    endpoint = _telling(state, family, route, threads)
                else:
                    endpoint = _generating(state, family, route)
                key = (route.path, method)
                first = endpoints.setdefault(key, endpoint)
                if first is not endpoint:
                    if isinstance(route, Tells) and route.where:
                        endpoint.otherwise, endpoints[key] = first, endpoint
                    else:
                        first.otherwise = endpoint
    return endpoints


def _telling(state: AppState, family: Family, route: Tells, threads: Executor) -> Endpoint:
    async def answer(call: Call, reply: HttpReply, _: Model | None) -> None:
        if route.tell_all is not None and not state.models.single:
            reply.reply(route.tell_all(call, [model.lifecycle.view() for model in state.models]))
            return
        view = model_of(state.models, family, call.path_parameters, call.body).lifecycle.view()
        if len(call.body) < _LONG_TEXT:
            reply.reply(route.tell(call, view))
        else:
            reply.reply(await asyncio.get_running_loop().run_in_executor(threads, route.tell, call, view))

    return Endpoint(state, route.path, answer, family.refuse, wants=lambda body: _has_field(body, route.where))


def _generating(state: AppState, family: Family, route: Generates | Forwards) -> Endpoint:
    models = state.models

    def find(scope: Scope, _: dict[bytes, bytes], call: Call | None) -> Model | Reply | None:
        names: dict[str, str] = scope.get("path_params", {})
        if call is None and family.body_names_model and not models.single:
            return None
        model = model_of(models, family, names, call.body if call is not None else b"")
        if isinstance(route, Generates) and route.refuse_path is not None:
            return route.refuse_path(names, model.lifecycle.model) or model
        return model

    return Endpoint(state, route.path, handed_to(partial(_handler, route)), family.refuse, find=find)


def _handler(route: Generates | Forwards, service: Service) -> Handler:
    """What answers a route; raises NotServed where the model cannot."""
    handler: Handler | None
    if isinstance(route, Generates):
        handler = service.generation.get(route.path)
    else:
        handler = service.invocations if service.custom is not None and route.own_handler else service.openai
    if handler is not None:
        return handler
    if service.custom is not None:
        raise NotServed(OWN_HANDLER)
    raise NotServed(_UNUSABLE if isinstance(route, Generates) else _NOT_VLLM)


def model_of(models: Models, family: Family, names: Mapping[str, str], body: bytes = b"") -> Model:
    """The model that a call is for: by its path, by its body where the family's bodies name one, or the startup one.

    Raises UnknownModel where its path names another, and ModelNotNamed where there is not exactly one startup model.
    """
    if models.single:
        return models.startup()
    if "model" in names:
        return models.choose(names["model"])
    name = _named_in(body) if family.body_names_model else ""
    found = [model for model in models if name in _names(model)]
    if len(found) == 1:
        return found[0]  # of several versions, the one that has the adapter
    return models.choose(found[0].name) if found else models.startup()


def _names(model: Model) -> set[str]:
    """What a body may call it: its names, and those of its adapters."""
    service = model.lifecycle.service
    adapters = service.adapters.all() if service is not None and service.adapters is not None else ()
    return {model.name, *model.lifecycle.model.served_model_names, *(adapter.name for adapter in adapters)}


def _named_in(body: bytes) -> str:
    given = bytes(_fields(body).get("model", b""))
    return str(msgspec.json.decode(given)) if given.startswith(b'"') else ""


def _has_field(body: bytes, name: str | None) -> bool:
    return f'"{name}"'.encode() in body and name in _fields(body)


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object; none where the body is something else, which whoever answers says."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
