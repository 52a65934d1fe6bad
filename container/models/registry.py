"""The models of a server, by name and version."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from container.models.life_cycle import Lifecycle, State, until_none
from engines.errors import SHOWN, ModelNotNamed, NotReady, NoWorkers, UnknownModel
from handlers.contract import Running
from handlers.custom.worker_pool import FailedWorker
from handlers.loaded_service import Service
from handlers.route_declarations import MODEL_VERSION

_NAMES_SHOWN = 20


class AlreadyRegistered(Exception):
    """The server already has a model with this name and version."""


class OpenCall(Protocol):
    """A call that is not answered yet, identified by the head of its request."""

    request_id: str
    running: Running | None  # None until the handler has begun the call.


@dataclass(frozen=True, slots=True)
class EngineRestart:
    """A restart of a model's engine."""

    at: float  # A time of `time.monotonic`.
    copies: frozenset[int]  # The numbers of the restarted copies.


@dataclass(slots=True)
class Fault:
    """The faults of a model at one moment, and the path of the newest black box about these faults."""

    stalled: bool = False
    dead: frozenset[tuple[int, float]] = frozenset()  # The number and the start time of each copy that has died.
    worker: FailedWorker | None = None  # The custom handler's worker that failed last.
    black_box: str = ""  # The path of the black box. Empty if no file was written.


@dataclass(slots=True, eq=False)
class Model:
    """A model of the server."""

    lifecycle: Lifecycle
    url: str
    version: str | None = None
    at_startup: bool = True
    scaled_to_zero: bool = False
    restarts: list[EngineRestart] = field(default_factory=list)
    fault: Fault = field(default_factory=Fault)  # The faults that were last observed.
    registered_at: float = field(default_factory=time.time)  # In seconds since the epoch.

    @property
    def name(self) -> str:
        return self.lifecycle.config.name

    @property
    def title(self) -> str:
        return f"{self.name}:{self.version}" if self.version else self.name

    @property
    def workers(self) -> tuple[int, int]:
        """The smallest and the largest number of workers: processes of a custom handler, or copies of the model."""
        handler_config, pool = self.lifecycle.config.handler, self.lifecycle.pool
        if pool is not None:
            return pool.min_workers, pool.max_workers
        if handler_config is not None:
            return handler_config.min_workers, handler_config.max_workers
        return (0, 0) if self.scaled_to_zero else self.lifecycle.copy_limits

    def recent_restarts(self, copy: int, since: float) -> int:
        """Return how often a copy was restarted after `since`, a time of `time.monotonic`."""
        return sum(restart.at > since and copy in restart.copies for restart in self.restarts)

    def is_called(self, name: str) -> bool:
        """Return True if a name in a body is a name of the model, or the name of one of its adapters."""
        if name == self.name or name in self.lifecycle.config.served_model_names:
            return True
        service = self.lifecycle.service
        return service is not None and service.adapters is not None and name in service.adapters

    def service(self) -> Service:
        """Return the service that answers the model's calls.

        Raises:
            NotReady: The model is loading, or the model or the server is stopping.
            NoWorkers: The model is scaled to 0 workers.
        """
        stage, service = self.lifecycle.stage, self.lifecycle.service
        if self.scaled_to_zero:
            raise NoWorkers(f"model {self.name} has no workers: it is scaled to 0")
        # If the model has failed, its service reports a more specific error.
        if service is not None and stage in (State.READY, State.FAILED):
            return service
        if stage is State.STARTING:
            raise NotReady(f"the model {self.name!r} is not loaded yet")
        raise NotReady(self.lifecycle.end_reason)


