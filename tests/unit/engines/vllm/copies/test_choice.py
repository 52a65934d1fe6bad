"""The choice of the copy that a request goes to.

The work of the copies is balanced. Prompts with a common beginning go to the same copy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.vllm.copies.choice import BLOCK, CopyChoice

WORK = 100


@dataclass(eq=False)
class Copy:
    number: int
    work: int = 0
    chosen: int = 0
    stalled: bool = False
    cached_tokens: int = 1000 * BLOCK


def new(count: int) -> list[Copy]:
    return [Copy(number + 1) for number in range(count)]


def blocks(*numbers: int) -> list[int]:
    """Return a prompt of whole blocks. Each number stands for one block."""
    return [number for number in numbers for _ in range(BLOCK)]


def place(choice: CopyChoice, copies: list[Copy], prompt: list[int], scope: Any = None, work: int = WORK) -> int:
    """Give a request to the copy that is chosen, and return the copy's number."""
    chosen = choice.choose(copies, prompt, scope, work)
    chosen.work += work
    chosen.chosen += 1
    return chosen.number


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("prompt", [[1, 2, 3], blocks(1), blocks(1, 2, 3)])
def test_equal_requests_are_balanced(count: int, prompt: list[int]) -> None:
    choice, copies = CopyChoice(), new(count)
    for _ in range(64):
        place(choice, copies, prompt)
    assert max(copy.work for copy in copies) <= 1.1 * max(64 * WORK / count, -(-64 // count) * WORK)
    assert sum(copy.work for copy in copies) == 64 * WORK


def test_without_work_the_copies_take_turns() -> None:
    choice, copies = CopyChoice(), new(3)
    for expected in (1, 2, 3, 1, 2, 3):
        assert place(choice, copies, [1], work=0) == expected


def test_prompts_with_the_same_first_blocks_go_together() -> None:
    choice, copies = CopyChoice(), new(4)
    for prompt in range(4):
        place(choice, copies, blocks(prompt, 7), work=10 * WORK)
    for prompt in (2, 0, 3, 1):
        assert place(choice, copies, blocks(prompt, 8, 9)) == prompt + 1


def test_a_beginning_that_is_shorter_than_a_block_decides_nothing() -> None:
    choice, copies = CopyChoice(), new(2)
    place(choice, copies, blocks(1)[:-1])
    copies[0].work = 1
    assert place(choice, copies, blocks(1)[:-1]) == 2


def test_the_rest_after_the_last_whole_block_decides_nothing() -> None:
    choice, copies = CopyChoice(), new(2)
    place(choice, copies, [*blocks(1), 5])
    assert place(choice, copies, [*blocks(1), 6, 7]) == 1


def test_the_same_block_at_another_place_is_no_common_beginning() -> None:
    choice, copies = CopyChoice(), new(2)
    place(choice, copies, blocks(1, 2), work=1)
    assert place(choice, copies, blocks(2, 2), work=1) == 2


def test_the_longest_known_beginning_counts() -> None:
    choice, copies = CopyChoice(), new(2)
    place(choice, copies, blocks(1, 2))
    copies[0].work = 100 * WORK
    assert place(choice, copies, blocks(1, 3)) == 2, "the first copy has too much work"
    copies[0].work = copies[1].work = 0
    for _ in range(3):
        copies[1].work += 1
        assert place(choice, copies, blocks(1, 2, 4), work=1) == 1
    copies[0].work, copies[1].work = 1, 0
    assert place(choice, copies, blocks(1, 3, 4)) == 2
    copies[0].work, copies[1].work = 0, 1
    assert place(choice, copies, blocks(1, 5), work=1) == 1, "both have the first block: the one with less work"


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("above", "expected"), [(0, 1), (1, 2)])
def test_a_copy_with_too_much_work_loses_the_prompts_that_it_knows(count: int, above: int, expected: int) -> None:
    """The limit is 1.25 times the mean work of the other copies, plus three requests."""
    choice, copies = CopyChoice(), new(count)
    place(choice, copies, blocks(1))
    for copy in copies:
        copy.work = 8 * WORK
    copies[0].work = 10 * WORK + 3 * WORK + above
    assert place(choice, copies, blocks(1)) == expected


def test_adapters_and_salts_are_apart() -> None:
    choice, copies = CopyChoice(), new(3)
    scopes = [(None, None), (1, None), (None, "salt")]
    for number, scope in enumerate(scopes, 1):
        assert place(choice, copies, blocks(1), scope) == number
    for number, scope in reversed(list(enumerate(scopes, 1))):
        assert place(choice, copies, blocks(1), scope) == number


def test_a_copy_that_takes_no_requests_gets_none_even_if_it_knows_the_prompt() -> None:
    choice, copies = CopyChoice(), new(3)
    place(choice, copies, blocks(1, 2))
    assert place(choice, copies[1:], blocks(1, 2)) == 2
    copies[0].work = copies[1].work = 0
    assert place(choice, copies[2:], blocks(1, 2)) == 3


def test_a_stalled_copy_gets_a_prompt_that_it_knows_only_if_all_are_stalled() -> None:
    choice, copies = CopyChoice(), new(2)
    first, second = copies
    assert place(choice, copies, blocks(1)) == first.number
    first.stalled = True
    assert choice.expected(copies, blocks(1), None, WORK)[0] is second
    second.work = 10 * WORK
    assert choice.choose(copies, [1], None, WORK) is second
    second.stalled = True
    assert choice.choose(copies, [1], None, WORK) is first


def test_what_a_copy_has_had_is_forgotten_with_its_cache() -> None:
    choice, copies = CopyChoice(), new(2)
    place(choice, copies, blocks(1), work=1)
    place(choice, copies, blocks(2), work=1)
    choice.forget(1)
    copies[0].work, copies[1].work = 1, 0
    assert place(choice, copies, blocks(1), work=1) == 2
    copies[0].work, copies[1].work = 0, 1
    assert place(choice, copies, blocks(2), work=1) == 2, "the other copy still has its prompts"


def test_as_many_blocks_as_the_cache_of_a_copy_holds_are_remembered_and_the_latest_stay() -> None:
    choice, copies = CopyChoice(), new(1)
    copies[0].cached_tokens = 3 * BLOCK + 1

    def cached(*prompts: int) -> list[int]:
        return [choice.expected(copies, blocks(prompt), None, WORK)[1] // BLOCK for prompt in prompts]

    for prompt in (blocks(1), blocks(2, 2), blocks(3)):
        place(choice, copies, prompt)
    assert cached(1, 2, 3) == [0, 1, 1]
    place(choice, copies, blocks(2))  # This prompt is now the latest.
    place(choice, copies, blocks(4))
    place(choice, copies, blocks(5))
    assert cached(2, 3, 4, 5) == [1, 0, 1, 1]


def test_of_a_long_prompt_only_the_first_blocks_are_remembered() -> None:
    choice, copies = CopyChoice(), new(1)
    prompt = blocks(*range(900))
    place(choice, copies, prompt)
    assert choice.expected(copies, prompt, None, WORK)[1] < len(prompt)


requests = st.tuples(
    st.lists(st.integers(0, 2), max_size=3),  # The blocks of the prompt.
    st.integers(1, 1000),  # Its work.
    st.integers(0, 3),  # The number of requests that end before this one comes.
)


@given(count=st.integers(1, 8), coming=st.lists(requests, max_size=60), randomness=st.randoms(use_true_random=False))
def test_a_copy_gets_a_request_only_if_its_work_is_near_the_mean(
    count: int, coming: list[tuple[list[int], int, int]], randomness: random.Random
) -> None:
    """The chosen copy has at most 1.25 times the mean work plus four requests of this size, including the new one.

    Later, a copy may have more work than that: the mean falls when requests end, and no request is moved. Until the
    first request ends, each copy has at most 1.25 times the mean work plus four times the largest request.
    """
    choice, copies = CopyChoice(), new(count)
    running: list[tuple[Copy, int]] = []
    largest, none_has_ended = 0, True
    for prompt, work, ending in coming:
        for _ in range(min(ending, len(running))):
            copy, its_work = running.pop(randomness.randrange(len(running)))
            copy.work -= its_work
            none_has_ended = False
        mean = sum(copy.work for copy in copies) / count
        chosen = choice.choose(copies, blocks(*prompt), None, work)
        assert chosen.work <= 1.25 * mean + 3 * work
        if not prompt:
            assert chosen.work == min(copy.work for copy in copies)
        chosen.work += work
        chosen.chosen += 1
        running.append((chosen, work))
        largest = max(largest, work)
        if none_has_ended:
            mean = sum(copy.work for copy in copies) / count
            assert max(copy.work for copy in copies) <= 1.25 * mean + 4 * largest


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 5)), max_size=30), st.integers(2, 4))
def test_the_expected_copy_is_the_chosen_one_and_is_not_remembered(
    calls: list[tuple[list[int], int]], count: int
) -> None:
    choice, copies, other = CopyChoice(), new(count), CopyChoice()
    others = new(count)
    for numbers, more in calls:
        expected, cached = choice.expected(copies, blocks(*numbers), None, WORK + more)
        assert cached <= len(numbers) * BLOCK
        assert choice.expected(copies, blocks(*numbers), None, WORK + more) == (expected, cached)
        chosen = place(choice, copies, blocks(*numbers), work=WORK + more)
        assert expected.number == chosen == place(other, others, blocks(*numbers), work=WORK + more)
