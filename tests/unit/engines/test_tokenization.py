"""Copies of tokenizers, which are independent of each other, and the prompts that fit into the context."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engines.errors import ContextExceeded, InvalidRequest, PromptTooLong
from engines.loaded_model import ModelTexts, copied, fast_tokenizer
from engines.pooling import Pooling, Side
from engines.request import GenerationRequest
from engines.tokenization import PromptTokenizer, TokenTexts
from engines.tokenized_segments import LONG_TEXT
from tests.contracts.pooling_exchange import FakeTokenizer

LONG = "one two three " * 60_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer with a token for each byte. It puts another token in front of every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def test_truncation_that_others_switch_on_stays_theirs(tokenizer: Any) -> None:
    texts = ModelTexts(copied(tokenizer))
    tokenizer("one two three", truncation=True, max_length=2)
    assert fast_tokenizer(tokenizer).truncation is not None  # type: ignore[union-attr]
    assert texts.encode("one") == [256, *tokenizer.convert_tokens_to_ids(["o", "n", "e"])]
    assert ModelTexts(copied(tokenizer)).encode("one") == texts.encode("one")


def test_a_long_text_has_the_ids_and_the_text_of_a_short_one(tokenizer: Any) -> None:
    texts = ModelTexts(copied(tokenizer))
    text = "é one " * LONG_TEXT
    for special in (True, False):
        ids = texts.encode(text, special=special)
        assert ids == texts.places(text, special=special)[0]
        assert ids[special:] == texts.encode("é one ", special=False) * LONG_TEXT
    assert texts.decode(ids) == text
    assert texts.places("é", special=False) == (ids[:2], [(0, 1), (0, 1)])


@pytest.mark.parametrize("work", ["encode", "places", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(tokenizer: Any, work: str) -> None:
    texts = ModelTexts(copied(tokenizer))
    given: Any = texts.encode(LONG) if work == "decode" else LONG
    call: Callable[[Any], Any] = getattr(texts, work)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (call(given), ended.set()))
    thread.start()
    turns = 0
    while not ended.wait(0.0005):
        texts.decode([42])
        turns += 1
    thread.join()
    assert turns > 5  # there would be at most 2 turns if the work held the interpreter's lock


def test_a_prompt_that_has_its_special_tokens_gets_no_others(tokenizer: Any) -> None:
    prompts = PromptTokenizer(ModelTexts(copied(tokenizer)), 100_000)

    async def ids(text: str, add_special_tokens: bool) -> list[int]:
        request = GenerationRequest(request_id="r", prompt=text, add_special_tokens=add_special_tokens)
        return await prompts.token_ids(request)

    for text in ("<s>one", "<s>" + "one " * LONG_TEXT):
        with_one = asyncio.run(ids(text, False))
        assert with_one[:2] == [256, with_one[1]]
        assert asyncio.run(ids(text, True)) == [256, *with_one]


class _Tokenizer:
    """A token for each word."""

    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [7] * len(text.split())


def token_ids(prompt: str, **fields: int) -> list[int]:
    request = GenerationRequest(request_id="r", prompt=prompt, **fields)  # type: ignore[arg-type]
    return asyncio.run(PromptTokenizer(ModelTexts(_Tokenizer()), 10).token_ids(request))


def test_the_context_must_have_room_for_one_new_token_unless_the_request_wants_more() -> None:
    assert len(token_ids("a " * 9)) == 9
    assert len(token_ids("a " * 6, room=4)) == 6
    assert len(token_ids("a " * 50, room=5, truncate_prompt_tokens=5)) == 5
    with pytest.raises(ContextExceeded, match=r" 10 tokens; .*10 tokens .*one new token"):
        token_ids("a " * 10)
    with pytest.raises(ContextExceeded, match="5 new tokens") as caught:
        token_ids("a " * 6, room=5)
    assert (caught.value.prompt_tokens, caught.value.new_tokens, caught.value.context) == (6, 5, 10)


# Texts and pairs that are cut


@pytest.fixture(scope="module")
def pairs(tokenizer: Any) -> ModelTexts:
    """Return a tokenizer that puts a token in front of each text of a pair."""
    raw = copied(tokenizer)
    raw.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 256)]
    )
    return ModelTexts(raw)


def test_a_cut_may_have_no_special_tokens(pairs: ModelTexts) -> None:
    assert pairs.encode_cut("abcdef", None, 4, "right", special=False) == (pairs.encode("abcd", special=False), 4)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(4, 20), st.sampled_from(["left", "right"]))
def test_texts_are_cut_as_the_tokenizers_library_cuts_them(
    pairs: ModelTexts, first: int, second: int, most: int, side: Any
) -> None:
    library = copied(pairs.tokenizer).backend_tokenizer
    library.enable_truncation(most, strategy="longest_first", direction=side)
    texts = ("abcdefghijkl"[:first], "mnopqrstuvwx"[:second] if second else None)
    encoding = library.encode(*texts)
    boundary = encoding.type_ids.index(1) if 1 in encoding.type_ids else len(encoding.ids)
    assert pairs.encode_cut(*texts, most, side) == (encoding.ids, boundary)


def test_a_long_text_is_cut_like_a_short_one(pairs: ModelTexts) -> None:
    long = "abc" * LONG_TEXT
    assert pairs.encode_cut(long, long, 9, "right") == pairs.encode_cut(long[:99], long[:99], 9, "right")


def test_prompts_for_numbers_are_cut_or_refused(pairs: ModelTexts) -> None:
    prompts = PromptTokenizer(pairs, 8)

    async def pair(text: str, **pooling: Any) -> tuple[list[int], int]:
        return await prompts.pair(text, Pooling(task="classify", **pooling))

    cut, boundary = asyncio.run(pair("a" * 10_000, second="bc", cut="right"))
    assert (len(cut), boundary) == (8, 5)
    assert len(asyncio.run(pair("abcd", second="bc"))[0]) == 8
    with pytest.raises(ContextExceeded, match=r"has 9 tokens; the model's context of 8 tokens must hold it$"):
        asyncio.run(pair("abcde", second="bc"))
    with pytest.raises(InvalidRequest, match="10002"):
        asyncio.run(pair("a" * 10_000, second="bc"))
    # Only a prompt for generated text has to leave room for a token.
    full = GenerationRequest(prompt="abcdefg", pooling=Pooling(task="embed"), room=0)
    assert len(asyncio.run(prompts.token_ids(full))) == 8


@pytest.mark.parametrize(("side", "ids"), [("right", [2, 4, 5, 3]), ("left", [2, 6, 7, 3])])
async def test_a_pooled_text_is_cut_to_the_limit_of_prompts(side: Side, ids: list[int]) -> None:
    prompts = PromptTokenizer(ModelTexts(FakeTokenizer()), 100, max_prompt_tokens=4)
    pooling = Pooling(task="embed", cut=side)
    assert await prompts.pair("deep learning is fun", pooling) == (ids, 4)
    with pytest.raises(PromptTooLong, match=r"6 tokens; .*4 "):
        await prompts.pair("deep learning is fun", Pooling(task="embed"))


def test_a_row_of_replacement_characters_is_no_incomplete_character(tokenizer: Any) -> None:
    texts, ids = TokenTexts(tokenizer, [], skip_special=True), tokenizer.encode("\ufffd" * 3000 + " one")
    assert "".join(map(texts.add, ids)).strip() == "\ufffd" * 3000 + " one"


CHINESE = "\u4f60\u597d" * 4


def byte_fallback() -> tuple[Any, dict[str, int]]:
    """Return a tokenizer with words, a special token, and a token for each byte, like the tokenizer of Llama 2."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581world", "\u2581hello", "</s>"]
    vocabulary = {name: place for place, name in enumerate(names)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"), vocabulary


@pytest.mark.parametrize(
    "parts", [["w", CHINESE, "e", "w", "h"], [CHINESE, "e", "w"], ["w", "\ufffd" * 30, "h"], ["e", "h"]]
)
def test_hidden_tokens_and_characters_of_bytes_do_not_change_the_text(parts: list[str]) -> None:
    raw, vocabulary = byte_fallback()
    named = {"w": [vocabulary["\u2581world"]], "h": [vocabulary["\u2581hello"]], "e": [vocabulary["</s>"]] * 12}
    ids = [token for part in parts for token in named.get(part, part.encode())]
    prompt = [vocabulary["\u2581hello"]] * 3
    texts = TokenTexts(raw, prompt, skip_special=True)
    whole = raw.decode([*prompt, *ids], skip_special_tokens=True)
    assert " hello" * 3 + "".join(map(texts.add, ids)) == " " + whole
