"""Formatters may block, so they run in a thread: one call at a time, in order, as in LMI."""

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

_ITEMS_PER_JOB = 16  # Other replies' formatters have their turn after so many.
_MOST_WAITING = 64  # Items of one reply that may wait before `drain` does.


class FormatterThread:
    """The thread of all formatters of a model. For the event loop alone. A call that takes longer than `time_limit`
    seconds fails. Its thread cannot be stopped; the next call gets another."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._turn = asyncio.Lock()
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` after all that was given before, and return its result. Raises GenerationFailed: it took too long,
        or would have ended the server."""
        async with self._turn:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="formatters")
            job = asyncio.get_running_loop().run_in_executor(self._executor, partial(_call, work))
            try:
                if (await asyncio.wait({job}, timeout=self._time_limit))[0]:
                    return job.result()
            finally:
                job.cancel()  # of no effect on one that is done
            self.stop()
            raise GenerationFailed(f"the formatter did not return within predict_timeout ({self._time_limit:g} s)")

    def stop(self) -> None:
        """End the thread once its call has returned; a later call gets a thread of its own."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


def _call(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:
        # A future cannot hold a StopIteration, and a formatter must neither end the server nor cancel its tasks.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise GenerationFailed(f"Custom formatter failed: {type(error).__name__}: {error}") from error


class FormatterQueue(Generic[T]):
    """What of one reply is to pass through a formatter, in order; what has gathered meanwhile passes together."""

    def __init__(
        self,
        thread: FormatterThread,
        call: Callable[[T], bytes],
        take: Callable[[list[tuple[T, bytes]], Exception | None], None],
    ) -> None:
        """`call`: formats an item, on the thread. `take`: gets items with their bytes, up to an error."""
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
                logger.exception("a formatted reply cannot be continued")
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
