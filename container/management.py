"""The management routes: models and workers as LMI has them, adapters as LMI and vLLM have them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from container.gpus import gpu_count
from container.http.body_limits import BodyReader, Receive
from container.http.endpoint import (
    AppState,
    Endpoint,
    Refuse,
    for_the_connection,
    front_end_refusal,
)
from container.http.reply import NO_CACHE, Headers, HttpReply
from container.models.memory import OutOfMemory
from container.models.registration import LoadFailed, Registrar
from container.models.registry import AlreadyRegistered, Model, State
from container.settings.settings import ServerSettings, SettingsError, UrlNotFound
from engines.adapters import AdapterRegistry
from engines.errors import AdapterFailed, NotReady, NotServed, RequestError
from handlers.contract import Call, Reply
from handlers.djl_errors import front_end_reply, refused
from handlers.lmi import adapters as lmi
from handlers.lmi import management as contract
from handlers.lmi.management import Described, Listed, WorkerShown, read_page, read_registration, read_scale
from handlers.openai import routes as openai

ANY_METHOD = "*"
_MOST_BYTES = 256 * 1024
"""Of a body."""
_PREFIXES = ("", "/models/{model}")
_Answer = Callable[[Call, AdapterRegistry], Awaitable[Reply]]
_Tell = Callable[[Call], Awaitable[Reply]]
_Word = Callable[[Call], Reply]


def adapter_routes(state: AppState) -> Iterator[tuple[str, str, Endpoint]]:
    """Path, method and endpoint of each route."""
    of_lmi = partial(_of_adapters, state, lmi.wrong_method, lmi.refuse, NO_CACHE)
    of_vllm = partial(_of_adapters, state, openai.wrong_method, openai.refuse_adapter, None)
    for prefix in _PREFIXES:
        path = f"{prefix}/adapters"
        yield path, ANY_METHOD, of_lmi(path, GET=_list, POST=_register)
        yield f"{path}/{{adapter}}", ANY_METHOD, of_lmi(path, GET=_describe, DELETE=_unregister)
        yield f"{path}/{{adapter}}/update", ANY_METHOD, of_lmi(path, POST=_update)
    yield openai.LOAD, ANY_METHOD, of_vllm(openai.LOAD, POST=_load)
    yield openai.UNLOAD, ANY_METHOD, of_vllm(openai.UNLOAD, POST=_unload)


def _of_adapters(
    state: AppState, wrong_method: _Word, refuse: Refuse, headers: Headers | None, route: str, **answers: _Answer
) -> Endpoint:
    async def tell(call: Call) -> Reply:
        if (chosen := answers.get(call.method)) is None:
            return wrong_method(call)
        return await chosen(call, _registry(state, call))

    return _endpoint(state, route, tell, refuse, headers)


def _registry(state: AppState, call: Call) -> AdapterRegistry:
    """The adapters of the model that the path names, or of the one that was there at the start."""
    name = call.path_parameters.get("model")
    model = state.models.startup() if name is None else state.models.choose(name)
    registry = model.service().adapters
    if registry is None:
        raise NotServed(lmi.DISABLED)
    return registry


async def _register(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.registration(call)
    return lmi.done(call, order.name, "registered", await registry.register(order))


async def _update(call: Call, registry: AdapterRegistry) -> Reply:
    order = lmi.change(call)
    return lmi.done(call, order.name, "updated", await registry.update(order))


async def _unregister(call: Call, registry: AdapterRegistry) -> Reply:
    name = call.path_parameters["adapter"]
    return lmi.done(call, name, "unregistered", await registry.unregister(name, lmi.alias(call)))


async def _describe(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.described(registry.get(call.path_parameters["adapter"]))


async def _list(call: Call, registry: AdapterRegistry) -> Reply:
    return lmi.listed(call, registry.all())


async def _load(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_load(call)
    await registry.register(body.order, replacing=body.load_inplace)
    return openai.loaded(body.lora_name)


async def _unload(call: Call, registry: AdapterRegistry) -> Reply:
    body = openai.read_unload(call)
    await registry.unregister(body.lora_name)
    return openai.unloaded(body.lora_name)


class Refusal(NamedTuple):
    """A reply to a call that changes nothing."""

    status: int
    headers: Headers
    body: bytes


async def read_adapter_call(scope: Any, receive: Receive, settings: ServerSettings) -> bytes | Refusal | None:
    """Read the body of a call of `adapter_routes`; return what to reply if it cannot be read, None if its client went.

    For a server in front of this one, which has several of them answer the call.
    """
    most = min(_MOST_BYTES, settings.max_request_size)
    try:
        return await BodyReader(None).read(dict(scope["headers"]), receive, most, settings.request_read_timeout)
    except RequestError as error:
        return _refused_adapter_call(scope["raw_path"], error)


def adapter_call_failed(path: bytes, message: str, *, again: bool) -> Refusal:
    """Return what such a server replies if a call has failed. `again`: the client may try it again at once."""
    return _refused_adapter_call(path, NotReady(message) if again else AdapterFailed(message))


def _refused_adapter_call(path: bytes, error: RequestError) -> Refusal:
    refuse = openai.refuse_adapter if path.decode() in (openai.LOAD, openai.UNLOAD) else lmi.refuse
    reply = refuse(error)
    headers = [(b"content-type", reply.content_type.encode()), *for_the_connection(error, body_read=False)]
    return Refusal(reply.status, headers, reply.body)


_COLLECTIONS = ("/models", "/workflows")
_LIST_STATUS = {State.STARTING: "PENDING", State.READY: "READY", State.FAILED: "FAILED"}
_STATUS = {State.STARTING: "PENDING", State.READY: "Healthy", State.FAILED: "FAILED"}


def management_endpoints(state: AppState, registrar: Registrar) -> Iterator[tuple[str, str, Endpoint]]:
    """Path, method and endpoint of each route."""
    api = _Api(state, registrar)
    for collection in _COLLECTIONS:
        listed = api.models if collection == "/models" else api.workflows
        tables: dict[str, dict[str, _Tell]] = {collection: {"GET": listed, "POST": api.register}}
        for path in (f"{collection}/{{model}}", f"{collection}/{{model}}/{{version}}"):
            tables[path] = {"GET": api.describe, "PUT": api.scale, "DELETE": api.unregister}
        for path, table in tables.items():
            for method, tell in table.items():
                yield path, method, _endpoint(state, path, tell, front_end_refusal, NO_CACHE)


def _endpoint(state: AppState, route: str, tell: _Tell, refuse: Refuse, headers: Headers | None) -> Endpoint:

    async def answer(call: Call, reply: HttpReply, _: Model | None) -> None:
        reply.reply(await tell(call))

    return Endpoint(state, route, answer, refuse, headers=headers, same_site=True, most=_MOST_BYTES)


def wrong_method() -> Reply:
    """A management path, with a method that it does not have."""
    message = "Requested method is not allowed, please refer to API document."
    return front_end_reply(405, "MethodNotAllowedException", message)


_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    UrlNotFound: (404, "ModelNotFoundException"),
    AlreadyRegistered: (409, "IllegalArgumentException"),
    SettingsError: (400, "IllegalConfigurationException"),
    OutOfMemory: (507, "WlmOutOfMemoryException"),
    LoadFailed: (500, "EngineException"),
}
"""The errors of a model that cannot be registered or loaded."""


class _Api:
    """What each route does. Every method may raise RequestError and ContractError."""

    def __init__(self, state: AppState, registrar: Registrar) -> None:
        self._models, self._registrar = state.models, registrar
        self._sagemaker = state.settings.multi_model

    async def models(self, call: Call) -> Reply:
        start, limit = read_page(call)
        make = contract.sagemaker_list if self._sagemaker else contract.model_list
        return make([_listed(model) for model in self._models], start, limit)

    async def workflows(self, call: Call) -> Reply:
        start, limit = read_page(call)
        return contract.workflow_list([_listed(model) for model in self._models], start, limit)

    async def register(self, call: Call) -> Reply:
        order = read_registration(call)
        try:
            model, loading = await self._registrar.register(order)
            if not order.synchronous:
                return contract.registration_scheduled(model.name)
            # The load is the registrar's: a client that goes away leaves no half of a model behind.
            await asyncio.shield(loading)
        except tuple(_REFUSALS) as error:
            message = "; ".join(error.problems) if isinstance(error, SettingsError) else str(error)
            raise refused(*_REFUSALS[type(error)], message) from None
        return contract.registered(model.name)

    async def describe(self, call: Call) -> Reply:
        models = self._named(call)
        if self._sagemaker:
            return contract.sagemaker_description(_listed(models[0]))
        return contract.description([described(model) for model in models])

    async def scale(self, call: Call) -> Reply:
        models = self._named(call)
        shown = described(models[0])
        least, most = read_scale(call, (shown.min_workers, shown.max_workers))
        for model in models:
            actual = self._registrar.scale(model, least, most)
        return contract.scaled(models[0].name, *actual)

    async def unregister(self, call: Call) -> Reply:
        models = self._named(call)
        await asyncio.gather(*(self._registrar.unregister(model) for model in models))
        return contract.unregistered(models[0].name)

    def _named(self, call: Call) -> list[Model]:
        names = call.path_parameters
        return self._models.versions(names["model"], names.get("version"), exact=True)


def _listed(model: Model) -> Listed:
    return Listed(model.name, model.version, model.url, _LIST_STATUS.get(model.lifecycle.state, "PENDING"))


def described(model: Model) -> Described:
    """A model with its workers; an engine is shown as one worker."""
    lifecycle = model.lifecycle
    settings, state, service = lifecycle.model, lifecycle.state, lifecycle.service
    status = _STATUS.get(state, "Unhealthy")
    if state is State.READY and lifecycle.short_of_workers:
        status = "Unhealthy"
    least = most = 0 if model.scaled_to_zero else 1
    workers: list[WorkerShown] = []
    waiting = 0
    on_gpu = gpu_count() > 0 and settings.devices != ()
    if settings.handler is not None:
        least, most, on_gpu = settings.handler.min_workers, settings.handler.max_workers, bool(settings.handler.devices)
    if service is not None and service.custom is not None:
        pool = service.custom.pool
        least, most, waiting = pool.min_workers, pool.max_workers, pool.queue_length
        workers = [WorkerShown(w.id, w.started, "READY") for w in pool.workers if w.ready]
    elif service is not None and service.engine is not None and not model.scaled_to_zero:
        waiting = service.engine.status().waiting_requests
        workers = [WorkerShown(1, model.registered_at, "READY")] if state is State.READY else []
    return Described(
        name=model.name,
        version=model.version,
        url=model.url,
        batch_size=settings.batch_size,
        max_batch_delay=settings.max_batch_delay,
        max_idle_time=settings.handler.max_idle_time if settings.handler is not None else 60.0,
        queue_size=lifecycle.settings.server.job_queue_size,
        waiting=waiting,
        status=status,
        at_startup=model.at_startup,
        on_gpu=on_gpu,
        min_workers=least,
        max_workers=most,
        workers=workers,
    )
