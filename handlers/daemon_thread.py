"""Threads for work that may hang: the process does not wait for them when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run `function` in a thread of its own, and return an awaitable of its result.

    The awaiting task may be cancelled, and the process may end meanwhile. The interpreter joins the threads of
    `asyncio.to_thread` before it exits; it does not join these.
    """
    return _begin(function, "loading")


class LastingThread:
    """A thread that runs one function and then stays until it is told to end.

    It is for starting processes that ask the kernel to end with the thread that started them (PR_SET_PDEATHSIG).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = threading.Event()

    def run(self, function: Callable[[], T]) -> Awaitable[T]:
        """Run `function`, as `in_daemon_thread` does; to be called once."""
        return _begin(function, self._name, self._ended.wait)

    def end(self) -> None:
        """End the thread, and with it the processes that it has started."""
        self._ended.set()


def _begin(function: Callable[[], T], name: str, after: Callable[[], object] = lambda: None) -> Awaitable[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:
            # A future cannot carry SystemExit, which argument parsers raise.
            error = caught if isinstance(caught, Exception) else RuntimeError(str(caught))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, result, error)
        after()

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
