"""Which waiting requests run together, and when: the policy of dynamic batching.

Only what has the same key is run together. A batch is due when it is full, or when its first item has waited long
enough; with no delay, as soon as anything waits. Items keep their order within a key, and the longest waiting item is
in the next batch once its time is over, so that no key starves however busy another is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Waiting:
    weight: int
    deadline: float
    """Until then it waits for others."""


class _Group(Generic[T]):
    """What waits under one key, in order of arrival."""

    __slots__ = ("items", "weight")

    def __init__(self) -> None:
        self.items: OrderedDict[T, _Waiting] = OrderedDict()
        self.weight = 0

    @property
    def first(self) -> _Waiting:
        """What has waited longest."""
        return next(iter(self.items.values()))

    def remove(self, item: T) -> None:
        """Drop an item that waits."""
        self.weight -= self.items.pop(item).weight

    def take(self, size: int) -> list[T]:
        """The first items that fit; the very first in any case."""
        taken: list[T] = []
        room = size
        while self.items and (not taken or self.first.weight <= room):
            item, waiting = self.items.popitem(last=False)
            self.weight -= waiting.weight
            room -= waiting.weight
            taken.append(item)
        return taken


class BatchQueue(Generic[T]):
    """Items that wait to be run in batches; for one event loop.

    `size`: the weight of a full batch; a heavier item is a batch of its own. `delay`: seconds that the first item of a
    batch waits for others.
    """

    def __init__(self, size: int, delay: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._delay, self._clock = size, delay, clock
        self._groups: dict[Hashable, _Group[T]] = {}
        self._places: dict[T, Hashable] = {}
        """The key of each item, in order of arrival."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._places)

    def put(self, item: T, key: Hashable, weight: int = 1) -> None:
        """Let an item wait; `weight`: its share of a batch."""
        group = self._groups.setdefault(key, _Group())
        group.items[item] = _Waiting(weight, self._clock() + self._delay)
        group.weight += weight
        self._places[item] = key
        self._changed.set()

    def discard(self, item: T) -> bool:
        """Drop a waiting item; False if it does not wait (any more)."""
        if item not in self._places:
            return False
        key = self._places.pop(item)
        group = self._groups[key]
        group.remove(item)
        if not group.items:
            del self._groups[key]
        return True

    def drain(self) -> list[T]:
        """Drop all that waits and return it, in order of arrival."""
        items = list(self._places)
        self._places.clear()
        self._groups.clear()
        return items

    async def take(self) -> list[T]:
        """The next batch, when it is due. One caller at a time."""
        while not (batch := self.take_due()):
            self._changed.clear()
            due = self.due_in()
            try:
                await asyncio.wait_for(self._changed.wait(), due)
            except TimeoutError:
                continue
        return batch

    def take_due(self) -> list[T]:
        """The batch that is due now; empty if none is."""
        key = self._due_key()
        if key is None:
            return []
        group = self._groups[key]
        batch = group.take(self._size)
        for item in batch:
            del self._places[item]
        if not group.items:
            del self._groups[key]
        return batch

    def due_in(self) -> float | None:
        """Seconds until a batch is due at the latest; None if nothing waits."""
        if not self._groups:
            return None
        return max(0.0, self._deadline(self._oldest()) - self._clock())

    def _due_key(self) -> Hashable | None:
        """The key whose first item has waited longest, if its time is over; else that of a full batch."""
        if not self._groups:
            return None
        oldest = self._oldest()
        if self._deadline(oldest) <= self._clock():
            return oldest
        full = [key for key, group in self._groups.items() if group.weight >= self._size]
        return min(full, key=self._deadline, default=None)

    def _oldest(self) -> Hashable:
        return min(self._groups, key=self._deadline)

    def _deadline(self, key: Hashable) -> float:
        return self._groups[key].first.deadline
