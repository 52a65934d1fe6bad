"""Waiting for what has no event that a test could wait for: another process, a thread, a file."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 120.0
"""Long enough for a busy machine; a test that passes never waits so long."""


def wait_until(condition: Callable[[], object], seconds: float = SECONDS, about: Callable[[], object] = str) -> None:
    """Block until the condition holds; fail after `seconds`, with what `about` returns then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.02)


def wait_until_still(file: Path) -> None:
    """Block until a file is there, and has not changed for a while: its writer waits."""
    wait_until(file.exists, about=lambda: f"{file} was never written")
    deadline = time.monotonic() + SECONDS
    seen = None
    while seen != (content := file.read_bytes()):
        assert time.monotonic() < deadline, f"{file} still changes"
        seen = content
        time.sleep(1)


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until the condition, which may be a coroutine function, holds, while the event loop goes on.

    Raises:
        TimeoutError: it did not hold within `seconds`.
    """
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.005)
