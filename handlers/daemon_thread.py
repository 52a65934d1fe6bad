"""Work that may never end, in a thread that the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run `function` in a thread of its own; awaiting the result may be given up, and the process may end meanwhile.

    Unlike `asyncio.to_thread`, whose threads the interpreter joins before it exits.
    """
    return _begin(function, "loading", _nothing_more)


class LastingThread:
    """A thread that does one thing and then stays until it is told to end.

    For what starts processes: the kernel ends a process with the thread that started it, where the process has asked
    for that (PR_SET_PDEATHSIG).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = threading.Event()

    def run(self, function: Callable[[], T]) -> Awaitable[T]:
        """As `in_daemon_thread`; to be called once."""
        return _begin(function, self._name, self._ended.wait)

    def end(self) -> None:
        """Let the thread end, and with it the processes that it has started."""
        self._ended.set()


def _begin(function: Callable[[], T], name: str, after: Callable[[], object]) -> Awaitable[T]:
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)
        after()

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _nothing_more() -> None:
    """The thread ends with its work."""
