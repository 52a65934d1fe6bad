"""The life cycle of one model: loaded, restarted, drained and stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from platform import python_version

import msgspec

from container.models.stall_watch import StallWatch
from container.observability import logs
from container.settings.settings import RemoteWeights, Settings
from container.sources.location import FetchTimeout, SourceError
from engines.adapters import Adapter, AdapterOrder, AdapterRegistry
from engines.daemon_thread import in_daemon_thread
from engines.engine_choice import running_engine
from engines.errors import RequestError
from engines.interface import CopyState, Engine, EngineCopy, EngineHealth, EngineStartError, first_delta, unless_dead
from engines.memory.garbage_collection import collect_after_load
from engines.pooling import Pooling
from engines.request import WARM_UP
from engines.statistics import StartupTimes
from handlers.custom.worker_pool import WorkerPool
from handlers.entry_point import load_service
from handlers.loaded_service import EngineBehindHandler, Limits, Service
from handlers.model_config import ModelConfig
from handlers.route_declarations import ModelView

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class State(Enum):
    """The state of a model."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    RESTARTING = "restarting"  # The engine has died and is being restarted, and calls wait for it.
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Loads, restarts, drains and stops one model's service, and tracks its state."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.config = settings.config  # The model's settings, with the GPUs that were chosen for it.
        self.service: Service | None = None  # None until the model is loaded.
        self._stall: StallWatch | None = None
        self._fetched = False
        self.startup_times = StartupTimes()
        self.stage = State.STARTING  # The last stage that was reached. `state` also considers the health of the engine.
        self._failure = ""
        self.end_reason = "the server is stopping"  # The error message for calls that a drain refuses or ends.
        self._started_at = time.time()
        self.open_calls = 0  # The number of the model's calls that are not answered yet.

    @property
    def state(self) -> State:
        """The state, judged by the engine's latest signs of life. This property asks no other process."""
        if self.stage is State.READY and self.service is not None and not self._health(self.service).alive:
            return State.RESTARTING if self._waiting_engine is not None else State.FAILED
        return self.stage

    @property
    def engine(self) -> Engine | None:
        """The engine. None if no engine is loaded."""
        return self.service.running_engine if self.service is not None else None

    @property
    def pool(self) -> WorkerPool | None:
        """The workers of the custom handler. None if the model has no custom handler or is not loaded."""
        handler = self.service.custom if self.service is not None else None
        return handler.pool if handler is not None else None

    @property
    def _waiting_engine(self) -> Engine | None:
        """The engine, if calls wait for its restart. None if calls get an error when the engine dies."""
        service, engine = self.service, self.engine
        if self.stage is State.STARTING or service is None or engine is None or not engine.waits:
            return None
        handler = service.runtime
        if isinstance(handler, EngineBehindHandler) and not handler.custom.health().alive:
            return None  # The custom handler is dead, so a restart of the engine would not help.
        return engine

    @property
    def _engine_to_restart(self) -> Engine | None:
        """The engine, if it can be restarted in place. None if the model has to be loaded again."""
        return self.engine if self.has_other_copies else self._waiting_engine

    @property
    def copies(self) -> Sequence[EngineCopy]:
        """The copies of the model. Empty if no engine is loaded."""
        engine = self.engine  # Read once, because a black box reads the copies in its own thread.
        return engine.copies if engine is not None else ()

    @property
    def reason(self) -> str:
        """The reason why the model has failed. Empty if it has not failed."""
        if self.stage in (State.READY, State.DRAINING) and self.service is not None:
            return self._health(self.service).reason
        return self._failure

    @property
    def stalled(self) -> str:
        """The reason why the live engine counts as stalled. Empty if it is not stalled."""
        return self._stall.reason if self._stall is not None and self.state is State.READY else ""

    @property
    def missing(self) -> str:
        """The dead copies that can be restarted while other copies serve. Empty if the model is not ready."""
        return self._health(self.service).missing if self.service is not None and self.state is State.READY else ""

    @property
    def has_other_copies(self) -> bool:
        """True if the model is ready, and some copies would keep running during a restart of the faulty copies."""
        return self.state is State.READY and any(
            copy.state is not CopyState.DEAD and not copy.faulty for copy in self.copies
        )

    @property
    def lost(self) -> str:
        """The reason why the number of copies stays below the minimum. Empty if the model is not ready."""
        return self._health(self.service).lost if self.service is not None and self.state is State.READY else ""

    @property
    def unhealthy(self) -> str:
        """The reason why a ready model counts as unhealthy. Empty if it is healthy."""
        return self.stalled or self.lost

    def _health(self, service: Service) -> EngineHealth:
        """Return the engine's health. If reading it fails, mark the model as failed and log the error."""
        try:
            return service.runtime.health()
        except Exception as error:
            reason = f"the engine's health cannot be read: {error!r}"
            if self._failure != reason:
                logger.critical(
                    "model %s: its health cannot be read; /ping now answers 500", self.config.name, exc_info=True
                )
            self.fail(reason)
            self._failure = reason
            return EngineHealth(alive=False, reason=reason)

    @property
    def short_of_workers(self) -> bool:
        """True if too few workers of a custom handler serve, or if too few copies of the model serve."""
        if (pool := self.pool) is not None:
            return pool.ready < pool.min_workers
        return self.service is not None and self._health(self.service).ready_copies < self.copy_limits[0]

    @property
    def copy_limits(self) -> tuple[int, int]:
        """The smallest and the largest number of copies.

        Both are at most the engine's current number of copies, because settings may ask for more than the engine can
        have. A copy that drains does not count.
        """
        most = sum(copy.state is not CopyState.DRAINING for copy in self.copies) or 1
        return min(self.config.min_copies or most, most), most

    def scale(self, least: int, most: int) -> None:
        """Begin to add or remove copies of a ready model. `least` and `most` also apply if the model is loaded again.

        Raises:
            InvalidRequest: The engine cannot run this number of copies.
        """
        assert self.service is not None, "it is ready"
        engine, queue = self.service.engine, self.service.queue
        assert engine is not None, "it has no custom handler"
        sequences = engine.max_sequences
        engine.scale(least, most)
        if queue is not None:
            queue.limit += engine.max_sequences - sequences
        self.config = dataclasses.replace(self.config, min_copies=least, max_copies=most)
        config = dataclasses.replace(self.settings.config, min_copies=least, max_copies=most)
        self.settings = dataclasses.replace(self.settings, config=config)

    async def start(self, place: Callable[[ModelConfig], ModelConfig]) -> None:
        """Load the model and generate a first token. The model is then ready.

        Args:
            place: A function that chooses the model's GPUs after its weights were downloaded. It may block. If it
                raises an error, the model is not loaded.

        Raises:
            EngineStartError: The model cannot be loaded, or cannot generate a token.
        """
        try:
            self._serve(await self._load(place))
        except BaseException as error:
            # The state becomes FAILED only after the clean-up. The management API then removes the model at once, so
            # /ping does not show the failure.
            if self.stage is State.STARTING:
                self.stage, self._failure = State.FAILED, str(error)
            raise
        if self.stage is State.STARTING:
            self.stage = State.READY

    async def restart(self, place: Callable[[ModelConfig], ModelConfig], *, last: Callable[[], bool]) -> None:
        """Restart the engine of a model after it has died or stalled, or restart its dead copies.

        Calls that wait for the engine continue. If no calls can wait, or if the last attempt to start the engine has
        failed, the model is stopped and loaded again with its adapters. The model then counts as failed until it is
        ready. A model is never stopped while copies of it serve.

        Args:
            place: See `start`.
            last: Called if the engine cannot be started or dies again. Returns whether this was the last attempt. If
                not, calls wait for another attempt.

        Raises:
            EngineStartError: The model or a copy cannot be loaded, or cannot generate a token.
        """
        if (engine := self._engine_to_restart) is not None:
            logs.hold_lines()
            try:
                await engine.restart()
                self._is_back()
                return
            except EngineStartError as error:
                if engine.health().alive or not last():
                    raise
                if self.stage is State.DRAINING:
                    engine.give_up()
                    raise
                logs.show_held()
                logger.error(
                    "model %s: %s; it is loaded anew, and calls that wait get an error", self.config.name, error
                )
            reason = self.reason
            engine.give_up()
            self.fail(reason)
        if self.stage in (State.DRAINING, State.STOPPED):
            raise EngineStartError(self.end_reason)
        old = self.service
        assert old is not None, "it was ready once"
        await old.stop(self._failure)
        self.startup_times = StartupTimes()
        service = await self._load(place)  # Until the model is loaded, calls get the stopped service's error.
        if old.adapters is not None and service.adapters is not None:
            try:
                await _register_again(old.adapters.all(), service.adapters)
            except BaseException:
                await service.stop()
                raise
        self._serve(service)
        self._is_back()

    def _is_back(self) -> None:
        if self.stage is State.FAILED:
            self.stage, self._failure = State.READY, ""

    def _serve(self, service: Service) -> None:
        self.service = service
        self._stall = StallWatch(partial(self._health, service))

    async def _load(self, place: Callable[[ModelConfig], ModelConfig]) -> Service:
        started = time.monotonic()
        service: Service | None = None
        try:
            server_config = self.settings.server_config
            limits = Limits(
                queue_size=server_config.job_queue_size,
                overload_status=server_config.throttle_error_http_code,
                unavailable_status=server_config.wlm_error_http_code,
                model_aliases=server_config.model_aliases,
                adapter_faults=self.settings.adapter_faults,
                adapter_downloads=self.settings.remote_adapters,
            )
            await self.fetch()
            self.config = await asyncio.to_thread(place, self.settings.config)
            continue_calls = server_config.continue_calls if server_config.engine_restart else 0
            config = dataclasses.replace(
                self.config, continue_calls=continue_calls, stall_timeout=server_config.stall_timeout
            )
            logs.hold_lines()
            service = await load_service(config, limits, self.startup_times)
            if service.engine is not None:
                with self.startup_times.phase("first token"):
                    await _warm_up(service.engine, self.config)
            await asyncio.to_thread(collect_after_load, model_is_here=service.engine is not None)
        except BaseException:
            if service is not None:
                await service.stop()
                service = None  # The error's traceback would keep the service in memory.
            raise
        seconds = time.monotonic() - started
        logger.info("model %s is ready after %.1f s: %s", self.config.name, seconds, self.startup_times)
        return service

    async def fetch(self) -> None:
        """Download the weights that are on S3. `start` calls this method, too.

        Raises:
            EngineStartError: The download fails, or the secure mode refuses a file.
        """
        if self._fetched or not self.settings.remote_models:
            return
        with self.startup_times.phase("download"):
            await fetch_weights(self.settings.remote_models, self.config.model_loading_timeout)
        # Check again: files that the secure mode forbids may have been downloaded with the weights.
        check = self.settings.model_faults
        if check is not None and (faults := await asyncio.to_thread(check)):
            raise EngineStartError("; ".join(faults))
        self._fetched = True

    def view(self) -> ModelView:
        """Return a view of the model, for routes that generate nothing."""
        service = self.service if self.stage is not State.STARTING else None
        queue = service.queue if service is not None else None
        config = service.config if service is not None else self.config
        engine, version = ("python", python_version()) if config.handler is not None else running_engine(config)
        stalled = self.stalled
        return ModelView(
            config=self.config,
            state="stalled" if stalled else self.state.value,
            reason=self.unhealthy or self.reason,
            started_at=self._started_at,
            loaded=service.engine if service is not None else None,
            engine=engine,
            engine_version=version,
            max_requests=queue.limit if queue is not None else self.settings.server_config.job_queue_size,
            model_aliases=self.settings.server_config.model_aliases,
            abort=service.abort if service is not None else lambda _: None,
            adapters=service.adapters.all() if service is not None and service.adapters is not None else (),
        )

    async def drain(self, limit: float) -> None:
        self.stage = State.DRAINING
        await until_none(lambda: self.open_calls, limit)
        if self.open_calls:
            logger.warning("%d requests were still running after %g s of draining; ending them", self.open_calls, limit)

    async def stop(self) -> None:
        self.stage = State.STOPPED
        if self.service is not None:
            await self.service.stop(self.end_reason)

    def fail(self, reason: str) -> bool:
        """Mark a ready model as failed from now on. Its service still answers calls.

        Returns:
            False if the model was not ready. Nothing has changed then.
        """
        if self.stage is not State.READY:
            return False
        self.stage, self._failure = State.FAILED, reason
        return True

    @property
    def died_while_draining(self) -> bool:
        """True if the engine has died during a drain, in which running calls still have time to finish."""
        service = self.service
        return self.stage is State.DRAINING and service is not None and not self._health(service).alive

    def calls_can_wait(self) -> bool:
        """Return True if calls wait for a restart when the engine dies."""
        return self._waiting_engine is not None

    def give_up(self) -> None:
        """Give an error to the calls that wait for the engine. Copies that are dead now are never restarted."""
        if (engine := self._engine_to_restart) is not None:
            engine.give_up()

    def let_go(self) -> None:
        """Drop all references to the stopped service, so that its memory can be released."""
        self.service = self._stall = None


