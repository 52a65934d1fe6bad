"""Restarts a model's engine that died or stalled, and copies that died while other copies serve."""

from __future__ import annotations

import asyncio
import logging
import time

from container.models.life_cycle import State
from container.models.load_queue import LoadFailed, Loads
from container.models.registry import EngineRestart, Model, Models
from container.observability import logs
from container.settings.server import ServerConfig
from engines.interface import EngineStartError

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0  # The setting `engine_restart` limits the restarts of each copy within this time.
LONGEST_PAUSE_SECONDS = 60.0  # The pause before a restart is a second at first. It doubles each time, up to this limit.


class EngineRestarts:
    """Restarts engines, as often as the setting `engine_restart` allows.

    Each copy of a model has its own limit, for two reasons: a broken copy may die again and again while the other
    copies live, and a request that kills engines may kill several copies before it is identified. Copies that are dead
    at the same time are restarted together if one of them has a restart left.
    """

    def __init__(self, models: Models, server_config: ServerConfig, loads: Loads) -> None:
        self._models, self._server_config, self._loads = models, server_config, loads
        self._when_stalled = server_config.engine_restart > 0 and server_config.engine_restart_when_stalled

    def fault(self, model: Model) -> str:
        """Return the reason to restart a model's engine or some of its copies. Empty if no restart is needed."""
        lifecycle = model.lifecycle
        if lifecycle.died_while_draining:
            return lifecycle.reason
        if model in self._models.leaving:
            return ""
        if lifecycle.state in (State.FAILED, State.RESTARTING):
            return lifecycle.reason
        return lifecycle.missing or (lifecycle.stalled if self._when_stalled else "")

    def begin(self, model: Model, reason: str) -> bool:
        """Begin to restart a model's engine, or some of its copies.

        While any copy serves, calls are answered. Otherwise calls wait for the restart. If calls cannot wait, they get
        an error, and the model counts as failed until it is ready.

        Returns:
            False if the engine must not be restarted, or cannot be restarted now.
        """
        if model in self._loads.running:
            return True
        most, lifecycle = self._server_config.engine_restart, model.lifecycle
        recent = self._recent(model)
        ends = self._models.draining or model in self._models.leaving
        if recent >= most or not lifecycle.config.runs_on_vllm or (ends and not lifecycle.calls_can_wait()):
            if missing := lifecycle.missing:
                logs.show_held()
                limit = f"each copy is started again at most {most} times within {WINDOW_SECONDS / 60:g} minutes"
                logger.error("model %s: %s, for good: %s", model.title, missing, limit)
            lifecycle.give_up()
            return False
        pause = min(2.0**recent, LONGEST_PAUSE_SECONDS)
        what, status = "the engine", "calls wait for it"
        if lifecycle.has_other_copies:
            what, status = "it", "the other copies serve"
        elif not lifecycle.calls_can_wait():
            lifecycle.fail(f"{reason}; it is started again")
            status = "/ping now answers 500"
        logs.show_held()
        logger.error(
            "model %s: %s; %s; %s is started again in %g s (%d of %d within %g minutes)",
            *(model.title, reason, status, what, pause, recent + 1, most, WINDOW_SECONDS / 60),
        )
        self._loads.begin(model, self._restart(model, pause))
        return True

    def _recent(self, model: Model) -> int:
        """Return the lowest number of recent restarts among the copies that are to be restarted now."""
        since = time.monotonic() - WINDOW_SECONDS
        return min(model.recent_restarts(copy, since) for copy in _to_restart(model))

    async def _restart(self, model: Model, pause: float) -> None:
        await asyncio.sleep(pause)
        late = asyncio.create_task(self._fail_if_late(model))
        what = "the engine"
        try:
            async with self._loads.one_at_a_time():
                late.cancel()
                if not self.fault(model):
                    return  # The copy was removed, or the engine has recovered.
                if model.lifecycle.has_other_copies:
                    what = "a copy"
                model.restarts.append(EngineRestart(time.monotonic(), _to_restart(model)))
                await model.lifecycle.restart(
                    self._loads.place, last=lambda: self._recent(model) >= self._server_config.engine_restart
                )
        except EngineStartError as error:
            raise LoadFailed(f"model {model.name}: {what} cannot be started again: {error}") from None
        finally:
            late.cancel()
        logger.info("model %s: %s has been restarted", model.title, what)

    async def _fail_if_late(self, model: Model) -> None:
        """Mark a model as failed if no copy serves and the restart waits too long for the load of another model.

        This is checked once every `predict_timeout`. Each waiting call gets an error after its own `predict_timeout`,
        whether or not the model is marked.
        """
        lifecycle, fault = model.lifecycle, ""
        while not fault or lifecycle.has_other_copies:
            await asyncio.sleep(lifecycle.config.predict_timeout)
            fault = self.fault(model)
        if lifecycle.fail(f"{fault}; it is started again when another model is loaded"):
            logger.error(
                "model %s: its restart waits for the load of another model; /ping now answers 500", model.title
            )


def _to_restart(model: Model) -> frozenset[int]:
    """Return the numbers of the faulty copies, or of all copies if none is faulty: the model is then loaded again."""
    copies = model.lifecycle.copies
    faulty = frozenset(copy.number for copy in copies if copy.faulty)
    return faulty or frozenset(copy.number for copy in copies) or frozenset({1})
