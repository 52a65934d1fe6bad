"""Endpoints for the routes that the families of clients declare."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

import msgspec

from container.http.endpoint import Endpoint, Scope, Site, Target
from container.models.registry import Model, Models
from handlers.contracts.family import OWN_HANDLER, Family, Forwards, Generates, Route, Tells
from handlers.contracts.protocol import Call, Reply
from handlers.errors import NotServed
from handlers.reply import Handler, ReplyWriter, Running

_UNUSABLE = "this contract cannot be served with this model; the server's log says why"
_NOT_VLLM = "this needs the vLLM engine (option.rolling_batch=vllm)"

_LONG_TEXT = 4096
"""Bytes above which a body is answered in a thread: tokenizing takes longer than reading."""
_THREADS = 2
"""As many long bodies are answered at a time, whatever number of clients ask: each may take seconds, and a quarter of a
gigabyte."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def family_endpoints(site: Site, families: Iterable[Family]) -> dict[tuple[str, str], Endpoint]:
    """An endpoint for each path and method. Targets with `where` are asked first."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="texts")
    targets: defaultdict[tuple[str, str], list[Target]] = defaultdict(list)
    for family in families:
        for route in family.routes:
            target = _target(site, family, route, threads)
            for method in route.methods:
                place = targets[route.path, method]
                place.insert(0, target) if _where(route) else place.append(target)
    return {key: Endpoint(site, key[0], place) for key, place in targets.items()}


def _target(site: Site, family: Family, route: Route, threads: Executor) -> Target:
    match route:
        case Tells():
            return _telling(site, family, route, threads)
        case Generates():
            return _generating(site, family, route)
        case Forwards():
            return _forwarding(site, family, route)


def _telling(site: Site, family: Family, route: Tells, threads: Executor) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> None:
        if route.tell_all is not None and not site.models.single:
            writer.reply(route.tell_all(call, [model.lifecycle.view() for model in site.models]))
            return
        view = model_of(site.models, family, call.path_parameters, call.body).lifecycle.view()
        if len(call.body) < _LONG_TEXT:
            writer.reply(route.tell(call, view))
        else:
            writer.reply(await asyncio.get_running_loop().run_in_executor(threads, route.tell, call, view))

    where = route.where
    if where is None:
        return Target(answer, family.refuse)
    return Target(answer, family.refuse, wanted=lambda body: _has_field(body, where))


def _generating(site: Site, family: Family, route: Generates) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        model = model_of(site.models, family, call.path_parameters, call.body)
        service = model.service()
        handler = service.generation.get(route.path)
        if handler is None:
            raise NotServed(_UNUSABLE if service.custom is None else OWN_HANDLER)
        return await model.answer(handler, call, writer)

    def early(scope: Scope, _: dict[bytes, bytes]) -> Reply | None:
        names: dict[str, str] = scope.get("path_params", {})
        if family.body_names_model and not site.models.single:
            return None  # what the body says is not known yet
        model = model_of(site.models, family, names)
        if route.refuse_path is not None:
            refusal = route.refuse_path(names, model.lifecycle.model)
            if refusal is not None:
                return refusal
        model.service()  # a body that nobody is going to read need not be waited for
        return None

    return Target(answer, family.refuse, early=early)


def _forwarding(site: Site, family: Family, route: Forwards) -> Target:
    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        model = model_of(site.models, family, call.path_parameters, call.body)
        service = model.service()
        handler: Handler | None = service.openai
        if service.custom is not None and route.own_handler:
            handler = service.invocations
        if handler is None:
            raise NotServed(_NOT_VLLM if service.custom is None else OWN_HANDLER)
        return await model.answer(handler, call, writer)

    def early(_: Scope, __: dict[bytes, bytes]) -> None:
        if site.models.single:
            site.service()  # a body that nobody is going to read need not be waited for

    return Target(answer, family.refuse, early=early)


class _NamedModel(msgspec.Struct):
    model: str = ""


_decode_model = msgspec.json.Decoder(_NamedModel).decode


def model_of(models: Models, family: Family, names: Mapping[str, str], body: bytes = b"") -> Model:
    """The model that a call is for: by its path, by its body where the family's bodies name one, or the startup one.

    Raises:
        UnknownModel: its path names another.
        ModelNotNamed: none of these, and there is not exactly one startup model.
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
    try:
        return _decode_model(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # whoever answers says what is wrong with it


def _where(route: Route) -> str | None:
    return route.where if isinstance(route, Tells) else None


def _has_field(body: bytes, name: str) -> bool:
    """Whether the body is a JSON object with this field."""
    if f'"{name}"'.encode() not in body:
        return False
    try:
        return name in _fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