async def _register_again(adapters: Sequence[Adapter], registry: AdapterRegistry) -> None:
    for adapter in adapters:
        given = {name: getattr(adapter, name) for name in ("name", "src", "preload", "pin", "alias", "options")}
        try:
            if adapter.name not in registry:
                await registry.register(AdapterOrder(**given))
        except RequestError as error:
            logger.error("adapter %s cannot be registered after the restart: %s", adapter.name, error.message)


async def until_none(count: Callable[[], int], limit: float) -> None:
    """Wait until `count` returns 0, for at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while count() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)


async def _warm_up(engine: Engine, config: ModelConfig) -> None:
    """Run a first request.

    Raises:
        EngineStartError: The engine cannot answer the request.
    """
    request = WARM_UP
    if engine.pooling is not None:
        request = msgspec.structs.replace(WARM_UP, pooling=Pooling(task=engine.pooling.task), room=0)
    try:
        first = await unless_dead(first_delta(engine.submit, request), lambda: not engine.health().alive)
    except RequestError as error:
        given = f" with {config.engine_options}" if config.engine_options else ""
        message = f"the engine started{given} but failed at its first request; the log has its error: {error.message}"
        raise EngineStartError(message) from error
    if not first.token_count and first.numbers is None:
        raise EngineStartError("the engine started but generated nothing")


async def fetch_weights(models: Sequence[RemoteWeights], seconds: float) -> None:
    """Download the missing weights in a thread that stops if this coroutine is cancelled.

    Raises:
        EngineStartError: The download fails, or takes longer than `seconds`.
    """
    stop = threading.Event()

    def fetch() -> None:
        deadline = time.monotonic() + seconds
        for model in models:
            model.fetch_weights(max(deadline - time.monotonic(), 0.0), stop)

    try:
        await in_daemon_thread(fetch)
    except FetchTimeout as error:
        raise EngineStartError(f"{error}; option.model_loading_timeout sets the limit ({seconds:g} s)") from error
    except SourceError as error:
        raise EngineStartError(str(error)) from error
    finally:
        stop.set()
