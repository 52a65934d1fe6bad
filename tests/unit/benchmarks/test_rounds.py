"""The number of rounds of a benchmark, and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from benchmarks.rounds import in_time, in_turn


def made(seconds: Sequence[float], rounds: int, deadline: float) -> list[tuple[int, int]]:
    """Return the rounds and loads that are started if each load takes so many seconds."""
    found: list[tuple[int, int]] = []
    for number, load in in_time(range(len(seconds)), rounds, deadline, lambda: sum(seconds[load] for _, load in found)):
        found.append((number, load))
    return found


@pytest.mark.parametrize(
    ("deadline", "loads"),
    [(math.inf, 9), (63.0, 9), (62.0, 8), (52.0, 7), (30.0, 4), (29.0, 3), (20.0, 2), (5.0, 1), (0.0, 1), (-1.0, 1)],
)
def test_a_load_is_begun_if_the_time_is_left_that_the_longest_took(deadline: float, loads: int) -> None:
    every = [(number, load) for number in range(3) for load in range(3)]
    assert made([3.0, 10.0, 7.0], 3, deadline) == every[:loads]


def test_all_loads_are_made_once_before_any_is_made_again() -> None:
    assert made([1.0, 1.0], 2, math.inf) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_each_round_begins_with_another_peer() -> None:
    assert [in_turn("abc", number) for number in range(3)] == [["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"]]
