"""Threads for work that may hang. The process does not wait for these threads when it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run `function` in a new thread, and return an awaitable for its result.

    The awaiting task can be cancelled. The process can end before the function has returned. Before the interpreter
    exits, it joins the threads of `asyncio.to_thread`, but not these threads.
    """
    return _begin(function, "loading")


class LastingThreads:
    """Threads that run one function each, and then stay alive until `end` is called.

    The functions start processes. The kernel kills such a process when the thread that started it ends
    (PR_SET_PDEATHSIG).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = threading.Event()

    def run(self, function: Callable[[], T]) -> Awaitable[T]:
        """Run `function`, as `in_daemon_thread` does."""
        return _begin(function, self._name, self._ended.wait)

    def end(self) -> None:
        """End the threads. The kernel then kills the processes that they have started."""
        self._ended.set()


def _begin(function: Callable[[], T], name: str, after: Callable[[], object] = lambda: None) -> Awaitable[T]:
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # The awaiting task can be cancelled, but the function cannot.
    threading.Thread(target=_run, args=(function, outcome, after), name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)


def _run(function: Callable[[], T], outcome: Future[T], after: Callable[[], object]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        # A future cannot carry SystemExit, which argument parsers raise.
        outcome.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
    del function, outcome  # The traceback of an error references this frame, and would keep these objects alive.
    after()
