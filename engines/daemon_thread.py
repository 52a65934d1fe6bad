"""Threads for work that may hang: the process does not wait for them when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run `function` in a new thread, and return an awaitable of its result.

    The awaiting task may be cancelled, and the process may end before the function. The interpreter joins the threads
    of `asyncio.to_thread` before it exits; it does not join these.
    """
    return _begin(function, "loading")


class LastingThreads:
    """Threads that run one function each, and then stay until they are told to end.

    They are for starting processes that ask the kernel to end with the thread that started them (PR_SET_PDEATHSIG).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = threading.Event()

    def run(self, function: Callable[[], T]) -> Awaitable[T]:
        """Run `function`, as `in_daemon_thread` does."""
        return _begin(function, self._name, self._ended.wait)

    def end(self) -> None:
        """End the threads, and with them the processes that they have started."""
        self._ended.set()


def _begin(function: Callable[[], T], name: str, after: Callable[[], object] = lambda: None) -> Awaitable[T]:
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # the waiting task may be cancelled, but not the function
    threading.Thread(target=_run, args=(function, outcome, after), name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)


def _run(function: Callable[[], T], outcome: Future[T], after: Callable[[], object]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        # A future cannot carry SystemExit, which argument parsers raise.
        outcome.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
    del function, outcome  # The error's traceback holds this frame.
    after()