class Models:
    """All models of a server. Use this class only on the event loop."""

    def __init__(self, models: Iterable[Model] = ()) -> None:
        self._models = {(model.name, model.version): model for model in models}
        self.only = self._only()  # The startup model if it is the server's only model, else None.
        self._turns = itertools.count()
        # The calls that are not answered yet, on all routes. Maps the head of a call to its route and its start time
        # (`time.perf_counter`).
        self.open_calls: dict[OpenCall, tuple[str, float]] = {}
        self.reading: set[asyncio.Timeout] = set()  # The time limits of calls whose bodies are being read.
        self.draining = False
        self.leaving: set[Model] = set()  # Unregistered models that still have calls or hold memory.

    def __iter__(self) -> Iterator[Model]:
        return iter(tuple(self._models.values()))

    def __contains__(self, name: object) -> bool:
        return any(known == name for known, _ in self._models)

    def _only(self) -> Model | None:
        models = list(self._models.values())
        return models[0] if len(models) == 1 and models[0].at_startup else None

    def startup(self) -> Model:
        """Return the startup model, for a call that names no model.

        Raises:
            ModelNotNamed: The server has no startup model, or has startup models of different names.
        """
        if self.only is not None:
            return self.only
        found = [model for model in self._models.values() if model.at_startup]
        if len(found) == 1:
            return found[0]
        if len({model.name for model in found}) == 1:
            return self.choose(found[0].name)
        models = f" ({self._names()})" if self._models else ", and it has none yet"
        raise ModelNotNamed("", f"the request has to name one of this server's models{models}")

    def called(self, names: Mapping[str, str], named: str = "") -> Model:
        """Return the model of a call: the model in its path, the model that its body names, or the startup model.

        Args:
            names: The parameters of the path.
            named: The name in the body, or an empty string.

        Raises:
            UnknownModel: The path names a model that the server does not have.
            ModelNotNamed: Nothing names the model, and the server has no startup model, or has startup models of
                different names.
        """
        if self.only is not None:
            return self.only
        if "model" in names:
            return self.choose(names["model"], names.get(MODEL_VERSION))
        found = [model for model in self if model.is_called(named)]
        if len(found) == 1:
            return found[0]  # If the name is an adapter's, this is the only version that has the adapter.
        return self.choose(found[0].name) if found else self.startup()

    def versions(self, name: str, version: str | None = None, *, exact: bool = False) -> list[Model]:
        """Return all versions of a model, or one version.

        Args:
            name: The name of the model.
            version: The version. None for all versions.
            exact: Whether only the given version counts. If False, and if the server lacks that version, the
                model without a version counts.

        Raises:
            UnknownModel: The server has no such model or version.
        """
        found = [model for (known, _), model in self._models.items() if known == name]
        if version is not None:
            without = [] if exact else [model for model in found if model.version is None]
            found = [model for model in found if model.version == version] or without
        if found:
            return found
        named = name if version is None else f"{name}:{version}"
        kind = {0: "no model", 1: "the model "}.get(len(self._models), "the models ")
        raise UnknownModel(named, f"Model not found: {named[:SHOWN]}. This server has {kind}{self._names()}.")

    def choose(self, name: str, version: str | None = None) -> Model:
        """Return one model.

        Versions take turns. If any version is ready, only ready versions take turns.

        Raises:
            UnknownModel: The server has no such model or version.
        """
        found = self.versions(name, version)
        if len(found) == 1:
            return found[0]
        ready = [model for model in found if model.lifecycle.state is State.READY and not model.scaled_to_zero]
        return (ready or found)[next(self._turns) % len(ready or found)]

    def add(self, model: Model) -> None:
        """Register a model.

        Raises:
            AlreadyRegistered: The server already has a model with this name and version.
        """
        key = (model.name, model.version)
        if key in self._models:
            raise AlreadyRegistered(f"Model {model.title} is already registered.")
        self._models[key] = model
        self.only = self._only()

    def remove(self, model: Model) -> None:
        if self._models.get((model.name, model.version)) is model:
            del self._models[model.name, model.version]
            self.only = self._only()

    @property
    def loaded(self) -> bool:
        return any(model.lifecycle.service is not None for model in self)

    @property
    def starting(self) -> bool:
        """True if a startup model is still loading."""
        return any(model.at_startup and model.lifecycle.state is State.STARTING for model in self)

    async def drain(self, limit: float) -> None:
        """Refuse new calls, and wait for running calls for at most `limit` seconds.

        Calls whose bodies are still being read are also refused.
        """
        self.draining = True
        own = until_none(lambda: len(self.open_calls) - len(self.reading), limit)
        await asyncio.gather(own, *(model.lifecycle.drain(limit) for model in self))
        now = asyncio.get_running_loop().time()
        for patience in self.reading:
            if not patience.expired():
                patience.reschedule(now)

    async def stop(self) -> None:
        every = {*self._models.values(), *self.leaving}
        await asyncio.gather(*(m.lifecycle.stop() for m in every if m.lifecycle.state is not State.STOPPED))

    def _names(self) -> str:
        names = [model.title for model in self._models.values()]
        more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more
