"""The thread that runs a customer's formatters: one call at a time, in order, as in LMI. Formatters may block."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from engines.errors import DeadlineExceeded, GenerationFailed, RequestError
from handlers.contract import Call, ContractError, ended_at_deadline
from handlers.djl_errors import failed_dependency
from handlers.queue import EngineQueue

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = "Custom formatter failed"  # LMI's message begins with this text.
_ITEMS_PER_JOB = 16  # The maximum number of items of one reply that are formatted before other replies get a turn.
_MOST_WAITING = 64  # `drain` blocks while a reply has more waiting items than this.


class FormatterThread:
    """The thread that runs all formatters of one model and of its adapters.

    The methods must run on one event loop. A call that takes longer than the time limit fails. Its thread cannot be
    stopped, so the next call gets a new thread. A call whose caller was cancelled still blocks the next call, until it
    returns or is overdue.
    """

    def __init__(self, time_limit: float) -> None:
        """Set the time limit of a call, in seconds."""
        self.time_limit = time_limit
        self._turn = asyncio.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._running: asyncio.Future[Any] | None = None  # The running call. Its caller may have been cancelled.
        self._overdue_at = 0.0  # The time after which the running call is overdue, on the event loop's clock.

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` after all earlier calls and return its result.

        Raises:
            GenerationFailed: The call took too long, or it raised an exception that would end the server, such as
                SystemExit.
        """
        async with self._turn:
            if self._running is not None:
                await self._end_of(self._running)
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="formatters")
            loop = asyncio.get_running_loop()
            self._overdue_at = loop.time() + self.time_limit
            job = loop.run_in_executor(self._executor, partial(_call, work))
            job.add_done_callback(self._forget)
            self._running = job
            try:
                if await self._end_of(job):
                    return job.result()
            finally:
                del job  # The job holds its exception, whose traceback holds this frame.
            raise GenerationFailed(f"the formatter did not return within predict_timeout ({self.time_limit:g} s)")

    async def read(self, call: Call, work: Callable[[], T], queue: EngineQueue) -> T:
        """Run `work` as `run` does, but wait only until the call's deadline.

        Args:
            call: The call that `work` reads.
            work: Reads the call with an input formatter.
            queue: Has the deadlines of the calls, and counts a call that ends at its deadline.

        Raises:
            ContractError: The call is refused, or its deadline has passed, perhaps before `work` began.
        """
        # It is not known yet whether the answer is a stream: the formatter's result decides that.
        deadline = queue.deadlines.of(call.arrived_at, call.time_limit, stream=True if call.from_handler else None)
        reading = self.run(work)
        try:
            return await (reading if deadline is None else deadline.limit(reading))
        except DeadlineExceeded as error:
            queue.statistics.calls.count(0.0, failed=True)
            queue.count_deadline(call.request_id, begun=False)
            refusal = failed_dependency(error.message)
            raise ContractError(ended_at_deadline(refusal.reply), refusal.reason) from None
        except RequestError as error:
            raise failed_dependency(error.message) from None

    async def _end_of(self, job: asyncio.Future[Any]) -> bool:
        """Wait for the end of a call. Return False if the call is overdue. The next call then gets a new thread."""
        left = self._overdue_at - asyncio.get_running_loop().time()
        ended = bool((await asyncio.wait({job}, timeout=max(left, 0.0)))[0])
        self._running = None
        if not ended:
            job.cancel()
            self.stop()
        return ended

    def _forget(self, job: asyncio.Future[Any]) -> None:
        """Drop the result of a call that has ended, in case nobody waits for it."""
        if not job.cancelled():
            job.exception()  # asyncio logs exceptions that are never read.
        if self._running is job:
            self._running = None

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
        raise GenerationFailed(f"{FAILED}: {type(error).__name__}: {error}") from error


class FormatterQueue(Generic[T]):
    """A queue of items for a formatter. All items belong to one reply. Waiting items are formatted together."""

    def __init__(
        self,
        thread: FormatterThread,
        format: Callable[[T], bytes],
        take: Callable[[list[tuple[T, bytes]], GenerationFailed | None], None],
    ) -> None:
        """Create the queue.

        Args:
            thread: The thread of the model's formatters.
            format: Formats an item, on the thread.
            take: Gets the items with their bytes. If an item fails, `take` gets the items before that item, and the
                error.
        """
        self._thread, self._format, self._take = thread, format, take
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
        """Drop the waiting items."""
        self._waiting.clear()
        self._room.set()

    async def drain(self) -> None:
        """Wait until the formatter has caught up."""
        await self._room.wait()

    async def _run(self) -> None:
        try:
            while self._waiting:
                items = [self._waiting.popleft() for _ in range(min(len(self._waiting), _ITEMS_PER_JOB))]
                if len(self._waiting) <= _MOST_WAITING:
                    self._room.set()
                try:
                    done, reason = await self._thread.run(partial(self._formatted, items))
                    self._take(done, None if reason is None else GenerationFailed(reason))
                except Exception as error:
                    self._take([], GenerationFailed(_reason(error)))
        finally:
            self._task = None

    def _formatted(self, items: list[T]) -> tuple[list[tuple[T, bytes]], str | None]:
        # Returns the reason, not the exception: its traceback would hold the thread's frame, which holds the result.
        done: list[tuple[T, bytes]] = []
        for item in items:
            try:
                done.append((item, self._format(item)))
            except Exception as error:
                return done, _reason(error)
        return done, None


def _reason(error: Exception) -> str:
    if isinstance(error, RequestError):
        return error.message
    logger.exception("cannot continue a formatted reply")
    return f"internal error: {error}"
