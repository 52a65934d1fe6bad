"""The thread that runs formatters."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import pytest

from engines.errors import GenerationFailed
from handlers.formatter_thread import FormatterThread
from tests.waiting import pass_time, until


def boom() -> str:
    raise KeyError("x")


async def test_work_runs_off_the_event_loop_in_order() -> None:
    thread, seen, threads = FormatterThread(60), [], set()

    def work(number: int) -> None:
        seen.append(number)
        threads.add(threading.current_thread())

    await asyncio.gather(*(thread.run(partial(work, number)) for number in range(100)))
    assert seen == list(range(100))
    assert len(threads) == 1
    assert threading.main_thread() not in threads


async def test_an_error_reaches_the_one_who_waits() -> None:
    with pytest.raises(KeyError):
        await FormatterThread(60).run(boom)


async def test_a_formatter_that_exits_fails_alone() -> None:
    thread = FormatterThread(60)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(GenerationFailed, match="SystemExit: 3"):
        await thread.run(leave)
    assert await thread.run(lambda: "on") == "on"


async def test_a_formatter_that_hangs_fails_and_the_next_one_goes_on() -> None:
    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()
    hanging = asyncio.ensure_future(thread.run(lambda: begun.set() or release.wait()))
    await until(begun.is_set)
    await pass_time(61)
    following = [asyncio.ensure_future(thread.run(lambda number=number: number)) for number in range(3)]
    with pytest.raises(GenerationFailed, match="predict_timeout"):
        await hanging
    assert await asyncio.gather(*following) == [0, 1, 2]
    release.set()
    assert await thread.run(lambda: "on") == "on"


async def test_who_waits_may_go_away() -> None:
    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()
    waiting: asyncio.Future[Any] = asyncio.ensure_future(thread.run(lambda: begun.set() or release.wait()))
    await until(begun.is_set)
    waiting.cancel()
    release.set()
    assert await thread.run(lambda: "on") == "on"


async def test_a_call_that_hangs_without_its_client_fails_no_other() -> None:
    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()
    hanging: asyncio.Future[Any] = asyncio.ensure_future(thread.run(lambda: begun.set() or release.wait()))
    await until(begun.is_set)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await pass_time(61)
    assert await asyncio.gather(*(thread.run(lambda number=number: number) for number in range(3))) == [0, 1, 2]
    release.set()


async def test_an_error_that_comes_after_its_client_has_left_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        release.wait()
        raise ValueError("late")

    call = asyncio.ensure_future(thread.run(fail))
    await until(begun.is_set)
    call.cancel()
    release.set()
    assert await thread.run(lambda: "on") == "on"
    del thread, call
    gc.collect()
    assert not caplog.records


async def test_a_thread_that_is_stopped_does_what_waits_and_ends() -> None:
    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()

    def work() -> threading.Thread:
        begun.set()
        release.wait()
        return threading.current_thread()

    first = asyncio.ensure_future(thread.run(work))
    second = asyncio.ensure_future(thread.run(lambda: "waited"))
    await until(begun.is_set)
    thread.stop()
    release.set()
    worked = await first
    assert await second == "waited"
    await asyncio.to_thread(worked.join, 60)
    assert not worked.is_alive()
    assert await thread.run(lambda: "later") == "later"
