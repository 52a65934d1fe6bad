"""The states of the container: starting, ready, draining, stopped; failed when the engine is gone."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from enum import Enum

from container.settings import Settings
from handlers.engines.protocol import EngineStartError
from handlers.engines.stream import generate
from handlers.entry_point import Service, load_service
from handlers.request import GenerationRequest, SamplingParameters

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
"""Requests leave no reference cycles behind, so there is little to look for."""


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
        self._server = settings.server
        self.service: Service | None = None
        """None until the model is loaded."""
        self._state = State.STARTING
        self.open_calls = 0
        """Calls that were let in and are not answered yet."""

    @property
    def state(self) -> State:
        """The state, as true as can be told without asking another process."""
        service = self.service
        if self._state is State.READY and service is not None and not service.engine.health().alive:
            return State.FAILED
        return self._state

    async def start(self) -> None:
        """Load the model and generate a first token; ready only after that.

        Raises:
            EngineStartError: the model cannot be loaded, or cannot generate.
        """
        started = time.monotonic()
        try:
            self.service = await load_service(
                self.model, self._server.job_queue_size, self._server.throttle_error_http_code
            )
            await self._warm_up(self.service)
        except BaseException:
            self._state = State.FAILED
            raise
        # What exists now lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 50, 50)
        if self._state is State.STARTING:
            self._state = State.READY
            logger.info("model %s is ready after %.1f s", self.model.name, time.monotonic() - started)

    async def _warm_up(self, service: Service) -> None:
        request = GenerationRequest(
            request_id="warm-up", prompt="Hello", sampling=SamplingParameters(max_tokens=2, ignore_eos=True)
        )
        async for delta in generate(service.engine, request):
            if delta.token_count:
                return
        raise EngineStartError("the engine started but generated nothing")

    async def drain(self, limit: float) -> None:
        """Let no call in any more and wait for those inside, at most `limit` seconds."""
        self._state = State.DRAINING
        deadline = time.monotonic() + limit
        while self.open_calls and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.open_calls:
            logger.warning("%d requests were still running after %g s of draining; ending them", self.open_calls, limit)

    async def stop(self) -> None:
        """Free the engine."""
        self._state = State.STOPPED
        if self.service is not None:
            await self.service.engine.stop()
