"""The states of the container: starting, ready, draining, stopped; failed when it cannot serve any more."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from container.settings.secure_mode import check_adapter, check_model
from container.settings.settings import Settings
from container.sources.remote_model import RemoteModel
from container.sources.source_error import FetchTimeout, SourceError
from handlers.contracts.family import ModelView
from handlers.daemon_thread import in_daemon_thread
from handlers.engines.choice import running_engine
from handlers.engines.protocol import Engine, EngineHealth, EngineStartError, generate
from handlers.entry_point import Limits, Service, load_service
from handlers.meter import StartupTimes
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest, SamplingParameters

logger = logging.getLogger(__name__)


class StallWatch:
    """Says when an engine is stalled, and logs when that begins and ends.

    It begins after `limit` seconds in which requests ran and nothing came, and ends with the engine's next sign of
    life: that the requests have been given up meanwhile does not make it well.
    """

    def __init__(
        self, health: Callable[[], EngineHealth], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: in seconds; 0: never."""
        self._health, self._limit, self._clock = health, limit, clock
        self._mark: float | None = None
        """The engine's mark when it was found to be stalled; None while it is not."""
        self._since = 0.0

    @property
    def reason(self) -> str:
        """What is wrong with the engine; empty if it is not stalled. Costs microseconds and asks no other process."""
        if not self._limit:
            return ""
        health = self._health()
        if self._mark is not None and health.mark != self._mark:
            logger.warning("the engine goes on after %.0f s; /ping answers 200 again", self._clock() - self._since)
            self._mark = None
        if self._mark is None and health.quiet_seconds > self._limit:
            self._mark, self._since = health.mark, self._clock() - health.quiet_seconds
            logger.error("%s; /ping now answers 500", self._text())
        return "" if self._mark is None else self._text()

    def _text(self) -> str:
        seconds = self._clock() - self._since
        return f"the engine is stalled: requests run, and nothing has come of them for {seconds:.0f} s"


async def fetch_weights(models: Sequence[RemoteModel], seconds: float) -> None:
    """Fetch what is not here yet, in a thread that ends when this is cancelled.

    Raises:
        EngineStartError: it is not possible, or not in so many seconds.
    """
    if not models:
        return
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


_GC_THRESHOLD = 20_000
"""Requests leave no reference cycles behind, so there is little to look for."""


_POLL_SECONDS = 0.05


