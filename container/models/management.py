"""Manages the server's models and their adapters for the contracts that have a management API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from container.gpus import gpu_count
from container.models.life_cycle import State
from container.models.load_queue import LoadFailed
from container.models.memory import OutOfMemory
from container.models.registration import Registrar
from container.models.registry import AlreadyRegistered, Model, Models
from container.settings.settings import SettingsError, UrlNotFound
from engines.adapters import AdapterRegistry
from engines.errors import NotServed
from engines.interface import CopyState, EngineCopy
from handlers.management import (
    Cause,
    DescribedGroup,
    DescribedModel,
    DescribedWorker,
    ListedModel,
    Registration,
    RegistrationFailed,
)

_LIST_STATUS = {State.READY: "READY", State.FAILED: "FAILED"}  # The other states are listed as PENDING.
_STATUS = {State.STARTING: "PENDING", State.READY: "Healthy", State.FAILED: "FAILED"}
_CAUSES: dict[type[Exception], Cause] = {
    UrlNotFound: "url",
    AlreadyRegistered: "registered",
    SettingsError: "settings",
    OutOfMemory: "memory",
    LoadFailed: "load",
}


class ModelManagement:
    """Implements `Management`."""

    def __init__(self, models: Models, registrar: Registrar, *, multi_model: bool) -> None:
        self._models, self._registrar, self.multi_model = models, registrar, multi_model

    def adapters(self, model: str | None) -> AdapterRegistry:
        found = self._models.startup() if model is None else self._models.choose(model)
        if len(self._models.versions(found.name)) > 1:
            raise NotServed(f"model {found.name} has several versions; adapters are managed only for a model with one")
        registry = found.service().adapters
        if registry is None:
            raise NotServed("LoRA is not enabled: set option.enable_lora=true")
        return registry

    def listed(self, name: str | None = None, version: str | None = None) -> Sequence[ListedModel]:
        return [
            ListedModel(model.name, model.version, model.url, _LIST_STATUS.get(model.lifecycle.state, "PENDING"))
            for model in (self._models if name is None else self._named(name, version))
        ]

    def described(self, name: str, version: str | None) -> Sequence[DescribedModel]:
        return [described(model) for model in self._named(name, version)]

    async def register(self, order: Registration) -> str:
        try:
            model, loading = await self._registrar.register(order)
            if order.synchronous:
                # The registrar owns the load, so the load continues if the client disconnects.
                await asyncio.shield(loading)
        except tuple(_CAUSES) as error:
            message = "; ".join(error.problems) if isinstance(error, SettingsError) else str(error)
            raise RegistrationFailed(_CAUSES[type(error)], message) from None
        return model.name

    def workers(self, name: str, version: str | None) -> tuple[int, int]:
        return self._named(name, version)[0].workers

    def scale(self, name: str, version: str | None, least: int, most: int) -> tuple[int, int]:
        for model in self._named(name, version):
            actual = self._registrar.scale(model, least, most)
        return actual

    async def unregister(self, name: str, version: str | None) -> None:
        await self._registrar.unregister(*self._named(name, version))

    def _named(self, name: str, version: str | None) -> list[Model]:
        return self._models.versions(name, version, exact=True)


def described(model: Model) -> DescribedModel:
    """Describe a model and its workers. Each copy of the model is one worker."""
    lifecycle = model.lifecycle
    config, state, service = lifecycle.config, lifecycle.state, lifecycle.service
    status = _STATUS.get(state, "Unhealthy")
    if state is State.READY and lifecycle.short_of_workers:
        status = "Unhealthy"
    workers: list[DescribedWorker] = []
    copies: Sequence[EngineCopy] = ()
    waiting = 0
    on_gpu = bool(config.handler.devices) if config.handler else gpu_count() > 0 and config.devices != ()
    if (pool := lifecycle.pool) is not None:
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
        batch_size=config.batch_size,
        max_batch_delay=config.max_batch_delay,
        max_idle_time=config.handler.max_idle_time if config.handler is not None else 60.0,
        queue_size=lifecycle.settings.server_config.job_queue_size,
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
    """Return one group of workers for each copy. As in LMI, a group belongs to a GPU: the first GPU of the copy.

    The groups' worker counts add up to the model's worker counts. A copy that is being removed does not count.
    """
    least, groups = model.workers[0], []
    for copy in copies:
        most = int(copy.state is not CopyState.DRAINING)
        groups.append(DescribedGroup(copy.gpus[0], min(least, most), most, _workers(copy, model)))
        least -= groups[-1].min_workers
    return groups


def _workers(copy: EngineCopy, model: Model) -> list[DescribedWorker]:
    """Return a copy as a worker. As in LMI, a copy that is loading is no worker, and a worker has one of two states."""
    if copy.state is CopyState.STARTING:
        return []
    status = "READY" if copy.state is CopyState.READY else "UNLOADING"
    return [DescribedWorker(copy.number, max(copy.started_at, model.registered_at), status)]
