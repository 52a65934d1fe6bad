"""Loads a model into this process, in a thread that may be given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from handlers.daemon_thread import in_daemon_thread
from handlers.memory_release import release_memory

T = TypeVar("T")


async def load_in_thread(load: Callable[[], T]) -> T:
    """Run `load` in a thread of its own; other tasks go on meanwhile.

    A thread cannot be interrupted: one that is given up, as the caller is cancelled, goes on to its end. What it has
    loaded by then is freed there; the reference cycles of a model would keep it until somebody looks for them.

    Raises:
        Exception: whatever `load` raises.
    """
    given_up = threading.Event()
    once = [load]
    del load  # while it is being freed, nothing here may hold the engine that it belongs to

    def run() -> T:
        try:
            loaded = once.pop()()
        except BaseException:
            if not given_up.is_set():
                raise
        else:
            if not given_up.is_set():
                return loaded
            del loaded
        release_memory()
        raise TimeoutError("nobody waits for this model any more")

    try:
        return await in_daemon_thread(run)
    except asyncio.CancelledError:
        given_up.set()
        raise
