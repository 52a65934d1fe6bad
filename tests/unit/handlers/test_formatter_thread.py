from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from handlers.errors import GenerationFailed
from handlers.formatters import FormatterThread

pytestmark = pytest.mark.asyncio


def boom() -> str:
    raise KeyError("x")


async def test_work_runs_off_the_event_loop_in_order() -> None:
    thread, results = FormatterThread(5), []
    done = asyncio.Event()
    for number in range(100):
        thread.submit(lambda number=number: (number, threading.current_thread().name), results.append)
    thread.submit(lambda: 0, lambda _: done.set())
    await done.wait()
    assert results == [(number, "formatters") for number in range(100)]


async def test_an_error_reaches_the_one_who_waits() -> None:
    with pytest.raises(KeyError):
        await FormatterThread(5).run(boom)


async def test_a_formatter_that_exits_fails_alone() -> None:
    thread = FormatterThread(5)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(GenerationFailed, match="SystemExit: 3"):
        await thread.run(leave)
    assert await thread.run(lambda: "on") == "on"


async def test_a_formatter_that_hangs_fails_and_the_next_one_goes_on() -> None:
    thread, release = FormatterThread(0.2), threading.Event()
    hanging = asyncio.ensure_future(thread.run(release.wait))
    following = [asyncio.ensure_future(thread.run(lambda number=number: number)) for number in range(3)]
    with pytest.raises(GenerationFailed, match="did not return within predict_timeout"):
        await hanging
    assert await asyncio.gather(*following) == [0, 1, 2]
    release.set()
    assert await thread.run(lambda: "on") == "on"


async def test_who_waits_may_go_away() -> None:
    thread, release = FormatterThread(5), threading.Event()
    waiting: asyncio.Future[Any] = asyncio.ensure_future(thread.run(release.wait))
    await asyncio.sleep(0.05)
    waiting.cancel()
    release.set()
    assert await thread.run(lambda: "on") == "on"


async def test_a_thread_that_is_stopped_does_what_waits_and_ends() -> None:
    thread, release = FormatterThread(5), threading.Event()
    first = asyncio.ensure_future(thread.run(lambda: release.wait() and threading.current_thread()))
    second = asyncio.ensure_future(thread.run(lambda: "waited"))
    await asyncio.sleep(0.05)
    thread.stop()
    release.set()
    worked = await first
    assert await second == "waited"
    await asyncio.to_thread(worked.join, 5)
    assert not worked.is_alive()
    assert await thread.run(lambda: "later") == "later"
