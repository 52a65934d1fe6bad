"""Tokenization by segments gives a text the same tokens as tokenization of the whole text.

If this does not hold for a tokenizer, the tokenizer is not used by segments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from engines import tokenized_segments as segments
from engines.tokenized_segments import SegmentTokenizer, by_segments

WORDS = ["a", "b", "é", "\u4f60", " ", "\n", "▁", "Ġ", "▁a", "▁b", "a▁", "Ġa", "Ġb", "ab", "1"]
CUTS = ["<s>", "<|end|>", "<|end|>x", "<"]


def made(
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    around: str = "",
    added: tuple[AddedToken, ...] | None = None,
) -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(["?", *pre_tokenizers.ByteLevel.alphabet(), *WORDS]))}
    merges = [("▁", "a"), ("▁", "b"), ("a", "▁"), ("Ġ", "a"), ("Ġ", "b"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added) if added is not None else [AddedToken(cut, normalized=False) for cut in CUTS])
    if around:
        ids = [(text, tokenizer.token_to_id(text)) for text in around.split() if text != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes with a prefix": lambda: made(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "spaces, first": lambda: made(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "spaces, always": lambda: made(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "spaces, never": lambda: made(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
    "prepended": lambda: made(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "stripped": lambda: made(normalizer=normalizers.Strip()),
    "composed": lambda: made(normalizer=normalizers.NFC()),
    "plain": made,
    "begun": lambda: made(around="<s> $A"),
    "begun and ended": lambda: made(around="<s> a $A a <|end|>"),
    "normalized tokens": lambda: made(
        normalizer=normalizers.Lowercase(),
        added=(AddedToken("<s>", normalized=False), AddedToken("ab", normalized=True)),
    ),
    "greedy tokens": lambda: made(added=(AddedToken("<s>", normalized=False, lstrip=True), AddedToken("<|end|>"))),
}
TEXTS = st.lists(st.sampled_from([*WORDS, *CUTS, "A", "AB", "e\u0301", "<|end", "|>", "  "])).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_tokens_that_the_tokenizer_gives_it(kind: str) -> None:
    tokenizer = KINDS[kind]()
    found = by_segments(tokenizer)
    if found is None:
        return

    @given(TEXTS, st.booleans())
    def same(text: str, special: bool) -> None:
        for _ in ("new", "known"):
            assert found.encode(text, special=special) == tokenizer.encode(text, add_special_tokens=special).ids

    same()


def test_common_tokenizers_are_used_by_segments_and_those_that_look_around_are_not() -> None:
    used = {kind for kind, make in KINDS.items() if by_segments(make()) is not None}
    assert {"bytes", "begun", "begun and ended", "spaces, never", "composed", "normalized tokens"} <= used
    assert not {"spaces, first", "greedy tokens"} & used
    assert by_segments(made(added=())) is None


class Counting:
    """A tokenizer that counts the characters that it tokenizes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_only_what_is_new_is_tokenized() -> None:
    tokenizer: Any = Counting(KINDS["bytes"]())
    found = SegmentTokenizer(tokenizer)
    system, question, long = "<s>You help." * 2, "<s>a b 1", "ab " * 5000
    for text, new in ((system, len("You help.")), (system + question, len("a b 1")), (system + long, 9 + len(long))):
        tokenizer.characters = 0
        assert found.encode(text, special=False) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.characters == new
    tokenizer.characters = 0
    found.encode(system + long, special=True)
    found.encode(system + question, special=True)
    assert tokenizer.characters == 0


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MOST_CHARACTERS", 30)
    tokenizer: Any = Counting(KINDS["bytes"]())
    found = SegmentTokenizer(tokenizer)
    for text in ("a" * 10, "b" * 10, "a" * 10, "1" * 15):  # the b's are forgotten, because the a's were used later
        found.encode(text, special=False)
    tokenizer.characters = 0
    found.encode("a" * 10, special=False)
    assert tokenizer.characters == 0
    found.encode("b" * 10, special=False)
    assert tokenizer.characters == 10
    assert (
        found.encode("ab" * 30, special=False) == tokenizer._tokenizer.encode("ab" * 30, add_special_tokens=False).ids
    )


@given(st.lists(st.text("<|ab", min_size=1, max_size=5), min_size=1, max_size=8), st.text("<|abc", max_size=12))
def test_the_longest_of_some_texts_is_found(texts: list[str], text: str) -> None:
    found = re.match(segments.longest_of(texts), text)
    expected = max((each for each in texts if text.startswith(each)), key=len, default=None)
    assert (found and found[0]) == expected


def test_many_added_tokens_with_one_beginning_are_looked_for_together() -> None:
    cut = re.compile(segments.longest_of(f"<unused{number}>" for number in range(6000))).split
    assert len(cut("<unused" * 100_000)) == 1


def test_an_added_token_may_be_long() -> None:
    assert re.fullmatch(segments.longest_of(["a" * 5000, "b"]), "a" * 5000)
