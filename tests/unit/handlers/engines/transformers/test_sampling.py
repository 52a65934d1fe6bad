"""The sampler against transformers' own warpers, and against a direct computation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from handlers.engines.transformers.sampling import (
    Choice,
    PreparedSampling,
    TokenChooser,
    _weights,
    check_prompt,
    choose_rows,
)
from handlers.errors import GenerationFailed, InvalidParameter, InvalidRequest
from handlers.request import Constraint, GenerationRequest, SamplingParameters
from tests.unit.handlers.engines.transformers.test_sequence import END, MODEL, SEP, ids

SIZE = MODEL.vocabulary_size


def logits(seed: int) -> Any:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def chooser(prompt_ids: tuple[int, ...] = (1, 2, 3), sequence: int = 0, **fields: Any) -> TokenChooser:
    names = GenerationRequest.__struct_fields__
    request_fields = {name: fields.pop(name) for name in list(fields) if name in names}
    request = GenerationRequest(
        request_id="r", **{"prompt": prompt_ids, **request_fields}, sampling=SamplingParameters(**fields)
    )
    return TokenChooser(PreparedSampling(request, prompt_ids, MODEL), sequence)


def token(value: Choice | Any) -> int:
    assert isinstance(value, Choice), value
    return value.token_id


def kept(weights: Any) -> set[int]:
    return set(weights.nonzero().flatten().tolist())


def finite(scores: Any) -> set[int]:
    return set(torch.isfinite(scores).nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("parameters", "warper"),
    [
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        ({"typical_p": 0.7}, TypicalLogitsWarper(0.7)),
    ],
)
def test_each_way_of_cutting_keeps_the_tokens_that_transformers_keeps(
    parameters: dict[str, Any], warper: Any, seed: int
) -> None:
    row = logits(seed)
    weights = _weights(row, SamplingParameters(temperature=1.0, **parameters))
    expected = warper(None, row[None])[0]
    assert kept(weights) == finite(expected)
    torch.testing.assert_close(weights / weights.sum(), expected.softmax(-1))


def test_the_cuts_apply_one_after_the_other_to_what_the_one_before_has_left() -> None:
    row = logits(1)
    scores = row[None] / 0.7
    for warper in (MinPLogitsWarper(0.02), TypicalLogitsWarper(0.9), TopKLogitsWarper(12), TopPLogitsWarper(0.6)):
        scores = warper(None, scores)
    s = SamplingParameters(temperature=0.7, min_p=0.02, typical_p=0.9, top_k=12, top_p=0.6)
    weights = _weights(row, s)
    torch.testing.assert_close(weights / weights.sum(), scores[0].softmax(-1))


def test_a_wide_nucleus_is_found_beyond_the_tokens_that_are_looked_at_first() -> None:
    row = torch.zeros(4000)
    weights = _weights(row, SamplingParameters(temperature=1.0, top_p=0.5))
    assert len(kept(weights)) in (2000, 2001)


@pytest.mark.parametrize("mass", [0.001, 0.2, 0.9])
def test_a_nucleus_of_any_width_is_that_of_transformers(mass: float) -> None:
    row = torch.randn(20_000, generator=torch.Generator().manual_seed(4)) * 0.3
    weights = _weights(row, SamplingParameters(temperature=1.0, top_p=mass))
    expected = finite(TopPLogitsWarper(mass)(None, row[None])[0])
    assert len(kept(weights) ^ expected) <= 2, "rounding of a sum over thousands of tokens"


def test_penalties_are_vllms() -> None:
    chosen, prompt = 5, (1, 2)
    row = torch.zeros(SIZE)
    row[[1, 2, 5]] = torch.tensor([4.0, -4.0, 3.0])
    one = chooser(prompt, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    one.remember(chosen)
    one.remember(chosen)
    adjusted = one._adjusted(row)
    assert adjusted[[1, 2, 5, 6]].tolist() == [2.0, -8.0, 3.0 / 2 - 0.5 - 0.25 * 2, 0.0]
    assert row[1] == 4.0, "the model's logits stay as they are: log probabilities come of them"


def test_bias_allowed_tokens_and_bad_words_steer_the_choice() -> None:
    row = torch.zeros(SIZE)
    a, b, c = ids("abc")
    row[a], row[b] = 2.0, 1.0
    assert chooser().choose(row).token_id == a
    assert chooser(logit_bias={c: 5.0}).choose(row).token_id == c
    assert chooser(allowed_token_ids=(b, c)).choose(row).token_id == b
    forbidden = chooser(bad_words=("ab",))
    row[b] = 3.0
    assert forbidden.choose(row).token_id == b, "alone it is no bad word"
    forbidden.remember(a)
    assert forbidden.choose(row).token_id == a


def test_no_end_before_min_tokens() -> None:
    row = torch.zeros(SIZE)
    row[END], row[SEP] = 5.0, 4.0
    one = chooser(min_tokens=1, stop_token_ids=(SEP,))
    assert one.choose(row).token_id not in (END, SEP)
    assert one.choose(row).token_id == END


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    row = logits(3)
    expected = row.log_softmax(-1)
    choice = chooser(temperature=0.3, top_k=1, want_logprobs=True, top_tokens=3, repetition_penalty=5.0).choose(row)
    assert choice.logprob == pytest.approx(expected[choice.token_id].item(), abs=1e-5)
    values, best = expected.topk(3)
    assert [i for i, _ in choice.top] == best.tolist()
    assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_log_probabilities_are_computed_only_where_something_needs_them() -> None:
    row = logits(3)
    assert chooser().choose(row).logprob is None
    assert chooser(candidates=2, sequences=1).choose(row).logprob is not None
    assert chooser(candidates=2, sequences=2, stream=True).choose(row).logprob is None


def test_sampling_follows_the_probabilities() -> None:
    row = torch.full((SIZE,), -math.inf)
    row[[3, 9, 27]] = torch.tensor([0.5, 0.3, 0.2]).log()
    one = chooser(temperature=1.0, seed=11)
    counts = Counter(one.choose(row).token_id for _ in range(4000))
    assert counts.keys() == {3, 9, 27}
    assert [counts[i] / 4000 for i in (3, 9, 27)] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


def test_sequences_of_one_request_draw_differently_and_each_the_same_again() -> None:
    def drawn(sequence: int) -> list[int]:
        one = chooser(temperature=5.0, seed=7, sequence=sequence)
        return [one.choose(logits(step)).token_id for step in range(8)]

    assert drawn(0) == drawn(0) != drawn(1)


PARAMETERS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5])},
    optional={
        "top_k": st.integers(1, 300),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "typical_p": st.floats(0.1, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "want_logprobs": st.booleans(),
        "top_tokens": st.integers(0, 3),
    },
)


@settings(deadline=None, max_examples=50)
@given(st.lists(PARAMETERS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_sequence_draws_the_same_tokens_alone_and_at_any_place_of_a_batch(requests: list[Any], random: Any) -> None:
    numbered = list(enumerate(requests))
    alone = {}
    for number, parameters in numbered:
        one = chooser(seed=number, **parameters)
        alone[number] = [token(choose_rows([one], logits(100 * step + number)[None])[0]) for step in range(4)]
    random.shuffle(numbered)
    together = [chooser(seed=number, **parameters) for number, parameters in numbered]
    for step in range(4):
        rows = torch.stack([logits(100 * step + number) for number, _ in numbered])
        choices = choose_rows(together, rows)
        assert [token(choice) for choice in choices] == [alone[number][step] for number, _ in numbered]
        for (_, parameters), choice in zip(numbered, choices, strict=True):
            assert isinstance(choice, Choice)
            assert len(choice.top) == parameters.get("top_tokens", 0)


def test_one_sequence_without_a_choice_fails_alone() -> None:
    rows = torch.zeros(4, SIZE)
    rows[1, 5] = math.nan
    rows[3, 9] = 1.0
    choices = choose_rows(
        [chooser(), chooser(), chooser(allowed_token_ids=(END,), min_tokens=1), chooser(temperature=1.0, top_k=1)], rows
    )
    assert isinstance(choices[1], GenerationFailed)
    assert isinstance(choices[2], GenerationFailed)
    assert "forbid every token" in choices[2].message
    assert [token(choices[0]), token(choices[3])] == [0, 9]


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"adapter": "a"}, "adapter"),
        ({"priority": 1}, "priority"),
        ({"top_tokens": SIZE + 1}, "top_n_tokens"),
        ({"stop_token_ids": (SIZE,)}, "stop_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"logit_bias": {SIZE: 1.0}}, "logit_bias"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": ("x" * 2000,)}, "bad_words"),
        ({"bad_words": ("x",) * 2000}, "bad_words"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        chooser(**fields)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("wrong", [SIZE, -1])
def test_a_prompt_with_a_token_that_the_model_does_not_have_is_refused(wrong: int) -> None:
    check_prompt([0, SIZE - 1], MODEL)
    with pytest.raises(InvalidRequest, match=f"token id {wrong}"):
        check_prompt([0, wrong, 1], MODEL)


def test_rounding_hardly_ever_changes_what_a_seed_draws() -> None:
    size, draws = 2000, 300
    row = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 3
    noise = torch.randn(draws, size, generator=torch.Generator().manual_seed(2)) * 0.01
    sampling = SamplingParameters(temperature=1.0, seed=5)
    prepared = PreparedSampling(
        GenerationRequest(request_id="r", prompt=(1,), sampling=sampling), (1,), replace(MODEL, vocabulary_size=size)
    )
    exact, rounded = TokenChooser(prepared), TokenChooser(prepared)
    changed = sum(exact.choose(row).token_id != rounded.choose(row + noise[i]).token_id for i in range(draws))
    assert changed <= draws // 50


def test_the_sequences_of_a_request_share_what_was_prepared_but_not_what_they_have_seen() -> None:
    sampling = SamplingParameters(bad_words=("ab",), logit_bias={3: 1.0}, repetition_penalty=2.0)
    prepared = PreparedSampling(GenerationRequest(request_id="r", prompt=(1, 2), sampling=sampling), (1, 2), MODEL)
    first, second = TokenChooser(prepared, 0), TokenChooser(prepared, 1)
    row = torch.full((SIZE,), 2.0)
    before = second._adjusted(row)
    first.remember(9)
    assert torch.equal(second._adjusted(row), before)
    assert first._adjusted(row)[9] == 1.0


def test_bad_words_are_refused_by_their_length_before_they_are_tokenized() -> None:
    class Untouched:
        def encode(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("it has been asked to tokenize")

    request = GenerationRequest(request_id="r", prompt=(1,), sampling=SamplingParameters(bad_words=("x" * 10**6,)))
    with pytest.raises(InvalidParameter, match="characters together"):
        PreparedSampling(request, (1,), replace(MODEL, tokenizer=Untouched()))


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("bias", [None, {7: 100.0}])
def test_a_rank_counts_the_tokens_that_are_more_probable(temperature: float, bias: dict[int, float] | None) -> None:
    row = logits(3)
    asked = chooser(temperature=temperature, seed=1, logit_bias=bias, want_logprobs=True, want_ranks=True)
    (choice,) = choose_rows([asked], row[None])
    assert isinstance(choice, Choice)
    order = row.argsort(descending=True).tolist()
    assert choice.rank == order.index(choice.token_id) + 1
    (quiet,) = choose_rows([chooser(temperature=temperature, seed=1, logit_bias=bias, want_logprobs=True)], row[None])
    assert isinstance(quiet, Choice)
    assert (quiet.token_id, quiet.rank) == (choice.token_id, None)


def test_a_constraint_is_refused_by_the_name_that_the_client_gave_it() -> None:
    constraint = Constraint(parameter="response_pool", choice=("yes", "no"))
    with pytest.raises(InvalidParameter, match=r"`response_pool` needs the vLLM engine \(option.rolling_batch=vllm\)"):
        chooser(constraint=constraint)
