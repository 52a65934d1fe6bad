"""A list of key-value pairs that preserves order and allows repeated keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class PairList:
    """The content of an `Input` or an `Output`: `keys[i]` belongs to `values[i]`."""

    def __init__(
        self,
        keys: Sequence[str | None] | None = None,
        values: Sequence[Any] | None = None,
        pair_list: Iterable[tuple[str | None, Any]] | None = None,
        pair_map: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a list from keys and values, from pairs, or from a mapping.

        Raises:
            ValueError: The numbers of keys and values differ.
        """
        self.keys: list[str | None] = list(keys or ())
        self.values: list[Any] = list(values or ())
        if len(self.keys) != len(self.values):
            raise ValueError(f"{len(self.keys)} keys do not go with {len(self.values)} values")
        for key, value in pair_list or ():
            self.add(key, value)
        for key, value in (pair_map or {}).items():
            self.add(key, value)

    def add(
        self,
        key: str | None = None,
        value: Any = None,
        index: int | None = None,
        pair: tuple[str | None, Any] | None = None,
    ) -> None:
        """Add a pair at the end or before `index`. A pair with the value None is ignored."""
        if pair is not None:
            key, value = pair
        if value is None:
            return
        position = len(self.keys) if index is None else index
        self.keys.insert(position, key)
        self.values.insert(position, value)

    def add_all(self, other: PairList | Mapping[str, Any] | None) -> None:
        """Append all pairs of another list or of a mapping."""
        if other is None:
            return
        pairs = zip(other.keys, other.values, strict=True) if isinstance(other, PairList) else other.items()
        for key, value in list(pairs):
            self.add(key, value)

    def size(self) -> int:
        return len(self.keys)

    def is_empty(self) -> bool:
        return not self.keys

    def get(self, key: str | None) -> Any:
        return self.values[self.keys.index(key)] if key in self.keys else None

    def key_at(self, index: int) -> str | None:
        return self.keys[index]

    def value_at(self, index: int) -> Any:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[Any]:
        return self.values

    def __repr__(self) -> str:
        return f"PairList({list(zip(self.keys, self.values, strict=True))!r})"
