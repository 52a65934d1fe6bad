"""Loads, scales and unloads models while the server runs. Source: contracts/lmi.md section 1.10."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from container.devices import SliceNotChosen
from container.models.lifecycle import Lifecycle, State, until_none
from container.models.memory import Free, OutOfMemory, check_room, free_memory, placed
from container.models.registry import AlreadyRegistered, Model, Models
from container.settings.load import further_settings
from container.settings.properties import Value
from container.settings.settings import ServerSettings, Settings, StartupModel
from container.sources.location import model_place, name_of_url
from container.sources.remote_model import SETTINGS_SECONDS
from handlers.daemon_thread import in_daemon_thread
from handlers.engines.protocol import EngineOutOfMemory, EngineStartError
from handlers.engines.start_failure import failure_of
from handlers.errors import NotReady, Overloaded
from handlers.memory_release import release_memory
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_LOADS = 100
"""Models that may wait to be loaded; one is loaded at a time, as each measures what memory is free. Downloads go on
beside."""
_READ_SECONDS = SETTINGS_SECONDS + 60.0
"""That reading the settings of a model may take; those of one on S3 are fetched."""
_LEAVING_SECONDS = 5.0
"""What calls that were ended with their model may take to be answered, before its memory is looked for."""
_MOMENT_SECONDS = 0.2
"""What threads that have just ended may take to let go of what they had."""
_NO_MEMORY = re.compile(r"\bran out of memory\b|\b(OutOf)?MemoryError\b")
"""What is in the text of a custom handler's failure when memory is short; engines raise a type for it."""


class LoadFailed(Exception):
    """A model that was to be loaded cannot be; the message says why."""


