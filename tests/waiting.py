"""Waiting for what has no event that a test could wait for: another process, a thread, a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0
"""Long enough for a busy machine; a test that passes never waits so long."""


def wait_until(condition: Callable[[], object], seconds: float = SECONDS, about: Callable[[], object] = str) -> None:
    """Block until the condition holds; fail after `seconds`, with what `about` returns then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, about()
        time.sleep(0.02)


async def until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Wait until the condition holds, while the event loop goes on; raise TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
