"""Tokenizes a prompt in segments, and caches the token ids of each segment.

The cache helps because clients send the whole conversation with each turn, and many conversations begin with the same
system prompt. A tokenizer of the library `tokenizers` first cuts a text at its added tokens, such as `<|im_end|>`. So
the token ids of the segment between two added tokens do not depend on other segments.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

# A text with more characters is tokenized in a thread. A shorter text blocks the event loop for less time than a step
# of the engine takes.
LONG_TEXT = 4096
# The maximum number of characters in all cached segments together. Their token ids take about as many bytes.
_MOST_CHARACTERS = 16 * 1024 * 1024
_END = ""  # Marks the end of a text in a trie.
_TRIALS = ("a b", " a\n", "\n\na ", "\u4f60 1")


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        special: Whether to include the special tokens that the model wants around each text.
    """
    if sum(map(len, texts)) > LONG_TEXT:  # `encode` would hold the interpreter's lock, and so block all other threads.
        return [each.ids for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]


class SegmentTokenizer:
    """Encodes texts to the same token ids as the tokenizer itself. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Create the segment tokenizer. `tokenizer` must pass the checks of `by_segments`, and must never change."""
        self._tokenizer = tokenizer
        self._before, self._after = special_tokens_around(tokenizer)
        cut = _cutting_tokens(tokenizer)
        # The ids of added tokens, keyed by text. An empty segment between two added tokens has no ids.
        self._added = {"": array("I"), **{text: array("I", [token_id]) for text, token_id in cut.items()}}
        # Like the tokenizer, the pattern matches the longest added token at each position.
        self._cut = re.compile(f"({longest_of(cut)})").split
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids. `special`: include the special tokens that the model wants around a text."""
        segments, added, known = self._cut(text), self._added, self._known
        found: dict[str, array[int]] = {}
        unknown: list[str] = []
        with self._lock:
            for segment in dict.fromkeys(segments):
                if (ids := added.get(segment)) is None and (ids := known.get(segment)) is not None:
                    known.move_to_end(segment)
                if ids is None:
                    unknown.append(segment)
                else:
                    found[segment] = ids
        if unknown:
            self._tokenize(unknown, found)
        token_ids: list[int] = [*self._before] if special else []
        for segment in segments:
            token_ids.extend(found[segment])
        return token_ids + self._after if special else token_ids

    def _tokenize(self, segments: list[str], found: dict[str, array[int]]) -> None:
        """Tokenize segments, cache their ids, and put the ids into `found`."""
        tokenized = encode_all(self._tokenizer, segments, special=False)
        with self._lock:
            for segment, ids in zip(segments, tokenized, strict=True):
                found[segment] = new = array("I", ids)
                if self._known.setdefault(segment, new) is new:
                    self._characters += len(segment)
            while self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[0])


def longest_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of these texts at a position.

    The expression is a trie, in which texts share their common beginnings. Otherwise Python would try the texts one by
    one at each position.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _expression(tree)


def _expression(node: Mapping[str, Any]) -> str:
    chain = ""
    while len(node) == 1 and _END not in node:  # Recursion at each character could be too deep.
        ((character, node),) = node.items()
        chain += re.escape(character)
    parts = [re.escape(character) + _expression(inner) for character, inner in node.items() if character != _END]
    if not parts:
        return chain
    inside = parts[0] if len(parts) == 1 and _END not in node else f"(?:{'|'.join(parts)})"
    return chain + inside + ("?" if _END in node else "")


def by_segments(tokenizer: Tokenizer) -> SegmentTokenizer | None:
    """Return a segment tokenizer; None if a segment's tokens could depend on other segments."""
    cut = _cutting_tokens(tokenizer)
    if not cut or any(
        token.lstrip or token.rstrip or token.single_word for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return None
    found, token = SegmentTokenizer(tokenizer), next(iter(cut))
    for text in ("", *(f"{first}{token}{second}" for first in _TRIALS for second in _TRIALS)):
        for special in (True, False):
            if found.encode(text, special=special) != tokenizer.encode(text, add_special_tokens=special).ids:
                return None
    return found


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    plain, whole = [tokenizer.encode(_TRIALS[0], add_special_tokens=special).ids for special in (False, True)]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def _cutting_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of added tokens by their texts.

    Added tokens that the tokenizer looks for in normalized text are omitted. They stay in the segments, in which the
    tokenizer finds them.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if not token.normalized and token.content}
