"""vLLM's sampling keywords: defaults, ranges and refusals of `vllm/sampling_params.py`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import InvalidParameter
from engines.request import BeamSearch, Constraint, EngineMemo, GenerationRequest, SamplingParameters
from handlers.parsing.json_fields import ParameterReader, Reader
from handlers.parsing.vllm_parameters import TextReader, VllmParameters, read_vllm_parameters

NAMES = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "logit_bias"),
    *("allowed_token_ids", "structured_outputs", "guided_decoding", "logits_processors", "extra_args"),
)


def refused(values: dict[str, Any], reader: Reader = ParameterReader) -> str:
    with pytest.raises(InvalidParameter) as caught:
        read_vllm_parameters(values, reader)
    return caught.value.message


def test_the_defaults_are_vllms() -> None:
    assert read_vllm_parameters({}) == VllmParameters(
        request=GenerationRequest(
            request_id="", prompt="", sampling=SamplingParameters(max_tokens=16, temperature=1.0), memo=EngineMemo()
        ),
        logprobs=None,
        prompt_logprobs=None,
        detokenize=True,
    )


def test_null_is_absent() -> None:
    assert read_vllm_parameters(dict.fromkeys(NAMES)) == read_vllm_parameters({})


def test_every_keyword_reaches_the_sampling_parameters() -> None:
    values = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [5, 6, 5],
        "bad_words": ["x", "y", "x"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 50,
        "min_tokens": 3,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"9": 1.5},
        "allowed_token_ids": [9, 10],
        "structured_outputs": {"regex": "a+"},
    }
    assert read_vllm_parameters(values).request.sampling == SamplingParameters(
        max_tokens=50,
        min_tokens=3,
        temperature=0.7,
        top_k=40,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        bad_words=("x", "y"),
        logit_bias={9: 1.5},
        allowed_token_ids=(9, 10),
        constraint=Constraint(parameter="structured_outputs.regex", regex="a+"),
    )


def test_what_the_answer_shows_is_apart_from_sampling() -> None:
    parameters = read_vllm_parameters(
        {"logprobs": 0, "prompt_logprobs": 2, "truncate_prompt_tokens": 9, "detokenize": False}
    )
    assert parameters.request.sampling == SamplingParameters(max_tokens=16, temperature=1.0)
    assert (parameters.logprobs, parameters.prompt_logprobs) == (0, 2)
    assert (parameters.request.truncate_prompt_tokens, parameters.detokenize) == (9, False)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (2, False)])
def test_a_temperature_below_vllms_epsilon_is_greedy(temperature: float, greedy: bool) -> None:
    assert read_vllm_parameters({"temperature": temperature}).request.sampling.greedy is greedy


def test_top_k_of_minus_one_or_zero_is_off() -> None:
    assert read_vllm_parameters({"top_k": -1}).request.sampling.top_k == 0
    assert read_vllm_parameters({"top_k": 0}).request.sampling.top_k == 0


def test_a_seed_of_minus_one_is_none() -> None:
    assert read_vllm_parameters({"seed": -1}).request.sampling.seed is None
    assert read_vllm_parameters({"seed": 0}).request.sampling.seed == 0


def test_stop_may_be_one_string() -> None:
    assert read_vllm_parameters({"stop": "\n"}).request.sampling.stop == ("\n",)


@pytest.mark.parametrize(
    ("values", "sequences", "candidates"),
    [({"n": 3}, 3, 3), ({"best_of": 4}, 1, 4), ({"n": 2, "best_of": 4}, 2, 4), ({"n": 2, "best_of": 2}, 2, 2)],
)
def test_best_of_candidates_make_n_sequences(values: dict[str, Any], sequences: int, candidates: int) -> None:
    parameters = read_vllm_parameters(values)
    assert (parameters.request.sequences, parameters.request.candidates) == (sequences, candidates)


def test_a_beam_search_is_as_wide_as_best_of_and_shows_n() -> None:
    parameters = read_vllm_parameters(
        {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": True, "temperature": 0}
    )
    assert parameters.request.beam_search == BeamSearch(width=4, length_penalty=0.5, early_stopping=True)
    assert (parameters.request.sequences, parameters.request.candidates) == (2, 2)
    assert read_vllm_parameters({"use_beam_search": True, "n": 3}).request.beam_search == BeamSearch(width=3)


def test_beam_keywords_with_their_defaults_are_no_beam_search() -> None:
    values = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1}
    assert read_vllm_parameters(values) == read_vllm_parameters({})


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("document", "constraint"),
    [
        ({"json": {"type": "object"}}, Constraint(parameter="json", json_schema='{"type":"object"}')),
        ({"json": '{ "a": 1 }'}, Constraint(parameter="json", json_schema='{ "a": 1 }')),
        (
            {"json": {}, "disable_any_whitespace": True},
            Constraint(parameter="json", json_schema="{}", any_whitespace=False),
        ),
        ({"regex": "[ab]"}, Constraint(parameter="regex", regex="[ab]")),
        ({"choice": ["a", "b", "a"]}, Constraint(parameter="choice", choice=("a", "b"))),
        ({"grammar": "root ::= 'a'"}, Constraint(parameter="grammar", grammar="root ::= 'a'")),
        ({"json_object": True, "regex": None}, Constraint(parameter="json_object", json_object=True)),
    ],
)
def test_structured_outputs_become_a_constraint(name: str, document: dict[str, Any], constraint: Constraint) -> None:
    read = read_vllm_parameters({name: document}).request.sampling.constraint
    assert read is not None
    assert read.parameter == f"{name}.{constraint.parameter}"
    expected = {field: getattr(constraint, field) for field in constraint.__struct_fields__ if field != "parameter"}
    assert {field: getattr(read, field) for field in expected} == expected


def test_text_values_stand_for_numbers_booleans_and_documents() -> None:
    as_text = {
        "max_tokens": "32",
        "temperature": "0.5",
        "top_p": "1",
        "top_k": "-1",
        "seed": " 9 ",
        "ignore_eos": "True",
        "skip_special_tokens": "false",
        "stop_token_ids": "[1, 2]",
        "logit_bias": '{"5": 1}',
        "guided_decoding": '{"choice": ["a"]}',
        "stop": "12",
    }
    typed = {
        "max_tokens": 32,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "seed": 9,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stop_token_ids": [1, 2],
        "logit_bias": {"5": 1},
        "guided_decoding": {"choice": ["a"]},
        "stop": "12",
    }
    assert read_vllm_parameters(as_text, TextReader) == read_vllm_parameters(typed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(NAMES) | st.text(), JSON),
    reader=st.sampled_from([ParameterReader, TextReader]),
)
def test_any_json_is_read_or_refused_by_name(values: dict[str, Any], reader: Reader) -> None:
    refusal: InvalidParameter | None = None
    try:
        parameters = read_vllm_parameters(values, reader)
    except InvalidParameter as error:
        refusal = error
    if refusal is not None:
        assert refusal.message.startswith(f"`{refusal.parameter}`")
        return
    sampling = parameters.request.sampling
    assert sampling.max_tokens is not None
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert (
        1 <= parameters.request.sequences <= parameters.request.candidates or parameters.request.beam_search is not None
    )
