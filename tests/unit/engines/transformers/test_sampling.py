"""The sampler against transformers' own processors, and against a direct computation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from engines.errors import GenerationFailed, InvalidParameter
from engines.request import BeamSearch, Constraint, GenerationRequest, SamplingParameters
from engines.transformers.sampling import Choice, Sampler, check_request, random_numbers
from tests.unit.engines.transformers.byte_model import END, MODEL, SEP, ids

SIZE = MODEL.vocabulary_size
CPU = torch.device("cpu")


def logits(seed: int) -> Any:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def request_of(**fields: Any) -> GenerationRequest:
    names = GenerationRequest.__struct_fields__
    request_fields = {name: fields.pop(name) for name in list(fields) if name in names}
    return GenerationRequest(
        request_id="r", **{"prompt": (1, 2, 3), **request_fields}, sampling=SamplingParameters(**fields)
    )


class Sequences:
    """A batch of sequences, one for each prompt. Each chosen token is added to its sequence."""

    def __init__(
        self, *prompts: tuple[int, ...], seeds: tuple[int, ...] = (), model: Any = MODEL, **fields: Any
    ) -> None:
        self.prompts = prompts or ((1, 2, 3),)
        self.generated: list[list[int]] = [[] for _ in self.prompts]
        generators = [random_numbers(seed, 0, CPU) for seed in seeds or (0,) * len(self.prompts)]
        self.sampler = Sampler(request_of(**fields), model, self.prompts, self.generated, generators)

    def choose(self, *rows: Any) -> list[Any]:
        texts = [[*prompt, *ids] for prompt, ids in zip(self.prompts, self.generated, strict=True)]
        longest = max(map(len, texts))
        input_ids = torch.tensor([[END] * (longest - len(text)) + text for text in texts])
        choices = self.sampler.choose(input_ids, torch.stack(rows))
        for token_ids, choice in zip(self.generated, choices, strict=True):
            if isinstance(choice, Choice):
                token_ids.append(choice.token_id)
        return choices

    def next(self, row: Any) -> int:
        """Return the next token of a batch of one."""
        (choice,) = self.choose(row)
        assert isinstance(choice, Choice), choice
        return choice.token_id


def drawn(row: Any, draws: int, **fields: Any) -> Counter[int]:
    sequences = Sequences(seeds=(11,), **fields)
    return Counter(sequences.next(row) for _ in range(draws))


def test_the_cuts_are_those_of_transformers_one_after_the_other() -> None:
    row = logits(1) / 2
    scores = row[None] / 0.7
    for warper in (MinPLogitsWarper(0.02), TypicalLogitsWarper(0.9), TopKLogitsWarper(12), TopPLogitsWarper(0.6)):
        scores = warper(None, scores)
    expected = scores[0].softmax(-1)
    found = drawn(row, 2000, temperature=0.7, min_p=0.02, typical_p=0.9, top_k=12, top_p=0.6)
    assert 2 <= len(found) < 12
    assert found.keys() <= set(expected.nonzero().flatten().tolist())
    assert all(count / 2000 == pytest.approx(expected[i].item(), abs=0.05) for i, count in found.items())


def test_penalties_are_vllms() -> None:
    """After the penalties, token 5 has the logit 0.5. It wins against a logit of 0.4, and loses against 0.6."""
    row = torch.zeros(SIZE)
    row[[1, 2, 5]] = torch.tensor([4.0, -4.0, 3.0])
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sequences = Sequences((1, 2), **penalties)
    sequences.generated[0] += [5, 5]
    # 1: 2.0, 2: -8.0, 5: 3 / 2 - 0.5 - 0.25 * 2 = 0.5
    assert sequences.next(row) == 1
    assert row[1] == 4.0, "the model's logits stay as they are: log probabilities come of them"
    for rival, wins in ((0.4, 5), (0.6, 9)):
        sequences = Sequences((1, 2), allowed_token_ids=(5, 9), **penalties)
        sequences.generated[0] += [5, 5]
        row[9] = rival
        assert sequences.next(row) == wins


def test_a_repetition_penalty_does_not_see_padding() -> None:
    row = torch.zeros(SIZE)
    row[END], row[9] = 3.0, 2.0
    short, long = Sequences((1,), (1, 2, 3, 4), repetition_penalty=2.0).choose(row, row)
    assert short.token_id == long.token_id == END


def test_bias_allowed_tokens_and_bad_words_steer_the_choice() -> None:
    row = torch.zeros(SIZE)
    a, b, c = ids("abc")
    row[a], row[b] = 2.0, 1.0
    assert Sequences().next(row) == a
    assert Sequences(logit_bias={c: 5.0}).next(row) == c
    assert Sequences(allowed_token_ids=(b, c)).next(row) == b
    assert Sequences(allowed_token_ids=(b, c), logit_bias={c: 5.0, a: 9.0}).next(row) == c
    forbidden = Sequences(bad_words=("ab",))
    row[b] = 3.0
    assert forbidden.next(row) == b, "alone it is no bad word"
    forbidden.generated[0].append(a)
    assert forbidden.next(row) == a


def test_no_end_before_min_tokens() -> None:
    row = torch.zeros(SIZE)
    row[END], row[SEP] = 5.0, 4.0
    one = Sequences(min_tokens=1, stop_token_ids=(SEP,))
    assert one.next(row) not in (END, SEP)
    assert one.next(row) == END


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    row = logits(3)
    expected = row.log_softmax(-1)
    fields = {"temperature": 0.3, "top_k": 1, "want_logprobs": True, "top_tokens": 3, "repetition_penalty": 5.0}
    (choice,) = Sequences(**fields).choose(row)
    assert choice.logprob == pytest.approx(expected[choice.token_id].item(), abs=1e-5)
    values, best = expected.topk(3)
    assert [i for i, _ in choice.top] == best.tolist()
    assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-5)


PARAMETERS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.5])},
    optional={
        "top_k": st.integers(1, 300),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "typical_p": st.floats(0.1, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "bad_words": st.just(("ab", "c")),
        "want_logprobs": st.booleans(),
        "top_tokens": st.integers(0, 3),
    },
)


@settings(max_examples=50)
@given(PARAMETERS, st.permutations(range(5)), st.integers(1, 5))
def test_a_sequence_draws_the_same_tokens_alone_and_at_any_place_of_a_batch(
    parameters: dict[str, Any], order: list[int], size: int
) -> None:
    numbers = order[:size]
    prompts = [(number, 7) * (number + 1) for number in numbers]
    alone = [Sequences(prompt, seeds=(number,), **parameters) for prompt, number in zip(prompts, numbers, strict=True)]
    together = Sequences(*prompts, seeds=tuple(numbers), **parameters)
    for step in range(4):
        rows = [logits(100 * step + number) for number in numbers]
        single = [one.choose(row)[0] for one, row in zip(alone, rows, strict=True)]
        choices = together.choose(*rows)
        assert [choice.token_id for choice in choices] == [choice.token_id for choice in single]
        assert all(len(choice.top) == parameters.get("top_tokens", 0) for choice in choices)


def test_parameters_that_forbid_every_token_are_an_error() -> None:
    (choice,) = Sequences(allowed_token_ids=(END,), min_tokens=1).choose(torch.zeros(SIZE))
    assert isinstance(choice, GenerationFailed)
    assert "forbid every token" in choice.message


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"adapter": "a"}, "adapter"),
        ({"top_tokens": 21}, "top_n_tokens"),
        ({"stop_token_ids": (SIZE,)}, "stop_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (SIZE,)}, "allowed_token_ids"),
        ({"logit_bias": {SIZE: 1.0}}, "logit_bias"),
        ({"beam_search": BeamSearch(width=2), "stop_token_ids": tuple([1] * 65)}, "stop_token_ids"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": ("x" * 20000,)}, "bad_words"),
        ({"bad_words": ("x",) * 2000}, "bad_words"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        check_request(request_of(**fields), MODEL)
    assert refused.value.parameter == parameter


def test_a_constraint_is_refused_by_the_name_that_the_client_gave_it() -> None:
    constraint = Constraint(parameter="response_pool", choice=("yes", "no"))
    with pytest.raises(InvalidParameter, match=r"`response_pool` .*option\.rolling_batch=vllm"):
        check_request(request_of(constraint=constraint), MODEL)


def test_rounding_hardly_ever_changes_what_a_seed_draws() -> None:
    size, draws = 2000, 300
    row = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 3
    noise = torch.randn(draws, size, generator=torch.Generator().manual_seed(2)) * 0.01
    model = replace(MODEL, vocabulary_size=size)
    exact, rounded = (Sequences(seeds=(5,), model=model, temperature=1.0) for _ in range(2))
    changed = sum(exact.next(row) != rounded.next(row + noise[i]) for i in range(draws))
    assert changed <= draws // 50


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("bias", [None, {7: 100.0}])
def test_a_rank_counts_the_tokens_that_are_more_probable(temperature: float, bias: dict[int, float] | None) -> None:
    row = logits(3)
    (choice,) = Sequences(temperature=temperature, logit_bias=bias, want_logprobs=True).choose(row)
    order = row.argsort(descending=True).tolist()
    assert choice.rank == order.index(choice.token_id) + 1