class State(Enum):
    """What the container can do now."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """Starts, drains and stops one model's service, and knows the state in between."""

    def __init__(self, settings: Settings) -> None:
        self.model = settings.model
        self.remote_models = settings.remote_models
        self._secure_mode, self._given = settings.secure_mode, settings.given
        self._server = settings.server
        self.service: Service | None = None
        """None until the model is loaded."""
        self._stall: StallWatch | None = None
        self._fetched = False
        self.startup_times = StartupTimes()
        self._state, self._failure = State.STARTING, ""
        self._started_at = time.time()
        self.open_calls = 0
        """Calls that were let in and are not answered yet."""

    @property
    def state(self) -> State:
        """The state, as true as can be told without asking another process."""
        service = self.service
        if self._state is State.READY and service is not None and not service.runtime.health().alive:
            return State.FAILED
        return self._state

    @property
    def reason(self) -> str:
        """Why the model has failed; empty if it has not."""
        if self._state is State.READY and self.service is not None:
            return self.service.runtime.health().reason
        return self._failure

    @property
    def stalled(self) -> str:
        """Why the engine counts as stalled, though it lives; empty if it does not."""
        return self._stall.reason if self._stall is not None and self.state is State.READY else ""

    @property
    def short_of_workers(self) -> bool:
        """Whether a custom handler has fewer workers than it should, as one is being started again."""
        custom = self.service.custom if self.service is not None else None
        if custom is None:
            return False
        status = custom.status()
        return status.ready < status.min_workers

    async def start(self, place: Callable[[ModelSettings], ModelSettings] | None = None) -> None:
        """Load the model and let an engine generate a first token; ready only after that.

        Args:
            place: chooses the model's GPUs once its weights are here; may block, and may refuse the model by an error

        Raises:
            EngineStartError: the model cannot be loaded, or cannot generate.
        """
        started = time.monotonic()
        try:
            limits = Limits(
                queue_size=self._server.job_queue_size,
                overload_status=self._server.throttle_error_http_code,
                unavailable_status=self._server.wlm_error_http_code,
                model_aliases=self._server.model_aliases,
                adapter_faults=partial(check_adapter, self._secure_mode) if self._secure_mode is not None else None,
            )
            await self.fetch()
            if place is not None:
                self.model = await asyncio.to_thread(place, self.model)
            self.service = await load_service(self.model, limits, self.startup_times)
            if self.service.engine is not None:
                with self.startup_times.phase("first token"):
                    await _warm_up(self.service.engine)
            self._stall = StallWatch(self.service.runtime.health, self._server.stall_timeout)
        except BaseException as error:
            try:
                if self.service is not None:
                    await self.service.stop()
                    self.let_go()
            finally:
                # Not before: whoever loads the model takes it off the lists then, and /ping is not to see it meanwhile.
                if self._state is State.STARTING:
                    self._state, self._failure = State.FAILED, str(error)
            raise
        # What exists now lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 50, 50)
        if self._state is State.STARTING:
            self._state = State.READY
            seconds = time.monotonic() - started
            logger.info("model %s is ready after %.1f s: %s", self.model.name, seconds, self.startup_times)

    async def fetch(self) -> None:
        """Have the weights here that are on S3. `start` does so as well, unless it is done.

        Raises:
            EngineStartError: it is not possible, or the secure mode refuses what has come.
        """
        if self._fetched:
            return
        if self.remote_models:
            with self.startup_times.phase("download"):
                await fetch_weights(self.remote_models, self.model.model_loading_timeout)
        await self._check_fetched()
        self._fetched = True

    async def _check_fetched(self) -> None:
        """The secure mode once more: what it looks for may have come with the weights."""
        if not self.remote_models or self._secure_mode is None or self._given is None:
            return
        if faults := await asyncio.to_thread(check_model, self._secure_mode, self._given):
            raise EngineStartError("; ".join(faults))

    def view(self) -> ModelView:
        """What routes that generate nothing may know of the model."""
        service = self.service if self._state is not State.STARTING else None
        engine_handler = service.engine_handler if service is not None else None
        engine, version = running_engine(service.settings if service is not None else self.model)
        stalled = self.stalled
        return ModelView(
            settings=self.model,
            state="stalled" if stalled else self.state.value,
            reason=stalled or self.reason,
            started_at=self._started_at,
            loaded=service.engine if service is not None else None,
            engine=engine,
            engine_version=version,
            max_requests=engine_handler.limit if engine_handler is not None else self._server.job_queue_size,
            model_aliases=self._server.model_aliases,
            abort=service.abort if service is not None else _nothing_to_abort,
            adapters=service.adapters.all() if service is not None and service.adapters is not None else (),
        )

    async def drain(self, limit: float) -> None:
        """Let no call in any more and wait for those inside, at most `limit` seconds."""
        self._state = State.DRAINING
        await until_none(lambda: self.open_calls, limit)
        if self.open_calls:
            logger.warning("%d requests were still running after %g s of draining; ending them", self.open_calls, limit)

    async def stop(self) -> None:
        """Free the engine or end the workers."""
        self._state = State.STOPPED
        if self.service is not None:
            await self.service.stop()

    def let_go(self) -> None:
        """Keep nothing of what was stopped, so that its memory can be released."""
        self.service = self._stall = None


async def until_none(calls: Callable[[], int], limit: float) -> None:
    """Wait for calls to end, at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while calls() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)


def _nothing_to_abort(_: str) -> None:
    """No engine, no calls."""


async def _warm_up(engine: Engine) -> None:
    request = GenerationRequest(
        request_id="warm-up", prompt="Hello", sampling=SamplingParameters(max_tokens=2, ignore_eos=True)
    )
    async for delta in generate(engine, request):
        if delta.token_count:
            return
    raise EngineStartError("the engine started but generated nothing")
