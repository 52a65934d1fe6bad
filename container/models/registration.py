"""Loads, scales and unloads models: the startup models, and the models of the management API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from container.gpus import machine_gpus
from container.models.engine_restart import EngineRestarts
from container.models.life_cycle import Lifecycle, State, until_none
from container.models.load_queue import LoadFailed, Loads
from container.models.memory import OutOfMemory, free_memory
from container.models.placement import gpu_plan
from container.models.registry import AlreadyRegistered, Model, Models
from container.settings.properties import FILE_NAME
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from container.settings.values import Value
from container.sources.location import SETTINGS_SECONDS, name_of_url
from engines.daemon_thread import in_daemon_thread
from engines.errors import NotReady, Overloaded
from engines.interface import EngineOutOfMemory, EngineStartError
from engines.memory.garbage_collection import release_memory
from engines.start_failure import failure_of
from handlers.management import Registration

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Reads a model's settings, given its URL, its name and the registration's parameters. See `further_settings`.
ReadSettings = Callable[[Value, str, Mapping[str, Value]], Settings]

_MOST_LOADS = 100  # The maximum number of models that wait to be loaded.
_READ_SECONDS = SETTINGS_SECONDS + 60.0  # The time limit for reading the settings of a model, which may be on S3.
_LEAVING_SECONDS = 5.0  # Before a model's memory is released, finished calls have this time to drop references.
_MOMENT_SECONDS = 0.2  # The time for finished threads to drop their references to a model.
# Matches the error message of a custom handler that ran out of memory. Engines raise EngineOutOfMemory instead.
_NO_MEMORY = re.compile(r"\bran out of memory\b|\b(OutOf)?MemoryError\b")


class Registrar:
    """Runs all loads and unloads. A load or unload continues even if the client that requested it disconnects."""

    def __init__(
        self,
        models: Models,
        server_config: ServerConfig,
        read_settings: ReadSettings,
        free: Callable[[], Sequence[int]] = free_memory,
        said: Iterable[str] = (),
    ) -> None:
        """Create the registrar.

        Args:
            models: The server's models.
            server_config: The server's settings.
            read_settings: Reads the settings of a model.
            free: Returns the free memory of each device in bytes.
            said: Warnings that were already logged. They are not repeated.
        """
        self._models, self._server_config = models, server_config
        self._read_settings = read_settings
        self._said = set(said)
        self._loads = Loads(models, free)
        self.engine_restarts = EngineRestarts(models, server_config, self._loads)
        self._reads: set[asyncio.Future[Settings]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # The tasks that unload models or read a registration's settings.

    @property
    def loading(self) -> bool:
        """True if a model of the management API is being loaded, or an engine is being restarted."""
        return bool(self._loads.running)

    async def start(self) -> None:
        """Load the startup models one after the other.

        Raises:
            EngineStartError: A model cannot be loaded.
        """
        async with self._loads.one_at_a_time():
            for model in self._models:
                if model.at_startup:
                    await self._loads.copies_loaded(model.lifecycle.config)
                    await model.lifecycle.start(self._loads.place)
        # The files of a hub model are in the local cache now, so the plan does not need the hub.
        await in_daemon_thread(self._log_gpus)

    def _log_gpus(self) -> None:
        gpus = machine_gpus()
        loaded = [model.lifecycle for model in self._models if model.at_startup]
        # The settings of a service contain the engine that was chosen.
        models = [replace(one.settings, config=one.service.config) for one in loaded if one.service is not None]
        if not gpus or not models:
            return
        plan = gpu_plan(models, gpus)
        for line in plan.lines:
            logger.info("%s", line)
        if plan.warning:
            logger.warning("%s", plan.warning)

    async def register(self, order: Registration) -> tuple[Model, asyncio.Task[None]]:
        """Register a model and begin to load it.

        Returns:
            The model, and a task that ends when the model is loaded. If the load fails, the task removes the model and
            raises OutOfMemory or LoadFailed, or NotReady if the server stops.

        Raises:
            UrlNotFound: The URL does not lead to a model.
            AlreadyRegistered: The server already has a model with this name and version.
            SettingsError: The settings are invalid, or the secure mode refuses them.
            LoadFailed: The settings cannot be read in time.
            NotReady: The server is stopping.
            Overloaded: Too many models wait to be loaded.
        """
        self._check_running()
        if len(self._loads.running) + len(self._tasks) >= _MOST_LOADS:
            raise Overloaded(f"{_MOST_LOADS} models wait to be loaded already; try again later")
        return await asyncio.shield(self._begin(self._register(order)))

    def _check_running(self) -> None:
        if self._models.draining:
            raise NotReady("the server is stopping")

    async def _register(self, order: Registration) -> tuple[Model, asyncio.Task[None]]:
        name = order.name or name_of_url(order.url)
        if any((known.name, known.version) == (name, order.version) for known in self._models):
            raise AlreadyRegistered(f"Model {name} is already registered.")
        settings = await self._read(name, order)
        self._check_running()
        for warning in settings.warnings:  # A warning about the environment is logged only once for all models.
            if FILE_NAME in warning or warning not in self._said:
                self._said.add(warning)
                logger.warning("model %s: %s", name, warning)
        model = Model(Lifecycle(settings), order.url, order.version, at_startup=False)
        self._models.add(model)
        return model, self._loads.begin(model, self._load(model))

    async def unregister(self, *models: Model) -> None:
        """Remove models. Their running calls have at most `drain_timeout` to finish before the resources are freed.

        Raises:
            NotReady: A model is a startup model that is still loading, or the server is stopping. No model is removed.
        """
        self._check_running()  # An unload may take `drain_timeout`, but a server that is stopping has less time.
        for model in models:
            if model.at_startup and model.lifecycle.state is State.STARTING:
                raise NotReady(f"the model {model.name!r} is not loaded yet")
        for model in models:
            self._models.remove(model)
            self._models.leaving.add(model)
            model.lifecycle.end_reason = f"model {model.title} was unregistered"
        await asyncio.gather(*(asyncio.shield(self._begin(self._unload(model))) for model in models))

    def scale(self, model: Model, min_workers: int, max_workers: int) -> tuple[int, int]:
        """Set the number of workers: the processes of a custom handler, or the copies of an engine.

        Workers start or stop in the background. An engine that is scaled to 0 workers refuses calls and keeps its
        copies.

        Returns:
            The smallest and the largest number of workers that are now in effect.

        Raises:
            NotReady: The model is not ready.
            InvalidRequest: The engine cannot run this number of copies.
        """
        lifecycle = model.lifecycle
        if lifecycle.state is not State.READY or lifecycle.service is None:
            raise NotReady(f"model {model.name} is not ready to be scaled: {lifecycle.state.value}")
        if (custom := lifecycle.service.custom) is not None:
            custom.pool.scale(min_workers, max_workers)
        elif max_workers:
            min_workers = max(min_workers, 1)  # An engine needs at least one copy.
            lifecycle.scale(min_workers, max_workers)
        model.scaled_to_zero = max_workers == 0
        return min_workers, max_workers

    async def stop(self, *, draining: bool = False) -> None:
        """Cancel loads and the reading of settings, and wait for unloads.

        Args:
            draining: Whether to continue the restarts that calls wait for.
        """
        while (loads := self._loads_to_cancel(draining)) or self._tasks:
            for read in self._reads:
                read.cancel()
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, *self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # Meanwhile, callbacks remove the tasks from the lists.

    def _loads_to_cancel(self, draining: bool) -> list[asyncio.Task[None]]:
        loads = self._loads.running.items()
        return [load for model, load in loads if not (draining and model.lifecycle.calls_can_wait())]

    async def _read(self, name: str, order: Registration) -> Settings:
        """Read the settings in a thread that can be abandoned, because S3 may take minutes to answer."""
        url = Value(order.url, "POST /models: url")
        arguments = {key: Value(text, "POST /models") for key, text in order.settings.items()}
        read = asyncio.ensure_future(in_daemon_thread(lambda: self._read_settings(url, name, arguments)))
        self._reads.add(read)
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await read
        except TimeoutError:
            raise LoadFailed(f"the settings of model {name} were not read within {_READ_SECONDS:g} s") from None
        except asyncio.CancelledError:
            raise NotReady("the server is stopping") from None
        finally:
            self._reads.discard(read)

    async def _load(self, model: Model) -> None:
        failure = await self._failure_of_load(model)
        if failure is None:
            return
        self._models.remove(model)
        # The error is raised here, outside all `except` clauses. Otherwise its context would keep the loaded weights in
        # memory.
        with contextlib.suppress(asyncio.CancelledError):  # If the server stops, this step is skipped.
            await asyncio.sleep(_MOMENT_SECONDS)
            await asyncio.to_thread(release_memory)
        raise failure

    async def _failure_of_load(self, model: Model) -> Exception | None:
        settings = model.lifecycle.settings
        try:
            # The weights are downloaded before the free memory is measured. Other models can load during the download.
            await model.lifecycle.fetch()
            async with self._loads.one_at_a_time():
                await self._loads.copies_loaded(settings.config)
                await model.lifecycle.start(partial(self._loads.place, check=settings))
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

    async def _unload(self, model: Model) -> None:
        if not model.lifecycle.calls_can_wait():
            await self._cancel_load(model)
        await model.lifecycle.drain(self._server_config.drain_timeout)
        await self._cancel_load(model)
        await model.lifecycle.stop()
        self._models.leaving.discard(model)
        model.lifecycle.let_go()
        # For a moment, finished calls and threads still refer to the model, so its memory cannot be released yet. A
        # server that is stopping does not wait for this.
        await until_none(lambda: 0 if self._models.draining else model.lifecycle.open_calls, _LEAVING_SECONDS)
        if not self._models.draining:
            await asyncio.sleep(_MOMENT_SECONDS)
            await asyncio.to_thread(release_memory)
        logger.info("model %s is unregistered", model.title)

    async def _cancel_load(self, model: Model) -> None:
        if (load := self._loads.running.get(model)) is not None:
            load.cancel()
            await asyncio.wait([load])

    def _begin(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Start work that continues if the client that requested it disconnects."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_memory(error: Exception, settings: Settings) -> bool:
    if isinstance(error, OutOfMemory | EngineOutOfMemory):
        return True
    if settings.config.handler is None:
        return False
    return _NO_MEMORY.search(str(error)) is not None or failure_of(error).out_of_memory
