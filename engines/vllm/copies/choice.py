"""Chooses the copy of a request: by the work of the copies, and by what their prefix caches may have.

A prompt goes to a copy that has had the same first blocks of tokens, unless that copy has clearly more work than the
others. Otherwise it goes to the copy with the least work. The token ids decide, so that a system prompt meets the same
cache in every contract.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

BLOCK = 128  # Tokens of a block. A shorter common beginning saves too little.
_MOST_BLOCKS = 64  # Of a prompt. The rest of a longer prompt decides nothing.
# A copy with the prompt's blocks may have this multiple of the mean work of the other copies, and this number of
# requests more.
_MORE_THAN_MEAN, _MORE_REQUESTS = 1.25, 3
MOST_ANSWER_TOKENS = 512  # Of an answer that count as work. Limits are often far above the true length.


class Choosable(Protocol):
    """A copy that a request may go to."""

    number: int
    cached_tokens: int  # The size of its prefix cache.
    work: int  # The tokens of its requests.
    chosen: int  # The larger, the later it was last chosen.


AnyCopy = TypeVar("AnyCopy", bound=Choosable)


class CopyChoice:
    """Chooses copies, and keeps a list of the blocks that each prefix cache may have."""

    def __init__(self) -> None:
        # For each copy, by its number: the blocks of its prompts, as a hash of all tokens up to the end of each. The
        # block that was not used for the longest time comes first, and is dropped first, as in the cache.
        self._had: dict[int, OrderedDict[int, None]] = {}

    def choose(self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int) -> AnyCopy:
        """Return the copy that a request goes to.

        Args:
            copies: At least one copy.
            token_ids: The prompt.
            scope: Prompts share blocks only if their scopes are equal: the adapter and the cache's salt.
            work: The tokens that the request is expected to have.
        """
        keys, chosen = self._chosen(copies, token_ids, scope, work)
        had = self._had.setdefault(chosen.number, OrderedDict())
        for key in reversed(keys):  # The first block of a prompt is useful for the longest time.
            had[key] = None
            had.move_to_end(key)
        while len(had) > chosen.cached_tokens // BLOCK:
            had.popitem(last=False)
        return chosen

    def expected(
        self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int
    ) -> tuple[AnyCopy, int]:
        """Return the copy that `choose` would return now, and the tokens of the prompt that its cache may have."""
        keys, chosen = self._chosen(copies, token_ids, scope, work)
        return chosen, self._cached(chosen.number, keys) * BLOCK

    def _chosen(
        self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int
    ) -> tuple[tuple[int, ...], AnyCopy]:
        keys = tuple(_keys(token_ids, scope))
        return keys, self._with_prefix(copies, keys, work) or min(copies, key=_load)

    def _with_prefix(self, copies: Sequence[AnyCopy], keys: Sequence[int], work: int) -> AnyCopy | None:
        """Return the least loaded copy among the copies that have most of the prompt. None if it has too much work."""
        lengths = [self._cached(copy.number, keys) for copy in copies]
        if not (longest := max(lengths)):
            return None
        least = min((copy for copy, length in zip(copies, lengths, strict=True) if length == longest), key=_load)
        # A mean of all copies would leave one of five idle if all prompts begin alike.
        others = [copy.work for copy, length in zip(copies, lengths, strict=True) if length < longest]
        is_near = not others or least.work <= _MORE_THAN_MEAN * sum(others) / len(others) + _MORE_REQUESTS * work
        return least if is_near else None

    def _cached(self, number: int, keys: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a copy has."""
        had: Container[int] = self._had.get(number, ())
        return next((count for count, key in enumerate(keys) if key not in had), len(keys))

    def forget(self, number: int) -> None:
        """Forget the blocks of a copy: its cache is gone."""
        self._had.pop(number, None)


def _load(copy: Choosable) -> tuple[int, int]:
    return copy.work, copy.chosen


def _keys(token_ids: Sequence[int], scope: Hashable) -> Iterator[int]:
    """Yield a hash of all tokens up to the end of each block."""
    key = hash(scope)
    for end in range(BLOCK, min(len(token_ids), BLOCK * _MOST_BLOCKS) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        yield key
