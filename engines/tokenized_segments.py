"""Tokenizes the segments of a prompt between its added tokens separately, and caches the results.

A conversation is sent whole with each of its turns, and many begin with the same system prompt. A tokenizer of the
library `tokenizers` cuts a text at its added tokens (`<|im_end|>`) before it does anything else, so that the token ids
of a segment do not depend on the other segments.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

# Characters above which a text is tokenized in a thread: below it the event loop waits for less than a step.
LONG_TEXT = 4096
_MOST_CHARACTERS = 16 * 1024 * 1024  # Of all segments that are kept; their ids take about as many bytes.
_END = ""  # In a tree of characters: a text ends here.
_TRIALS = ("a b", " a\n", "\n\na ", "\u4f60 1")


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        special: With the special tokens that the model wants around it.
    """
    if sum(map(len, texts)) > LONG_TEXT:  # `encode` would hold the interpreter's lock, and every other thread with it
        return [each.ids for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]


class SegmentTokenizer:
    """Token ids of texts, as the tokenizer itself finds them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The tokenizer must not be changed afterwards, and must be one that `by_segments` accepts."""
        self._tokenizer = tokenizer
        self._before, self._after = special_tokens_around(tokenizer)
        cut = _cutting_tokens(tokenizer)
        # By text. There are empty segments between added tokens.
        self._added = {"": array("I"), **{text: array("I", [token_id]) for text, token_id in cut.items()}}
        # At each place the longest, as the tokenizer does.
        self._cut = re.compile(f"({longest_of(cut)})").split
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids. `special`: with the special tokens that the model wants around a text."""
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
        """Tokenize segments, keep their ids, and put these into `found`."""
        tokenized = encode_all(self._tokenizer, segments, special=False)
        with self._lock:
            for segment, ids in zip(segments, tokenized, strict=True):
                found[segment] = new = array("I", ids)
                if self._known.setdefault(segment, new) is new:
                    self._characters += len(segment)
            while self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[0])


def longest_of(texts: Iterable[str]) -> str:
    """Return a regular expression for the longest of some texts.

    Common beginnings are factored out. A list of alternatives would be tried one by one at each place.
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
    while len(node) == 1 and _END not in node:  # A recursion for each character could be too deep.
        ((character, node),) = node.items()
        chain += re.escape(character)
    return chain + _alternatives(node)


def _alternatives(node: Mapping[str, Any]) -> str:
    parts = [re.escape(character) + _expression(inner) for character, inner in node.items() if character != _END]
    if not parts:
        return ""
    inside = parts[0] if len(parts) == 1 and _END not in node else f"(?:{'|'.join(parts)})"
    return f"{inside}?" if _END in node else inside


def by_segments(tokenizer: Tokenizer) -> SegmentTokenizer | None:
    """Return what tokenizes by segments; None if a segment's tokens could depend on other segments."""
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
    """Return the tokens before and after a text with special tokens."""
    plain, whole = [tokenizer.encode(_TRIALS[0], add_special_tokens=special).ids for special in (False, True)]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def _cutting_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids by texts. Tokens that are looked for in the normalized text are found within a segment."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if not token.normalized and token.content}
