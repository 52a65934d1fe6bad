"""Chooses the copy for a request. It compares the copies' work and the probable content of their prefix caches.

A prompt goes to a copy that has seen the same first blocks of tokens, unless this copy has clearly more work than the
others. Otherwise it goes to the copy with the least work. A stalled copy gets prompts only if all copies are stalled.
Blocks are compared by token ids, so prompts of different contracts can share a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

BLOCK = 128  # The number of tokens in a block. A shorter common beginning saves too little.
_MOST_BLOCKS = 64  # Only this many blocks of a prompt are compared. The rest of the prompt is ignored.
# The limit on the work of a copy that is chosen because it has the prompt's blocks. The limit is `_MORE_THAN_MEAN`
# times the mean work of the other copies, plus `_MORE_REQUESTS` times the work of the request.
_MORE_THAN_MEAN, _MORE_REQUESTS = 1.25, 3
# An answer counts as at most this many tokens of work. Answers are often far shorter than the client's limit.
MOST_ANSWER_TOKENS = 512


class Choosable(Protocol):
    """A copy that can be chosen for a request."""

    number: int
    cached_tokens: int  # The size of the copy's prefix cache, in tokens.
    work: int  # The number of tokens that the copy's requests are expected to have.
    chosen: int  # The larger the number, the more recently the copy was chosen.

    @property
    def stalled(self) -> bool:
        """Whether the copy has given no sign of life for too long (`Progress.is_stalled`)."""


AnyCopy = TypeVar("AnyCopy", bound=Choosable)


class CopyChoice:
    """Chooses copies, and tracks the blocks that each prefix cache probably holds."""

    def __init__(self) -> None:
        # The blocks of each copy's prompts, by the copy's number. A block is the hash of all tokens up to its end. The
        # least recently used block comes first, and is dropped first, as in the cache.
        self._had: dict[int, OrderedDict[int, None]] = {}

    def choose(self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int) -> AnyCopy:
        """Return the copy for a request.

        Args:
            copies: At least one copy.
            token_ids: The prompt.
            scope: The adapter and the cache salt. Prompts share blocks only if their scopes are equal.
            work: The number of tokens that the request is expected to have.
        """
        keys, chosen = self._chosen(copies, token_ids, scope, work)
        had = self._had.setdefault(chosen.number, OrderedDict())
        for key in reversed(keys):  # A prompt's first block is dropped last: without it, later blocks are useless.
            had[key] = None
            had.move_to_end(key)
        while len(had) > chosen.cached_tokens // BLOCK:
            had.popitem(last=False)
        return chosen

    def expected(
        self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int
    ) -> tuple[AnyCopy, int]:
        """Return the copy that `choose` would return now, and the number of prompt tokens that its cache may hold."""
        keys, chosen = self._chosen(copies, token_ids, scope, work)
        return chosen, self._cached(chosen.number, keys) * BLOCK

    def _chosen(
        self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int
    ) -> tuple[tuple[int, ...], AnyCopy]:
        keys = tuple(_keys(token_ids, scope))
        copies = [copy for copy in copies if not copy.stalled] or copies
        return keys, self._with_prefix(copies, keys, work) or min(copies, key=_load)

    def _with_prefix(self, copies: Sequence[AnyCopy], keys: Sequence[int], work: int) -> AnyCopy | None:
        """Return the least busy of the copies that hold the longest beginning of the prompt.

        None if this copy is too busy, or if no copy holds the first block.
        """
        lengths = [self._cached(copy.number, keys) for copy in copies]
        if not (longest := max(lengths)):
            return None
        least = min((copy for copy, length in zip(copies, lengths, strict=True) if length == longest), key=_load)
        # The mean is taken over the other copies. With a mean over all copies, one of five copies would stay idle if
        # all prompts begin with the same blocks.
        others = [copy.work for copy, length in zip(copies, lengths, strict=True) if length < longest]
        is_near = not others or least.work <= _MORE_THAN_MEAN * sum(others) / len(others) + _MORE_REQUESTS * work
        return least if is_near else None

    def _cached(self, number: int, keys: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a copy probably holds."""
        had: Container[int] = self._had.get(number, ())
        return next((count for count, key in enumerate(keys) if key not in had), len(keys))

    def forget(self, number: int) -> None:
        """Forget the blocks of a copy, because its cache no longer exists."""
        self._had.pop(number, None)


def _load(copy: Choosable) -> tuple[int, int]:
    return copy.work, copy.chosen


def _keys(token_ids: Sequence[int], scope: Hashable) -> Iterator[int]:
    """For each block, yield a hash of all tokens up to its end."""
    key = hash(scope)
    for end in range(BLOCK, min(len(token_ids), BLOCK * _MOST_BLOCKS) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        yield key
