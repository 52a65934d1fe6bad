"""A stalled engine is noticed, and so is its next sign of life."""

from __future__ import annotations

import logging

import pytest

from container.models.stall_watch import NEW_ENGINE_SECONDS, NEW_ENGINE_STALL_SECONDS, STALL_SECONDS, StallWatch
from engines.interface import EngineHealth, Progress

LIMIT = 60.0


class Bench:
    """An engine's progress by a clock that the test moves, looked at as its watchdog does, and the watch over it."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        self.now = 1000.0
        self.mark = 0.0
        self.progress = Progress(lambda: self.now)
        self.watch = StallWatch(self.health, limit, lambda: self.now)

    def health(self) -> EngineHealth:
        progress = self.progress
        return EngineHealth(True, "", progress.quiet_seconds, progress.mark, progress.worked_seconds)

    def run(self, seconds: float, *, busy: bool, moving: bool = False, tick: float = 0.25) -> None:
        for _ in range(int(seconds / tick)):
            self.now += tick
            self.mark += moving
            self.progress.look(busy, self.mark)

    @property
    def stalled(self) -> bool:
        return bool(self.watch.reason)


def test_an_idle_engine_is_well_however_long_it_says_nothing() -> None:
    bench = Bench()
    bench.run(100 * LIMIT, busy=False)
    assert not bench.stalled


def test_a_busy_engine_is_well_as_long_as_it_moves() -> None:
    bench = Bench()
    bench.run(100 * LIMIT, busy=True, moving=True)
    assert not bench.stalled


def test_the_time_counts_from_when_the_work_came_and_not_from_the_last_sign_of_life() -> None:
    bench = Bench()
    bench.run(1, busy=True, moving=True)
    bench.run(10 * LIMIT, busy=False)
    bench.run(LIMIT - 1, busy=True)
    assert not bench.stalled
    bench.run(2, busy=True)
    assert bench.stalled


def test_an_engine_whose_requests_are_given_up_one_by_one_is_stalled_nevertheless() -> None:
    bench = Bench()
    for _ in range(3):  # `predict_timeout` is shorter than the limit, and there is little to do
        bench.run(LIMIT / 2, busy=True)
        bench.run(LIMIT, busy=False)
    assert bench.stalled


def test_work_that_was_given_up_counts_no_more_once_the_engine_has_moved() -> None:
    bench = Bench()
    bench.run(LIMIT - 1, busy=True)
    bench.run(1, busy=False, moving=True)
    bench.run(LIMIT - 1, busy=True)
    assert not bench.stalled


def test_it_is_well_again_with_the_next_sign_of_life_and_not_before() -> None:
    bench = Bench()
    bench.run(LIMIT + 1, busy=True)
    assert bench.stalled
    bench.run(10, busy=False)  # its requests were given up
    assert bench.stalled
    bench.run(0.25, busy=False, moving=True)
    assert not bench.stalled


def test_it_can_stall_again_and_each_time_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bench.run(LIMIT + 1, busy=True)
            assert all(bench.stalled for _ in range(5))
            bench.run(1, busy=True, moving=True)
            assert not any(bench.stalled for _ in range(5))
    words = [record.message.partition(" ")[2].split()[1] for record in caplog.records]
    assert words == ["is", "goes", "is", "goes"]


def test_the_reason_says_for_how_long() -> None:
    bench = Bench()
    bench.run(75, busy=True)
    assert "75 s" in bench.watch.reason


def test_time_in_which_the_server_itself_stood_still_does_not_count() -> None:
    bench = Bench()
    bench.run(1, busy=True, moving=True)
    bench.run(3600, busy=True, tick=3600)  # the whole container was paused
    assert not bench.stalled


def test_without_a_limit_a_new_engine_may_compile_for_longer() -> None:
    bench = Bench(limit=None)
    bench.run(NEW_ENGINE_STALL_SECONDS - 1, busy=True)
    assert not bench.stalled
    bench.run(2, busy=True)
    assert bench.stalled
    bench.run(1, busy=True, moving=True)
    assert not bench.stalled


def test_an_engine_is_new_until_it_has_worked_for_ten_minutes_however_long_it_was_idle() -> None:
    bench = Bench(limit=None)
    bench.run(10 * NEW_ENGINE_SECONDS, busy=False)
    bench.run(NEW_ENGINE_SECONDS / 2, busy=True, moving=True)
    bench.run(10 * NEW_ENGINE_SECONDS, busy=False)
    bench.run(STALL_SECONDS + 1, busy=True)
    assert not bench.stalled
    bench.run(NEW_ENGINE_SECONDS / 2, busy=True, moving=True)
    bench.run(STALL_SECONDS - 1, busy=True)
    assert not bench.stalled
    bench.run(2, busy=True)
    assert bench.stalled


def test_a_limit_that_is_set_holds_for_a_new_engine() -> None:
    bench = Bench(limit=4.0)
    bench.run(5, busy=True)
    assert bench.stalled


def test_a_limit_of_0_is_none() -> None:
    bench = Bench(limit=0.0)
    bench.run(1000 * LIMIT, busy=True)
    assert not bench.stalled
