"""The order of the compared servers."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.rounds import in_turn


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_each_entrant_is_as_often_at_each_place(count: int) -> None:
    rounds = [in_turn(range(count), number) for number in range(2 * count)]
    places = Counter(place for order in rounds for place in enumerate(order))
    assert set(places.values()) == {2}
    assert all(before == after[::-1] for before, after in zip(rounds[::2], rounds[1::2], strict=True))
