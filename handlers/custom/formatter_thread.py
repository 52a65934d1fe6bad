"""The thread that runs a model's formatters: one call at a time, in order, as in LMI. Formatters may block."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from engines.errors import GenerationFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ITEMS_PER_JOB = 16  # Items of one reply that are formatted before other replies have their turn.
_MOST_WAITING = 64  # Items of one reply that may wait. With more, `drain` waits.


class FormatterThread:
    """The thread that runs all formatters of one model.

    The methods must run on one event loop. A call that takes longer than the time limit fails. Its thread cannot be
    stopped, so the next call gets a new thread.
    """

    def __init__(self, time_limit: float) -> None:
        """Set the time limit of a call, in seconds."""
        self._time_limit = time_limit
        self._turn = asyncio.Lock()
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` after all earlier calls and return its result.

        Raises:
            GenerationFailed: The call took too long, or it raised an exception that would end the server.
        """
        async with self._turn:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="formatters")
            job = asyncio.get_running_loop().run_in_executor(self._executor, partial(_call, work))
            try:
                if (await asyncio.wait({job}, timeout=self._time_limit))[0]:
                    return job.result()
            finally:
                job.cancel()  # This has no effect on a finished job.
            self.stop()
            raise GenerationFailed(f"the formatter did not return within predict_timeout ({self._time_limit:g} s)")

    def stop(self) -> None:
        """End the thread when its calls have returned. A later call starts a new thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


def _call(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        # A future cannot hold a StopIteration. Exceptions such as SystemExit would end the server or cancel its tasks.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise GenerationFailed(f"Custom formatter failed: {type(error).__name__}: {error}") from error


class FormatterQueue(Generic[T]):
    """The items of one reply that wait for a formatter, in order. Waiting items are formatted together."""

    def __init__(
        self,
        thread: FormatterThread,
        call: Callable[[T], bytes],
        take: Callable[[list[tuple[T, bytes]], Exception | None], None],
    ) -> None:
        """Set the formatter and the receiver.

        Args:
            thread: The thread of the model's formatters.
            call: Formats an item. It runs on the thread.
            take: Gets the items with their bytes. After an error it gets the items before the error, and the error.
        """
        self._thread, self._call, self._take = thread, call, take
        self._waiting: deque[T] = deque()
        self._task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    def put(self, item: T) -> None:
        self._waiting.append(item)
        if len(self._waiting) > _MOST_WAITING:
            self._room.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        self._waiting.clear()
        self._room.set()

    async def drain(self) -> None:
        """Wait until the formatter has caught up."""
        await self._room.wait()

    async def _run(self) -> None:
        while self._waiting:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), _ITEMS_PER_JOB))]
            if len(self._waiting) <= _MOST_WAITING:
                self._room.set()
            try:
                self._take(*await self._thread.run(partial(self._formatted, items)))
            except GenerationFailed as failure:
                self._take([], failure)
            except Exception as failure:
                logger.exception("cannot continue a formatted reply")
                self._take([], failure)
        self._task = None

    def _formatted(self, items: list[T]) -> tuple[list[tuple[T, bytes]], Exception | None]:
        done: list[tuple[T, bytes]] = []
        for item in items:
            try:
                done.append((item, self._call(item)))
            except Exception as error:
                return done, error
        return done, None
