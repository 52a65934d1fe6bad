"""Runs the loads of models, one at a time, because each load measures the free memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

from container.gpus import SliceNotChosen
from container.models.life_cycle import until_none
from container.models.memory import OutOfMemory, check_room
from container.models.placement import placed
from container.models.registry import Model, Models
from container.observability import logs
from container.settings.settings import Settings
from engines.errors import NotReady
from engines.interface import CopyState, EngineStartError
from handlers.model_config import ModelConfig

logger = logging.getLogger(__name__)


class LoadFailed(Exception):
    """A model cannot be loaded. The message states the reason."""


_REFUSALS = (LoadFailed, OutOfMemory, NotReady)


class Loads:
    """The running loads of models. Each load is a task that ends when the model is loaded."""

    def __init__(self, models: Models, free: Callable[[], Sequence[int]]) -> None:
        """Create the loads.

        Args:
            models: The server's models.
            free: Returns the free memory of each device in bytes.
        """
        self._models, self._free = models, free
        self._lock = asyncio.Lock()
        self.running: dict[Model, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def one_at_a_time(self) -> AsyncIterator[None]:
        """Wait for other loads. During the `async with` block, the log holds back lines that no logger wrote."""
        async with self._lock:
            models = [model.lifecycle.config for model in (*self._models, *self._models.leaving)]
            # If a model runs customer code, such lines are shown, because the code may print at any time.
            logs.hold_output(not any(m.handler or m.formatters or m.handler_before_engine for m in models))
            try:
                yield
            finally:
                logs.hold_output(False)

    async def copies_loaded(self, config: ModelConfig) -> None:
        """Wait for other models' copies that are still loading in the background.

        Part of the memory that these copies will use still counts as free.

        Args:
            config: The settings of the model to be loaded. The wait ends after `model_loading_timeout`.
        """

        def loading() -> int:
            models = (*self._models, *self._models.leaving)
            return sum(copy.state is CopyState.STARTING for model in models for copy in model.lifecycle.copies)

        await until_none(loading, config.model_loading_timeout)

    def begin(self, model: Model, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a load. If it fails, the error is logged."""
        task = asyncio.create_task(work)
        self.running[model] = task
        task.add_done_callback(lambda done: self._ended(model, done))
        return task

    def place(self, config: ModelConfig, check: Settings | None = None) -> ModelConfig:
        """Return a model's settings with its GPUs in order of use: the GPU with the most free memory first.

        Args:
            config: The settings.
            check: All settings of the model. If they are given, the model has to fit into the free memory.

        Raises:
            OutOfMemory: The model does not fit.
            EngineStartError: It is unclear which GPU or MIG slice would be used.
        """
        try:
            memory = self._free()
        except SliceNotChosen as error:
            raise EngineStartError(str(error)) from None
        if check is not None:
            check_room(check, memory)
        return placed(config, memory)

    def _ended(self, model: Model, task: asyncio.Task[None]) -> None:
        del self.running[model]
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.show_held()
            logger.error("%s", error, exc_info=None if isinstance(error, _REFUSALS) else error)
