"""LMI's management API for models and their workers: `/models` and `/workflows`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from container.adapter_management import MAX_BODY
from container.gpus import gpu_count
from container.http.reply import NO_CACHE, HttpReply
from container.http.route import AppState, HttpRoute
from container.models.life_cycle import State
from container.models.loads import LoadFailed
from container.models.memory import OutOfMemory
from container.models.registration import Registrar
from container.models.registry import AlreadyRegistered, Model
from container.settings.settings import SettingsError, UrlNotFound
from engines.errors import InvalidRequest
from engines.interface import CopyState, EngineCopy
from handlers.contract import Call, Reply
from handlers.djl_errors import bad_request, front_end_reply, refused
from handlers.lmi import model_management as contract
from handlers.lmi.model_management import (
    DescribedGroup,
    DescribedModel,
    DescribedWorker,
    ListedModel,
    read_page,
    read_registration,
    read_scale,
)

_COLLECTIONS = ("/models", "/workflows")
_LIST_STATUS = {State.STARTING: "PENDING", State.READY: "READY", State.FAILED: "FAILED"}
_STATUS = {State.STARTING: "PENDING", State.READY: "Healthy", State.FAILED: "FAILED"}

_Operation = Callable[[Call], Awaitable[Reply]]


class ModelManagementRoute(HttpRoute):
    """A route that manages models."""

    def __init__(self, state: AppState, path: str, operation: _Operation) -> None:
        super().__init__(state, path, headers=NO_CACHE, same_site=True, max_body=MAX_BODY)
        self._operation = operation

    async def answer(self, call: Call, reply: HttpReply, _: Model | None) -> None:
        reply.reply(await self._operation(call))


def model_routes(state: AppState, registrar: Registrar) -> Iterator[tuple[str, str, ModelManagementRoute]]:
    """Yield path, method and route of each operation on models."""
    api = _Api(state, registrar)
    for collection in _COLLECTIONS:
        listed = api.models if collection == "/models" else api.workflows
        tables: dict[str, dict[str, _Operation]] = {collection: {"GET": listed, "POST": api.register}}
        for path in (f"{collection}/{{model}}", f"{collection}/{{model}}/{{version}}"):
            tables[path] = {"GET": api.describe, "PUT": api.scale, "DELETE": api.unregister}
        for path, table in tables.items():
            for method, operation in table.items():
                yield path, method, ModelManagementRoute(state, path, operation)


def wrong_method() -> Reply:
    """Return the reply if a path of the management API does not have the method."""
    message = "Requested method is not allowed, please refer to API document."
    return front_end_reply(405, "MethodNotAllowedException", message)


# The errors of a model that cannot be registered or loaded, with status and DJL's class name.
_REFUSALS: dict[type[Exception], tuple[int, str]] = {
    UrlNotFound: (404, "ModelNotFoundException"),
    AlreadyRegistered: (409, "IllegalArgumentException"),
    SettingsError: (400, "IllegalConfigurationException"),
    OutOfMemory: (507, "WlmOutOfMemoryException"),
    LoadFailed: (500, "EngineException"),
}


class _Api:
    """The operations. Every method may raise RequestError and ContractError."""

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
            # The registrar owns the load, so the load continues if the client leaves.
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
        least, most = read_scale(call, models[0].workers)
        for model in models:
            try:
                actual = self._registrar.scale(model, least, most)
            except InvalidRequest as error:
                parameter = "max_worker" if "max_worker" in dict(call.query) else "min_worker"
                raise bad_request(f"Parameter {parameter} is {most}; {error.message}") from None
        return contract.scaled(models[0].name, *actual)

    async def unregister(self, call: Call) -> Reply:
        models = self._named(call)
        await self._registrar.unregister(*models)
        return contract.unregistered(models[0].name)

    def _named(self, call: Call) -> list[Model]:
        names = call.path_parameters
        return self._models.versions(names["model"], names.get("version"), exact=True)


def _listed(model: Model) -> ListedModel:
    return ListedModel(model.name, model.version, model.url, _LIST_STATUS.get(model.lifecycle.state, "PENDING"))


def described(model: Model) -> DescribedModel:
    """Describe a model with its workers. A copy of a model is a worker."""
    lifecycle = model.lifecycle
    settings, state, service = lifecycle.model, lifecycle.state, lifecycle.service
    status = _STATUS.get(state, "Unhealthy")
    if state is State.READY and lifecycle.short_of_workers:
        status = "Unhealthy"
    workers: list[DescribedWorker] = []
    copies: Sequence[EngineCopy] = ()
    waiting = 0
    on_gpu = bool(settings.handler.devices) if settings.handler else gpu_count() > 0 and settings.devices != ()
    if service is not None and service.custom is not None:
        pool = service.custom.pool
        waiting = pool.queue_length
        workers = [DescribedWorker(w.id, w.started, "READY") for w in pool.workers if w.ready]
    elif service is not None and service.engine is not None and not model.scaled_to_zero:
        waiting = service.engine.status().waiting_requests
        if state is State.READY:
            copies = service.engine.copies
            workers = [worker for copy in copies for worker in _workers(copy, model)]
    return DescribedModel(
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
        groups=(
            _groups(copies, model)
            if copies and all(copy.gpus for copy in copies)
            else [DescribedGroup(0 if on_gpu else None, *model.workers, workers)]
        ),
    )


def _groups(copies: Sequence[EngineCopy], model: Model) -> list[DescribedGroup]:
    """Return a group for each GPU with which a copy begins, as LMI does.

    The numbers of all groups together are those of the model. A copy that is removed does not count.
    """
    least, groups = model.workers[0], []
    for copy in copies:
        most = int(copy.state is not CopyState.DRAINING)
        groups.append(DescribedGroup(copy.gpus[0], min(least, most), most, _workers(copy, model)))
        least -= groups[-1].min_workers
    return groups


def _workers(copy: EngineCopy, model: Model) -> list[DescribedWorker]:
    """Return a copy as a worker. LMI has no worker for a copy that is loading, and two states for the others."""
    if copy.state is CopyState.STARTING:
        return []
    status = "READY" if copy.state is CopyState.READY else "UNLOADING"
    return [DescribedWorker(copy.number, max(copy.started_at, model.registered_at), status)]
