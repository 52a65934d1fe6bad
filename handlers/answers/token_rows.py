"""JSON of many tokens and of their positions in a text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

_BLOCK = 4096  # The number of tokens whose JSON is joined and encoded together.


def joined(rows: Iterable[str]) -> bytes:
    """Return the JSON of tokens with commas between them.

    Tokens are joined in blocks, because separate strings for a million tokens would take 100 MB in total.
    """
    parts = iter(rows)
    return b",".join(",".join(block).encode() for block in iter(lambda: list(islice(parts, _BLOCK)), []))


def byte_positions(text: str) -> Sequence[int]:
    """Return the byte position of each character in UTF-8, and at the end the length of the text in bytes."""
    if text.isascii():
        return range(len(text) + 1)
    return array("L", accumulate((len(character.encode()) for character in text), initial=0))
