"""Restarts the engine of a model after it died or stalled."""

from __future__ import annotations

import asyncio
import logging
import time

from container.models.loads import LoadFailed, Loads
from container.models.registry import Model, Models
from container.settings.settings import ServerSettings
from engines.choice import is_vllm
from engines.interface import EngineStartError

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0  # The setting `engine_restart` limits the restarts within this time.
LONGEST_PAUSE_SECONDS = 60.0  # Before a restart. The first pause is a second, and each further one twice as long.


class EngineRestarts:
    """Restarts engines, as often as the setting `engine_restart` allows."""

    def __init__(self, models: Models, server: ServerSettings, loads: Loads) -> None:
        self._models, self._server, self._loads = models, server, loads

    def begin(self, model: Model, reason: str) -> bool:
        """Begin to restart a model's engine.

        Calls of the model wait for the engine, or get an error, and the model counts as failed until it is ready.

        Returns:
            False if the engine may not be restarted, or not now.
        """
        if model in self._loads.running:
            return True
        most, lifecycle = self._server.engine_restart, model.lifecycle
        recent = model.recent_restarts(time.monotonic() - WINDOW_SECONDS)
        ends = self._models.draining or model in self._models.leaving
        if recent >= most or not is_vllm(lifecycle.model) or (ends and not lifecycle.calls_can_wait()):
            lifecycle.give_up()
            return False
        pause = min(2.0**recent, LONGEST_PAUSE_SECONDS)
        model.restarted_at.append(time.monotonic())
        status = "calls wait for it"
        if not lifecycle.calls_can_wait():
            lifecycle.fail(f"{reason}; it is started again")
            status = "/ping now answers 500"
        logger.error(
            "model %s: %s; %s; the engine is started again in %g s (%d of %d within %g minutes)",
            *(model.title, reason, status, pause, recent + 1, most, WINDOW_SECONDS / 60),
        )
        self._loads.begin(model, self._restart(model, reason, pause, last=recent + 1 >= most))
        return True

    async def _restart(self, model: Model, reason: str, pause: float, *, last: bool) -> None:
        await asyncio.sleep(pause)
        # Calls do not wait longer than that.
        late = asyncio.get_running_loop().call_later(model.lifecycle.model.predict_timeout, _is_late, model, reason)
        try:
            async with self._loads.one_at_a_time:
                late.cancel()
                await model.lifecycle.restart(self._loads.place, last=last)
        except EngineStartError as error:
            raise LoadFailed(f"model {model.name}: the engine cannot be started again: {error}") from None
        finally:
            late.cancel()
        logger.info("model %s: the engine has been restarted", model.title)


def _is_late(model: Model, reason: str) -> None:
    """Count a model as failed, because its restart waits too long for the load of another model."""
    if model.lifecycle.fail(f"{reason}; it is started again when another model is loaded"):
        logger.error("model %s: its restart waits for the load of another model; /ping now answers 500", model.title)
