"""The watch of the event loop: what is measured, and what is said when it stands still."""

from __future__ import annotations

import logging
import time

import pytest

from container import event_loop
from container.event_loop import EventLoopWatch
from tests.waiting import until


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> EventLoopWatch:
    monkeypatch.setattr(event_loop, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(event_loop, "_TICK_SECONDS", 0.01)
    return EventLoopWatch()


def hold_up() -> None:
    time.sleep(1.0)


@pytest.mark.asyncio
async def test_an_event_loop_that_stands_still_is_logged_once_with_what_it_is_at(
    watch: EventLoopWatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.start()
    await until(lambda: sum(watch.lag.counts) > 3)
    hold_up()
    await until(lambda: watch.lag.total > 0.5)
    watch.stop()
    still, goes_on = [record.getMessage() for record in caplog.records]
    assert still.startswith("the event loop has stood still for 0.")
    assert "in hold_up\n    time.sleep(1.0)" in still
    assert goes_on.startswith("the event loop goes on after ")
    assert "no other thread" not in goes_on


@pytest.mark.asyncio
async def test_a_process_that_stands_still_as_a_whole_is_told_apart(
    watch: EventLoopWatch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 60.0)
    watch.start()
    hold_up()
    await until(lambda: watch.lag.total > 0.5)
    watch.stop()
    (record,) = caplog.records
    assert record.getMessage().endswith(" s; no other thread ran either, or the machine stood still")


@pytest.mark.asyncio
async def test_an_event_loop_that_keeps_up_is_measured_and_nothing_is_said(
    watch: EventLoopWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "container.event_loop")
    watch.start()
    await until(lambda: sum(watch.lag.counts) > 10)
    watch.stop()
    assert watch.lag.total < 5
