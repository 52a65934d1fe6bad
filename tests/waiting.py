"""Waits for changes that have no event: changes in another process, such as its end, in a thread, or in a file."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SECONDS = 120.0
"""A limit that is long enough even for a busy machine. A test that passes never waits this long."""


def wait_until(condition: Callable[[], object], seconds: float = SECONDS, about: Callable[[], object] = str) -> None:
    """Wait until the condition holds. After `seconds`, fail with the result of `about`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.02)


def wait_until_still(file: Path) -> None:
    """Wait until a file exists and has not changed for a while, which means that its writer is waiting."""
    wait_until(file.exists, about=lambda: f"{file} was never written")
    deadline = time.monotonic() + SECONDS
    seen = None
    while seen != (content := file.read_bytes()):
        assert time.monotonic() < deadline, f"{file} still changes"
        seen = content
        time.sleep(1)


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def pass_time(seconds: float) -> None:
    """Set the clock of the event loop forward, and run the timers that are due by then.

    So a test can let even a long limit expire. The limit may be long enough for the slowest machine.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
    await asyncio.sleep(0.001)  # Timers run in the order of their times, so this one is the last.


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until the condition holds, while the event loop runs. The condition may be a coroutine function.

    Raises:
        TimeoutError: The condition did not hold within `seconds`.
    """
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)
