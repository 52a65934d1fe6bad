"""Texts, stop strings and the end of a sequence, with a tokenizer that has bytes as tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import given
from hypothesis import strategies as st

from engines.request import FinishReason, GenerationRequest, SamplingParameters, TokenDelta
from engines.tokenization import StopStrings, TokenTexts
from engines.transformers.generate import BatchSequence
from engines.transformers.model import TransformersModel
from engines.transformers.sampling import Choice
from tests.unit.engines.transformers.byte_model import END, MODEL, SEP, byte_model, ids

PROMPT = MODEL.tokenizer.encode("P:")


def run(token_ids: list[int], *, model: TransformersModel = MODEL, **fields: Any) -> list[TokenDelta]:
    """Return the deltas of a sequence if the model generates `token_ids`."""
    names = GenerationRequest.__struct_fields__
    request_fields = {name: fields.pop(name) for name in list(fields) if name in names}
    request = GenerationRequest(
        request_id="r",
        prompt=tuple(PROMPT),
        sampling=SamplingParameters(**fields),
        **{"stream": True, "want_tokens": True, **request_fields},
    )
    sequence = BatchSequence(request, PROMPT, model)
    deltas = []
    for token_id in token_ids:
        if (delta := sequence.add(Choice(token_id, -0.5))) is not None:
            deltas.append(delta)
        if sequence.finish_reason is not None:
            break
    return deltas


EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH
SHOWN = {"include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("token_ids", "fields", "texts", "reason"),
    [
        # A character of several tokens is sent with the last of these tokens.
        ([*ids("é!"), END], {}, ["", "é", "!", ""], EOS),
        (ids("one two three"), {"stop": ("two",)}, [*"one ", ""], STOP),
        (ids("one two three"), {"stop": ("two",), **SHOWN}, [*"one two"], STOP),
        # If a text may be the beginning of a stop string, it is held back until this is known or the sequence ends.
        ([*ids("xabx"), END], {"stop": ("abc",)}, ["x", "abx", ""], EOS),
        ([*ids("ab"), END], {"stop": ("abc",)}, ["ab"], EOS),
        ([*ids("a.b.c"), END], {"stop": (".",), "min_tokens": 2}, ["a", ".", "b", ""], STOP),
        (ids("abc"), {"stop_token_ids": tuple(ids("c"))}, ["a", "b", ""], STOP),
        (ids("abc"), {"stop_token_ids": tuple(ids("c")), **SHOWN}, ["a", "b", "c"], STOP),
        ([END, *ids("a")], {"ignore_eos": True, "max_tokens": 2}, ["", "a"], LENGTH),
        (ids("abcdef"), {"max_tokens": 3}, ["a", "b", "c"], LENGTH),
        (ids("abcdef"), {"model": byte_model(max_model_len=len(PROMPT) + 4)}, ["a", "b", "c", "d"], LENGTH),
        ([*ids("a"), SEP, *ids("b"), END], {}, ["a", "", "b", ""], EOS),
        ([*ids("a"), SEP, END], {"skip_special_tokens": False}, ["a", "<sep>", ""], EOS),
        ([*ids("abc"), END], {"stream": False}, ["abc"], EOS),
    ],
)
def test_a_sequence_has_these_texts_and_ends_for_this_reason(
    token_ids: list[int], fields: dict[str, Any], texts: list[str], reason: FinishReason
) -> None:
    deltas = run(token_ids, **fields)
    assert [delta.text for delta in deltas] == texts
    assert deltas[-1].finish_reason is reason
    assert "".join(token.text for delta in deltas for token in delta.tokens) == "".join(texts)
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_the_prompts_tokens_come_with_the_first_delta_even_when_its_text_is_held() -> None:
    request = GenerationRequest(
        request_id="r",
        prompt=tuple(PROMPT),
        sampling=SamplingParameters(stop=("ab",)),
        stream=True,
        want_tokens=True,
        want_prompt_tokens=True,
        want_logprobs=True,
    )
    sequence = BatchSequence(request, PROMPT, MODEL)
    sequence.prompt_logprobs = [-2.0]
    delta = sequence.add(Choice(ids("a")[0], None))
    assert delta is not None
    assert delta.prompt_tokens is not None
    assert [(token.text, token.logprob) for token in delta.prompt_tokens] == [("P", None), (":", -2.0)]
    assert delta.text == ""


def test_every_delta_has_the_counts_and_the_log_probability_so_far() -> None:
    request = GenerationRequest(
        request_id="r", prompt=tuple(PROMPT), stream=True, want_tokens=True, want_logprobs=True, want_ranks=True
    )
    sequence = BatchSequence(request, PROMPT, MODEL)
    steps = [
        Choice(ids("a")[0], -0.5, ((1, -0.25), (2, -0.5)), 2),
        Choice(ids("b")[0], -0.25, (), 1),
        Choice(END, -1.0),
    ]
    deltas = [delta for step in steps if (delta := sequence.add(step)) is not None]
    assert [(d.prompt_token_count, d.token_count, d.cumulative_logprob) for d in deltas] == [
        (len(PROMPT), 1, -0.5),
        (len(PROMPT), 2, -0.75),
        (len(PROMPT), 3, -1.75),
    ]
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [(token.text, token.special, token.rank) for token in tokens] == [
        ("a", False, 2),
        ("b", False, 1),
        ("", True, None),
    ]
    assert [top.rank for top in tokens[0].top] == [1, 2]


class SlowTokenizer:
    """A tokenizer with the tokens of `MODEL`, without the decoder of `tokenizers`. It records its longest text."""

    def __init__(self) -> None:
        self.all_special_ids = [END, SEP]
        self.added_tokens_decoder: dict[int, str] = {}
        self.most = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(token_ids))
        text: str = MODEL.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def test_with_a_slow_tokenizer_hidden_tokens_in_a_row_cost_no_more_and_more() -> None:
    tokenizer = SlowTokenizer()
    texts = TokenTexts(tokenizer, PROMPT, skip_special=True)
    pieces = [texts.add(token_id) for token_id in [*ids("a"), *[SEP] * 200, *ids("é!")]]
    assert "".join(pieces) == "aé!"
    assert tokenizer.most < 20


PIECES = st.lists(st.text("abc", max_size=3), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(PIECES, STOPS, st.booleans())
def test_stop_strings_are_found_as_in_the_text_that_grows_by_a_character(
    pieces: list[str], stop: list[str], include: bool
) -> None:
    finder, text, cut = StopStrings(stop, include), "", None
    for piece in pieces:
        text += piece
        surplus = finder.add(piece, count=True)
        held = finder.held()
        if surplus is not None:
            cut = text[: len(text) - surplus]
            break
        begun = [n for n in range(1, len(text) + 1) for s in stop if len(s) > n and s.startswith(text[-n:])]
        assert held == (0 if include else max(begun, default=0))
    whole = "".join(pieces)
    ends = [end for end in range(len(whole) + 1) for s in stop if whole[:end].endswith(s)]
    if not ends:
        assert cut is None
        return
    end = min(ends)
    first = next(s for s in stop if whole[:end].endswith(s))
    assert cut == (whole[:end] if include else whole[: end - len(first)])
