"""A stalled engine is noticed, and so is its next sign of life."""

from __future__ import annotations

import logging

import pytest

from container.models.stall_watch import StallWatch
from engines.interface import NEW_ENGINE_SECONDS, NEW_ENGINE_STALL_SECONDS, STALL_SECONDS, EngineHealth, Progress

LIMIT = 60.0


class Bench:
    """An engine's progress, and the watch over it. The test moves their clock."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        self.now, self.limit = 1000.0, limit
        self.mark = 0.0
        self.progress = self.new_progress()
        self.watch = StallWatch(self.health, lambda: self.now)

    def new_progress(self) -> Progress:
        return Progress(self.limit, lambda: self.now)

    def health(self) -> EngineHealth:
        progress = self.progress
        return EngineHealth(True, "", progress.quiet_seconds, "the engine" if progress.is_stalled else "")

    def run(self, seconds: float, *, busy: bool, moving: bool = False, tick: float = 0.25) -> None:
        for _ in range(int(seconds / tick)):
            self.now += tick
            self.mark += moving
            self.progress.look(busy, self.mark)

    @property
    def stalled(self) -> bool:
        return bool(self.watch.reason)


IDLE, HANGS, MOVES, ENDS = (False, False), (True, False), (True, True), (False, True)
"""Whether an engine has work, and whether it makes progress."""
NEW, HALF = NEW_ENGINE_STALL_SECONDS, NEW_ENGINE_SECONDS / 2
# The limit, and the steps. A step says how many seconds it lasts, what the engine does in this time, and whether the
# engine is stalled afterwards.
SCENARIOS: dict[str, tuple[float | None, list[tuple[float, tuple[bool, bool], bool]]]] = {
    "an idle engine is well however long it says nothing": (LIMIT, [(100 * LIMIT, IDLE, False)]),
    "a busy engine is well as long as it moves": (LIMIT, [(100 * LIMIT, MOVES, False)]),
    "the time counts from when the work came and not from the last sign of life": (
        LIMIT,
        [(1, MOVES, False), (10 * LIMIT, IDLE, False), (LIMIT - 1, HANGS, False), (2, HANGS, True)],
    ),
    "an engine whose requests are given up one by one, before the limit, is stalled nevertheless": (
        LIMIT,
        [(LIMIT / 2, HANGS, False), (LIMIT, IDLE, False), (LIMIT / 2 + 1, HANGS, True)],
    ),
    "work that was given up counts no more once the engine has moved": (
        LIMIT,
        [(LIMIT - 1, HANGS, False), (1, ENDS, False), (LIMIT - 1, HANGS, False)],
    ),
    "it is well again with the next sign of life and not before": (
        LIMIT,
        [(LIMIT + 1, HANGS, True), (10, IDLE, True), (0.25, ENDS, False)],
    ),
    "without a limit a new engine may compile for longer": (
        None,
        [(NEW - 1, HANGS, False), (2, HANGS, True), (1, MOVES, False)],
    ),
    "an engine is new until it has worked for ten minutes however long it was idle": (
        None,
        [
            *((20 * HALF, IDLE, False), (HALF, MOVES, False), (20 * HALF, IDLE, False)),
            *((STALL_SECONDS + 1, HANGS, False), (HALF, MOVES, False)),
            *((STALL_SECONDS - 1, HANGS, False), (2, HANGS, True)),
        ],
    ),
    "a limit that is set holds for a new engine": (4.0, [(5, HANGS, True)]),
    "a limit of 0 is none": (0.0, [(1000 * LIMIT, HANGS, False)]),
}


@pytest.mark.parametrize(("limit", "steps"), SCENARIOS.values(), ids=SCENARIOS)
def test_an_engine_is_stalled_or_well(limit: float | None, steps: list[tuple[float, tuple[bool, bool], bool]]) -> None:
    bench = Bench(limit)
    for seconds, (busy, moving), stalled in steps:
        bench.run(seconds, busy=busy, moving=moving)
        assert bench.stalled is stalled, f"after {seconds} s"


def test_an_engine_that_replaces_a_stalled_one_is_well_before_its_first_sign_of_life() -> None:
    bench = Bench()
    bench.run(LIMIT + 1, busy=True)
    assert bench.stalled
    bench.progress = bench.new_progress()
    bench.run(1, busy=True)
    assert not bench.stalled


def test_it_can_stall_again_and_each_time_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bench.run(75, busy=True)
            assert all("75 s" in bench.watch.reason for _ in range(5))
            bench.run(1, busy=True, moving=True)
            assert not any(bench.stalled for _ in range(5))
    words = [record.message.partition(" ")[2].split()[1] for record in caplog.records]
    assert words == ["is", "goes", "is", "goes"]


def test_time_in_which_the_server_itself_stood_still_does_not_count() -> None:
    bench = Bench()
    bench.run(1, busy=True, moving=True)
    bench.run(3600, busy=True, tick=3600)  # the whole container was paused
    assert not bench.stalled
