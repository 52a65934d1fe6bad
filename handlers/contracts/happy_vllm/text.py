"""Texts and tokens as happy_vllm sees them: as they would be inside a longer text.

A tokenizer may treat the beginning of a text differently: Llama's puts a space in front of it, and takes one away when
it decodes. happy_vllm's "non-vanilla" tokenization is that of the text behind another word, without that word.
All work is in proportion to the text: a few passes of the tokenizer over it, and one for the text of each token.
Source: contracts/happy_vllm.md sections 6 and 7; documented examples of happy_vllm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from handlers.contracts.family import LoadedModel

_WORD = "thisisareallybigwordisntit"
"""happy_vllm's. How the beginning of a text is split depends on the word in front of it, so it is the same here."""
_HEAD = 256
"""Characters of a text on which a word is tried first; what follows them hardly ever matters."""
_TRIES = 3
"""Words that are tried on a whole text; the first fits, unless the text was made so that it does not."""
_BLOCK = 32
"""Tokens decoded in one go: a decoder may take quadratic time over bytes that are no text."""
_CONTEXT = 16
_LONGEST_CHARACTER = 8
"""Tokens that may together be one character: four bytes of UTF-8, and some for special ones in between."""


def ids_inside(model: LoadedModel, text: str) -> list[int]:
    """Token ids of the text as it would be tokenized inside a longer one, without special tokens."""
    word, ids = _behind(model, _WORD, text[:_HEAD], len(_WORD))
    return ids if len(text) <= _HEAD else _behind(model, word, text, _TRIES)[1]


def _behind(model: LoadedModel, word: str, text: str, tries: int) -> tuple[str, list[int]]:
    """The longest beginning of the word whose tokens stay as they are when the text follows, and the text's ids.

    After so many `tries` the text by itself.
    """
    while word and tries:
        before, together = _encode(model, word), _encode(model, word + text)
        if together[: len(before)] == before:
            return word, together[len(before) :]
        word, tries = word[:-1], tries - 1
    return "", _encode(model, text)


def _encode(model: LoadedModel, text: str) -> list[int]:
    return model.texts.encode(text, special=False) if text else []


def texts_inside(model: LoadedModel, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, as inside a longer text; joined, they are the text of all.

    A character that takes several tokens comes whole with the last of them.
    """
    before = _encode(model, _WORD)[-1:]
    texts: list[str] = []
    while len(texts) < len(token_ids):
        start = len(texts)
        context = [*before, *token_ids[max(start - _CONTEXT, 0) : start]]
        block = token_ids[start : start + _BLOCK]
        part = [token.text for token in model.detokenize(block, False, context)]
        at_end = start + len(block) == len(token_ids)
        pending = _pending(part)
        if pending and not at_end:
            del part[-pending:]
        elif pending:  # a character that never gets complete
            part[-1] = model.texts.decode(block[-pending:])
        texts += part
    return texts


def _pending(texts: Sequence[str]) -> int:
    """How many tokens at the end may be the beginning of a character that is not complete."""
    last = islice(reversed(texts), min(_LONGEST_CHARACTER, len(texts) - 1))
    return next((count for count, text in enumerate(last) if text), min(_LONGEST_CHARACTER, len(texts) - 1))


def split_text(model: LoadedModel, text: str, minimum: int, separators: Iterable[str]) -> list[str]:
    """Chunks of at least `minimum` tokens that end right after a separator; the last one has the rest.

    Separators are compared as tokens: "?" is not " ?". The chunks, joined, are the text.
    """
    ids = ids_inside(model, text)
    texts = texts_inside(model, ids)
    ends = _Ends(ids_inside(model, separator) for separator in separators)
    chunks, begin = [], 0
    for end in range(1, len(ids) + 1):
        if end - begin >= minimum and ends.at(ids, end):
            chunks.append("".join(texts[begin:end]))
            begin = end
    chunks.append("".join(texts[begin:]))
    return [chunk for chunk in chunks if chunk]


class _Ends:
    """Where in a list of token ids one of several sequences of ids ends."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._by_last: dict[int, list[list[int]]] = {}
        for sequence in sequences:
            if sequence:
                self._by_last.setdefault(sequence[-1], []).append(list(sequence))

    def at(self, ids: list[int], end: int) -> bool:
        candidates = self._by_last.get(ids[end - 1], ())
        return any(ids[max(end - len(sequence), 0) : end] == sequence for sequence in candidates)


def dropped_by_truncation(model: LoadedModel, text: str, max_length: int, side: str) -> str:
    """What truncation to `max_length` tokens drops from the text: its beginning (`left`) or its end (`right`)."""
    ids = _encode(model, text)
    excess = max(len(ids) - max_length, 0)
    dropped = ids[:excess] if side == "left" else ids[len(ids) - excess :]
    return model.texts.decode(dropped) if dropped else ""
