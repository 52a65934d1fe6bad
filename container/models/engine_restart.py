"""Restarts the engine of a model after it died or stalled."""

from __future__ import annotations

import asyncio
import logging

from container.models.loads import LoadFailed, Loads
from container.models.registry import Model, Models
from container.settings.settings import ServerSettings
from engines.choice import is_vllm
from engines.interface import EngineStartError

logger = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 60.0  # Before a restart. The first pause is a second, and each further one twice as long.


class EngineRestarts:
    """Restarts engines, as often as the setting `engine_restart` allows."""

    def __init__(self, models: Models, server: ServerSettings, loads: Loads) -> None:
        self._models, self._server, self._loads = models, server, loads

    def begin(self, model: Model, reason: str) -> bool:
        """Begin to restart a model's engine.

        The model counts as failed until it is ready.

        Returns:
            False if the engine may not be restarted, or not once more.
        """
        if model in self._loads.running:
            return True
        most = self._server.engine_restart
        if model.restarts >= most or self._models.draining or not is_vllm(model.lifecycle.model):
            return False
        pause = min(2.0**model.restarts, LONGEST_PAUSE_SECONDS)
        model.restarts += 1
        model.lifecycle.fail(f"{reason}; it is started again")
        logger.error(
            "model %s: %s; /ping now answers 500; the engine is started again in %g s (%d of %d)",
            *(model.title, reason, pause, model.restarts, most),
        )
        self._loads.begin(model, self._restart(model, pause))
        return True

    async def _restart(self, model: Model, pause: float) -> None:
        await asyncio.sleep(pause)
        async with self._loads.one_at_a_time:
            try:
                await model.lifecycle.restart(self._loads.place)
            except EngineStartError as error:
                raise LoadFailed(f"model {model.name}: the engine cannot be started again: {error}") from None
        logger.info("model %s: the engine is there again", model.title)
