"""Tasks that run in the background of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTasks(set[asyncio.Task[None]]):
    """The running tasks of one owner. If a task fails, its error is logged."""

    def __init__(self, log_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._log_error = log_error

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a new task."""
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log_error(error)
