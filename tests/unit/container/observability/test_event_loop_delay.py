"""The watch of the event loop: what it measures, and what it logs if the loop is blocked."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from container.observability import event_loop_delay as event_loop
from container.observability.event_loop_delay import EventLoopWatch
from tests.waiting import until


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> EventLoopWatch:
    monkeypatch.setattr(event_loop, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(event_loop, "_TICK_SECONDS", 0.01)
    return EventLoopWatch()


def hold_up(long_enough: Callable[[], bool] = lambda: True) -> None:
    while True:
        time.sleep(1.0)
        if long_enough():
            return


async def test_an_event_loop_that_stands_still_is_logged_once_with_what_it_is_at(
    watch: EventLoopWatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch.start()
    await until(lambda: sum(watch.lag.counts) > 3)
    hold_up(lambda: "in hold_up" in caplog.text)
    await until(lambda: watch.lag.total > 0.5)
    watch.stop()
    said = [record.getMessage() for record in caplog.records]  # a busy machine causes more such records
    (still,) = [text for text in said if "in hold_up\n    time.sleep(1.0)" in text]
    assert still.startswith("the event loop has stood still for ")
    after = [text for text in said if text.startswith("the event loop goes on after ")]
    assert any("no other thread" not in text for text in after)


async def test_a_process_that_stands_still_as_a_whole_is_told_apart(
    watch: EventLoopWatch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 60.0)
    watch.start()
    hold_up()
    await until(lambda: watch.lag.total > 0.5)
    watch.stop()
    records = [record for record in caplog.records if record.name == "container.observability.event_loop_delay"]
    assert records
    for record in records:
        assert record.getMessage().endswith(" s; no other thread ran either, or the machine stood still")


async def test_an_event_loop_that_stands_still_for_long_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(event_loop, "_STUCK_SECONDS", 0.5)
    reported: list[float] = []
    watch = EventLoopWatch(reported.append)
    watch.start()
    hold_up(lambda: bool(reported))
    assert len(reported) == 1
    assert reported[0] >= 0.5
    watch.stop()
