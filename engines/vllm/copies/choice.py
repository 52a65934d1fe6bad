"""Chooses the copy of a request: by the work of the copies, and by what their prefix caches may have.

A prompt goes to a copy that has had the same first blocks of tokens, unless that copy has clearly more work than the
others. Otherwise it goes to the copy with the least work. The token ids decide, so that a system prompt meets the same
cache in every contract.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

BLOCK = 128  # Tokens of a block. A shorter common beginning saves too little.
_MOST_BLOCKS = 64  # Of a prompt. The rest of a longer prompt decides nothing.
_MOST_KNOWN = 65_536  # Blocks that are remembered.
# A copy with the prompt's blocks may have so many times the mean work of the copies without them, and one request more.
_MORE_THAN_MEAN = 1.25
MOST_ANSWER_TOKENS = 512  # Of an answer that count as work. Limits are often far above the true length.


class Copy(Protocol):
    """A copy that a request may go to."""

    number: int
    work: int  # The tokens of its requests.
    chosen: int  # The requests that it has had in all.


AnyCopy = TypeVar("AnyCopy", bound=Copy)


class CopyChoice:
    """Knows which copies have had which beginnings of prompts."""

    def __init__(self) -> None:
        # The numbers of the copies that have had a prompt up to the end of a block, by the hash of all its tokens.
        self._had: OrderedDict[int, frozenset[int]] = OrderedDict()

    def choose(self, copies: Sequence[AnyCopy], token_ids: Sequence[int], scope: Hashable, work: int) -> AnyCopy:
        """Return the copy that a request goes to.

        Args:
            copies: At least one copy.
            token_ids: The prompt.
            scope: What must be equal in addition to the tokens, such as the adapter and the cache's salt.
            work: The tokens that the request is expected to have.
        """
        keys = tuple(_keys(token_ids, scope))
        chosen = self._with_prefix(copies, keys, work) or min(copies, key=lambda copy: (copy.work, copy.chosen))
        for key in keys:
            self._had[key] = self._had.pop(key, frozenset()) | {chosen.number}
        while len(self._had) > _MOST_KNOWN:
            self._had.popitem(last=False)
        return chosen

    def _with_prefix(self, copies: Sequence[AnyCopy], keys: Sequence[int], work: int) -> AnyCopy | None:
        """Return the copy with the least work of those that have had most of the prompt. None if it has too much."""
        for key in reversed(keys):
            numbers = self._had.get(key, frozenset())
            if found := [copy for copy in copies if copy.number in numbers]:
                least = min(found, key=lambda copy: (copy.work, copy.chosen))
                # A mean of all copies would leave one of five idle if all prompts begin alike.
                others = [copy.work for copy in copies if copy.number not in numbers]
                is_near = not others or least.work <= _MORE_THAN_MEAN * sum(others) / len(others) + work
                return least if is_near else None
        return None

    def forget(self, number: int) -> None:
        """Forget what a copy has had: its cache is gone."""
        for key, numbers in tuple(self._had.items()):
            if number in numbers:
                self._had[key] = numbers - {number}


def _keys(token_ids: Sequence[int], scope: Hashable) -> Iterator[int]:
    """Yield a hash of all tokens up to the end of each block."""
    key = hash(scope)
    for end in range(BLOCK, min(len(token_ids), BLOCK * _MOST_BLOCKS) + 1, BLOCK):
        key = hash((key, *token_ids[end - BLOCK : end]))
        yield key
