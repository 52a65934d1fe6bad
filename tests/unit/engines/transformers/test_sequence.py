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
    """Return the deltas of a sequence for which the model would generate `token_ids`."""
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


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def token_text_of(deltas: list[TokenDelta]) -> str:
    return "".join(token.text for delta in deltas for token in delta.tokens)


def test_a_streamed_sequence_has_a_delta_for_each_token_and_counts_at_its_end() -> None:
    deltas = run([*ids("ab"), END])
    assert [delta.text for delta in deltas] == ["a", "b", ""]
    last = deltas[-1]
    assert (last.finish_reason, last.last, last.prompt_token_count, last.token_count) == (FinishReason.EOS, True, 2, 3)
    assert last.cumulative_logprob == -1.5
    assert [(token.id, token.text, token.special) for token in last.tokens] == [(END, "", True)]


def test_without_streaming_there_is_one_delta_at_the_end() -> None:
    deltas = run([*ids("abc"), END], stream=False)
    assert [(delta.text, delta.last, len(delta.tokens)) for delta in deltas] == [("abc", True, 4)]


def test_a_character_of_several_tokens_comes_whole_with_the_last_of_them() -> None:
    deltas = run([*ids("é!"), END])
    assert [token.text for delta in deltas for token in delta.tokens] == ["", "é", "!", ""]
    assert text_of(deltas) == "é!"


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_a_stop_string_ends_the_text_and_the_tokens_join_to_it(include: bool, text: str) -> None:
    deltas = run(ids("one two three"), stop=("two",), include_stop_str_in_output=include)
    assert text_of(deltas) == token_text_of(deltas) == text
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].token_count == len("one two")


def test_text_that_could_begin_a_stop_string_is_held_back_and_let_go_when_it_does_not() -> None:
    deltas = run([*ids("xabx"), END], stop=("abc",))
    assert [delta.text for delta in deltas] == ["x", "abx", ""]
    assert [token.text for delta in deltas for token in delta.tokens] == ["x", "a", "b", "x", ""]


def test_held_text_is_let_go_when_the_sequence_ends_otherwise() -> None:
    deltas = run([*ids("ab"), END], stop=("abc",))
    assert text_of(deltas) == "ab"
    assert deltas[-1].finish_reason is FinishReason.EOS


def test_a_stop_string_does_not_end_a_sequence_shorter_than_min_tokens() -> None:
    deltas = run([*ids("a.b.c"), END], stop=(".",), min_tokens=2)
    assert text_of(deltas) == "a.b"


def test_a_stop_token_ends_the_sequence_without_its_text() -> None:
    (stop,) = ids("c")
    deltas = run(ids("abc"), stop_token_ids=(stop,))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("ab", FinishReason.STOP)
    shown = run(ids("abc"), stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert (text_of(shown), shown[-1].finish_reason) == ("abc", FinishReason.STOP)


def test_the_end_token_is_a_token_like_others_when_it_is_ignored() -> None:
    deltas = run([END, *ids("a")], ignore_eos=True, max_tokens=2)
    assert (text_of(deltas), deltas[-1].finish_reason) == ("a", FinishReason.LENGTH)


def test_max_tokens_and_the_context_end_a_sequence_for_its_length() -> None:
    assert run(ids("abcdef"), max_tokens=3)[-1].token_count == 3
    last = run(ids("abcdef"), max_tokens=50, model=byte_model(max_model_len=len(PROMPT) + 4))[-1]
    assert (last.finish_reason, last.token_count) == (FinishReason.LENGTH, 4)


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    token_ids = [*ids("a"), SEP, *ids("b"), END]
    assert text_of(run(token_ids)) == "ab"
    assert text_of(run(token_ids, skip_special_tokens=False)) == "a<sep>b"


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
    assert [token.rank for delta in deltas for token in delta.tokens] == [2, 1, None]
    assert [top.rank for top in deltas[0].tokens[0].top] == [1, 2]


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
