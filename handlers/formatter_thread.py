"""Runs a customer's formatters off the event loop, one call at a time, so that one that blocks stops nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from handlers.errors import GenerationFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CHECK_SECONDS = 0.5


class _Job:
    __slots__ = ("abandoned", "done", "started", "work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.work, self.done = work, done
        self.started: float | None = None
        self.abandoned = False


class FormatterThread:
    """A thread of its own for formatters, which LMI also calls one at a time.

    A call that takes longer than `time_limit` seconds fails; its thread cannot be stopped, so it is left behind and
    another one goes on with the calls that wait.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._open: deque[_Job] = deque()
        """Jobs that are not done, in order; for the event loop alone."""
        self._waiting: deque[_Job] = deque()
        """Jobs that no thread has begun; guarded by `_changed`, as is `_thread`."""
        self._changed = threading.Condition()
        self._thread = 0
        """The number of the thread that is to work; those with lower numbers are left behind."""
        self._stopped = False
        """Guarded by `_changed`: a thread that finds nothing to do ends."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching = False

    def stop(self) -> None:
        """Let the thread end once it has done what waits; what comes later has one of its own."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def submit(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Have `work` run after what was submitted before; `done` gets its result or error on the event loop."""
        idle = self._loop is None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        job = _Job(work, done)
        self._open.append(job)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        if idle or self._stopped:
            self._begin(self._loop)
        if not self._watching:
            self._watching = True
            self._loop.call_later(_CHECK_SECONDS, self._check, self._loop)

    async def run(self, work: Callable[[], T]) -> T:
        """Have `work` run, and wait for it.

        Raises:
            GenerationFailed: it took too long.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(outcome: T | BaseException) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.submit(work, done)
        return await future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            self._thread += 1
            self._changed.notify_all()
        threading.Thread(target=self._work, args=(self._thread, loop), name="formatters", daemon=True).start()

    def _work(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._next(number)) is not None:
            try:
                outcome = job.work()
            except Exception as error:
                outcome = error if not isinstance(error, StopIteration) else _failure(error)
            except BaseException as error:
                # A formatter must neither end the server nor cancel one of its tasks.
                outcome = _failure(error)
            try:
                loop.call_soon_threadsafe(self._finish, job, outcome)
            except RuntimeError:  # the loop is closed: the process is ending, and nobody waits
                return

    def _next(self, number: int) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped or number != self._thread)
            if number != self._thread or not self._waiting:
                return None
            job = self._waiting.popleft()
            job.started = time.monotonic()
            return job

    def _finish(self, job: _Job, outcome: Any) -> None:
        if job.abandoned:
            return
        self._open.remove(job)  # the first one, as the thread keeps the order
        job.done(outcome)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._open and self._overdue(self._open[0]):
            self._replace(loop)
        self._watching = bool(self._open)
        if self._watching:
            loop.call_later(_CHECK_SECONDS, self._check, loop)

    def _overdue(self, job: _Job) -> bool:
        return job.started is not None and time.monotonic() - job.started > self._time_limit

    def _replace(self, loop: asyncio.AbstractEventLoop) -> None:
        stuck = self._open.popleft()
        stuck.abandoned = True
        logger.error("a formatter did not return within predict_timeout (%g s); going on without it", self._time_limit)
        self._begin(loop)
        stuck.done(GenerationFailed(f"the formatter did not return within predict_timeout ({self._time_limit:g} s)"))


def _failure(error: BaseException) -> GenerationFailed:
    return GenerationFailed(f"Custom formatter failed: {type(error).__name__}: {error}")
