from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python import PairList

PAIRS = st.lists(st.tuples(st.none() | st.text(), st.binary()))


@given(PAIRS)
def test_pairs_come_out_in_the_order_in_which_they_went_in(pairs: list[tuple[str | None, bytes]]) -> None:
    one_by_one = PairList()
    for key, value in pairs:
        one_by_one.add(key, value)
    at_once = PairList(pair_list=pairs)
    by_columns = PairList([key for key, _ in pairs], [value for _, value in pairs])
    for made in (one_by_one, at_once, by_columns):
        assert list(zip(made.get_keys(), made.get_values(), strict=True)) == pairs
        assert made.size() == len(pairs)
        assert made.is_empty() == (not pairs)
        assert [(made.key_at(i), made.value_at(i)) for i in range(made.size())] == pairs


@given(PAIRS, st.text())
def test_get_finds_the_first_value_of_a_key(pairs: list[tuple[str | None, bytes]], key: str) -> None:
    expected = next((value for name, value in pairs if name == key), None)
    assert PairList(pair_list=pairs).get(key) == expected


def test_keys_and_values_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys do not go with 1 values"):
        PairList(["a", "b"], [1])
    with pytest.raises(ValueError, match="1 keys do not go with 0 values"):
        PairList(["a"])


def test_a_value_of_none_is_ignored_and_an_empty_one_is_not() -> None:
    made = PairList()
    made.add("a", None)
    made.add(pair=("b", None))
    made.add("c", b"")
    assert made.keys == ["c"]


def test_a_pair_can_go_anywhere_even_to_the_front() -> None:
    made = PairList(["b"], [2])
    made.add("a", 1, index=0)
    made.add(pair=("c", 3))
    assert list(zip(made.keys, made.values, strict=True)) == [("a", 1), ("b", 2), ("c", 3)]


def test_another_list_or_mapping_or_the_list_itself_can_be_appended() -> None:
    made = PairList(pair_map={"a": 0})
    made.add_all(made)
    made.add_all({"b": 2})
    made.add_all(None)
    assert list(zip(made.keys, made.values, strict=True)) == [("a", 0), ("a", 0), ("b", 2)]


def test_a_list_does_not_share_what_it_was_made_of() -> None:
    keys, values = ["a"], [1]
    made = PairList(keys, values)
    made.add("b", 2)
    assert (keys, values) == (["a"], [1])
