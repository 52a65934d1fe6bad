"""When a batch starts, and which requests are in one batch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import given
from hypothesis import strategies as st

from engines.transformers.engine import BatchQueue

SIZE, DELAY = 4, 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Item:
    number: int
    key: str
    weight: int
    arrived: float


def queue_of(
    *weights_and_keys: tuple[int, str], size: int = SIZE, delay: float = DELAY
) -> tuple[BatchQueue[Item], Clock]:
    clock = Clock()
    queue = BatchQueue[Item](size, delay, clock)
    for number, (weight, key) in enumerate(weights_and_keys):
        queue.put(Item(number, key, weight, clock.now), key, weight)
    return queue, clock


def numbers(batch: list[Item]) -> list[int]:
    return [item.number for item in batch]


def test_a_full_batch_is_due_at_once() -> None:
    queue, _ = queue_of(*[(1, "a")] * 5)
    assert numbers(queue.take_due()) == [0, 1, 2, 3]
    assert queue.take_due() == []
    assert len(queue) == 1


def test_a_batch_that_is_not_full_is_due_when_its_first_item_has_waited_long_enough() -> None:
    queue, clock = queue_of((1, "a"))
    clock.now = 6.0
    queue.put(Item(1, "a", 1, 6.0), "a")
    assert queue.due_in() == 4.0
    assert queue.take_due() == []
    clock.now = 10.0
    assert numbers(queue.take_due()) == [0, 1]


def test_items_of_another_key_wait_for_the_oldest_item() -> None:
    queue, clock = queue_of((1, "a"), *[(1, "b")] * 4)
    assert queue.take_due() == []
    clock.now = DELAY
    assert [numbers(queue.take_due()) for _ in range(3)] == [[0], [1, 2, 3, 4], []]


def test_a_discarded_item_is_never_taken_and_no_longer_counts() -> None:
    queue, clock = queue_of(*[(1, "a")] * 4)
    dropped = Item(1, "a", 1, 0.0)
    assert queue.discard(dropped)
    assert not queue.discard(dropped)
    assert queue.take_due() == []
    clock.now = DELAY
    assert numbers(queue.take_due()) == [0, 2, 3]
    assert not queue.discard(Item(0, "a", 1, 0.0))


def test_discarding_all_of_a_long_queue_takes_no_time() -> None:
    queue, _ = queue_of(*[(1, "a")] * 20_000, size=10**6)
    items = queue.drain()
    for item in items:
        queue.put(item, item.key)
    started = time.monotonic()
    assert all(queue.discard(item) for item in reversed(items))
    assert time.monotonic() - started < 30.0
    assert queue.due_in() is None


Step = tuple[str, int, str, float]
"""An action, the weight and the key of its item, and the seconds before the action."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "discard"]),
        st.integers(1, 6),
        st.sampled_from("abc"),
        st.sampled_from([0.0, 0.0, 1.0, 7.0]),
    ),
    max_size=80,
)


def played(steps: list[Step]) -> tuple[list[Item], list[Item], list[tuple[float, list[Item]]]]:
    """Return all items, the discarded items, and the batches with the time of each."""
    queue, clock = queue_of()
    items: list[Item] = []
    discarded: list[Item] = []
    batches: list[tuple[float, list[Item]]] = []
    for what, weight, key, pause in steps:
        clock.now += pause
        if what == "put":
            items.append(Item(len(items), key, weight, clock.now))
            queue.put(items[-1], key, weight)
        elif what == "take" and (batch := queue.take_due()):
            batches.append((clock.now, batch))
        elif what == "discard" and items and queue.discard(items[weight % len(items)]):
            discarded.append(items[weight % len(items)])
    while (due := queue.due_in()) is not None:
        clock.now += due
        batches.append((clock.now, queue.take_due()))
    return items, discarded, batches


@given(STEPS)
def test_any_items_are_taken_once_in_batches_that_are_allowed_and_due(steps: list[Step]) -> None:
    items, discarded, batches = played(steps)
    taken = [item for _, batch in batches for item in batch]
    assert sorted(numbers(taken + discarded)) == numbers(items)
    waiting = {item.number: item for item in items}
    left = {item.number: item for item in taken}
    for now, batch in batches:
        assert len({item.key for item in batch}) == 1
        assert len(batch) == 1 or sum(item.weight for item in batch) <= SIZE
        of_key = [item for item in waiting.values() if item.key == batch[0].key and item.arrived <= now]
        assert now - batch[0].arrived >= DELAY or sum(item.weight for item in of_key) >= SIZE
        overdue = [item.arrived for item in left.values() if now - item.arrived >= DELAY]
        assert batch[0].arrived <= min(overdue, default=now), "the oldest item comes first once its time is over"
        for item in batch:
            del waiting[item.number], left[item.number]
    for key in "abc":
        of_one_key = [item.number for item in taken if item.key == key]
        assert of_one_key == sorted(of_one_key)


async def turns_of_the_loop() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_taking_waits_for_the_first_item_and_then_for_the_delay() -> None:
    queue = BatchQueue[int](3, 0.05)
    taking = asyncio.create_task(queue.take())
    await turns_of_the_loop()
    assert not taking.done()
    put_at = time.monotonic()
    queue.put(1, "a")
    await asyncio.sleep(0)
    queue.put(2, "a")
    assert await taking == [1, 2]
    assert 0.05 <= time.monotonic() - put_at < 30.0


async def test_taking_ends_its_wait_when_the_batch_is_full() -> None:
    queue = BatchQueue[int](2, 60.0)
    taking = asyncio.create_task(queue.take())
    queue.put(1, "a")
    await turns_of_the_loop()
    assert not taking.done()
    queue.put(2, "a")
    assert await asyncio.wait_for(taking, 60) == [1, 2]


async def test_all_that_one_turn_of_the_loop_puts_is_taken_together_even_without_a_delay() -> None:
    queue = BatchQueue[int](8, 0.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    for number in range(5):
        queue.put(number, "a")
    assert await taking == [0, 1, 2, 3, 4]