@dataclass(frozen=True, slots=True)
class Order:
    """A model to be loaded."""

    url: str
    name: str | None = None
    version: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Keys of the model, such as `batch_size`."""


class Registrar:
    """Owns every load and unload that the management API asks for."""

    def __init__(
        self,
        models: Models,
        server: ServerSettings,
        environ: Mapping[str, str],
        command_line: Mapping[str, str] | None = None,
        free: Callable[[], Sequence[Free]] = free_memory,
        said: Iterable[str] = (),
    ) -> None:
        """`said`: warnings of settings that are in the log already."""
        self._models, self._server = models, server
        self._environ, self._command_line, self._free = environ, command_line or {}, free
        self._said = set(said)
        self._one_at_a_time = asyncio.Lock()
        self._loads: dict[Model, asyncio.Task[None]] = {}
        self._reads: set[asyncio.Future[Settings]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Registrations that are still being read, and unloads."""

    @property
    def loading(self) -> bool:
        """A model is being loaded."""
        return bool(self._loads)

    async def start(self) -> None:
        """Load the models that the server starts with, one after the other.

        Raises:
            EngineStartError: one of them cannot be loaded.
        """
        async with self._one_at_a_time:
            for model in self._models:
                if model.at_startup:
                    await model.lifecycle.start(self._place)

    async def register(self, order: Order) -> tuple[Model, asyncio.Task[None]]:
        """Register a model, and begin to load it; the task ends when it is loaded, whoever waits for it.

        The task raises OutOfMemory or LoadFailed; nothing of the model is left then.

        Raises:
            UrlNotFound: there is no model at the url.
            AlreadyRegistered: there is one with this name and version.
            SettingsError: its settings are wrong, or refused by the secure mode.
            LoadFailed: its settings cannot be read in time.
            NotReady: the server is stopping.
            Overloaded: too many models wait to be loaded.
        """
        self._check_running()
        if len(self._loads) + len(self._tasks) >= _MOST_LOADS:
            raise Overloaded(f"{_MOST_LOADS} models wait to be loaded already; try again later")
        return await asyncio.shield(self._begin(self._register(order)))

    def _check_running(self) -> None:
        if self._models.draining:
            raise NotReady("the server is stopping")

    async def _register(self, order: Order) -> tuple[Model, asyncio.Task[None]]:
        name = order.name or name_of_url(order.url)
        if any((known.name, known.version) == (name, order.version) for known in self._models):
            raise AlreadyRegistered(f"Model {name} is already registered.")
        settings = await self._read(name, order)
        self._check_running()
        self._warn(name, settings)
        model = as_model(StartupModel(settings, order.url, order.version), at_startup=False)
        self._models.add(model)
        task = asyncio.create_task(self._load(model, settings))
        self._loads[model] = task
        task.add_done_callback(lambda done: self._on_loaded(model, done))
        return model, task

    async def unregister(self, model: Model) -> None:
        """Let its calls finish, within `drain_timeout`, and free all that it has. Goes on when nobody waits for it.

        Raises:
            NotReady: it is still loaded, and the server starts with it.
        """
        if model.at_startup and model.lifecycle.state is State.STARTING:
            raise NotReady(f"model {model.name} is not loaded yet")
        self._models.remove(model)
        self._models.leaving.add(model)
        if (load := self._loads.get(model)) is not None:
            load.cancel()
        await asyncio.shield(self._begin(self._unload(model, load)))

    def scale(self, model: Model, min_workers: int, max_workers: int) -> tuple[int, int]:
        """Set the numbers of workers, and say what they are; an engine has one or, scaled down, none.

        Raises:
            NotReady: the model is not ready.
        """
        if model.lifecycle.state is not State.READY or model.lifecycle.service is None:
            raise NotReady(f"model {model.name} is not ready to be scaled: {model.lifecycle.state.value}")
        model.scaled_to_zero = max_workers == 0
        custom = model.lifecycle.service.custom
        if custom is None:
            return (0, 0) if model.scaled_to_zero else (1, 1)
        custom.scale(min_workers, max_workers)
        return min_workers, max_workers

    async def stop(self) -> None:
        """Give up what is being read or loaded, and wait for what is being unloaded."""
        while self._loads or self._tasks:
            for read in self._reads:
                read.cancel()
            for task in self._loads.values():
                task.cancel()
            await asyncio.gather(*self._loads.values(), *self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # their ends are noted by callbacks

    async def _read(self, name: str, order: Order) -> Settings:
        """In a thread that nobody waits for when the server stops: S3 may take minutes to answer."""
        read = asyncio.ensure_future(in_daemon_thread(lambda: self._settings(name, order)))
        self._reads.add(read)
        try:
            return await asyncio.wait_for(read, _READ_SECONDS)
        except TimeoutError:
            raise LoadFailed(f"the settings of model {name} were not read within {_READ_SECONDS:g} s") from None
        except asyncio.CancelledError:
            raise NotReady("the server is stopping") from None
        finally:
            self._reads.discard(read)

    def _settings(self, name: str, order: Order) -> Settings:
        place = Value(str(model_place(order.url)), "POST /models: url")
        arguments = {key: Value(text, "POST /models") for key, text in order.arguments.items()}
        return further_settings(place, name, self._environ, self._command_line, arguments)

    def _warn(self, name: str, settings: Settings) -> None:
        """Each warning once: those about the environment are the same for every model."""
        for warning in settings.warnings:
            if warning not in self._said:
                self._said.add(warning)
                logger.warning("model %s: %s", name, warning)

    def _place(self, model: ModelSettings, check: Settings | None = None) -> ModelSettings:
        """Choose the GPUs of a model that is about to be loaded, by the room that they have now.

        Args:
            model: its settings, which come back with the GPUs
            check: all its settings, if it is to be refused where there is too little room

        Raises:
            OutOfMemory: there is too little.
            EngineStartError: the settings ask for GPUs that it cannot have.
        """
        try:
            memory = self._free()
        except SliceNotChosen as error:
            raise EngineStartError(str(error)) from None
        if check is not None:
            check_room(check, memory)
        return placed(model, memory)

    async def _load(self, model: Model, settings: Settings) -> None:
        failure = await self._failure_of_load(model, settings)
        if failure is None:
            return
        self._models.remove(model)
        # Here no other error is its context: the frames of that would keep all that was loaded, weights among it.
        with contextlib.suppress(asyncio.CancelledError):  # a stop does not wait for memory
            await asyncio.sleep(_MOMENT_SECONDS)
        release_memory()
        raise failure

    async def _failure_of_load(self, model: Model, settings: Settings) -> Exception | None:
        """Load the model; what its client is to be told if that is not possible."""
        try:
            await model.lifecycle.fetch()  # before the room is measured, and without keeping others from loading
            async with self._one_at_a_time:
                await model.lifecycle.start(partial(self._place, check=settings))
        except (OutOfMemory, EngineStartError) as error:
            kind = OutOfMemory if _is_memory(error, settings) else LoadFailed
            return kind(f"model {model.name} cannot be loaded: {error}")
        except Exception:
            logger.exception("model %s cannot be loaded: internal error", model.title)
            return LoadFailed(f"model {model.name} cannot be loaded: internal error; the log has more")
        except asyncio.CancelledError:
            if self._models.draining:
                return NotReady("the server is stopping")
            return LoadFailed(f"model {model.name} was unregistered while it was loaded")
        return None

    def _on_loaded(self, model: Model, task: asyncio.Task[None]) -> None:
        del self._loads[model]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s", error)

    async def _unload(self, model: Model, load: asyncio.Task[None] | None) -> None:
        if load is not None:
            await asyncio.wait([load])
        await model.lifecycle.drain(self._server.drain_timeout)
        await model.lifecycle.stop()
        self._models.leaving.discard(model)
        model.lifecycle.let_go()
        # Calls that were ended hold the model until they are gone, and threads that have just ended for a moment.
        await until_none(lambda: self._in_the_way(model), _LEAVING_SECONDS)
        if not self._models.draining:
            await asyncio.sleep(_MOMENT_SECONDS)
            release_memory()
        logger.info("model %s is unregistered", model.title)

    def _in_the_way(self, model: Model) -> int:
        """Calls that hold the memory of a model; to a server that ends, memory is of no use."""
        return 0 if self._models.draining else model.lifecycle.open_calls

    def _begin(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Work that goes on when the client that asked for it goes away."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_memory(error: Exception, settings: Settings) -> bool:
    if isinstance(error, OutOfMemory | EngineOutOfMemory):
        return True
    if settings.model.handler is None:
        return False
    return _NO_MEMORY.search(str(error)) is not None or failure_of(error).out_of_memory


def as_model(given: StartupModel, *, at_startup: bool) -> Model:
    """A model that is yet to be loaded."""
    settings = given.settings
    handler = settings.model.handler
    return Model(
        Lifecycle(settings),
        given.url,
        given.version,
        at_startup,
        settings.server.job_queue_size,
        handler.max_idle_time if handler is not None else 60.0,
    )
