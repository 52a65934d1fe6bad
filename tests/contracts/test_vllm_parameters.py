"""vLLM's sampling keywords as texts and as JSON values of every kind. `requests/happy_vllm.yaml` has each keyword."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidParameter
from engines.request import SamplingParameters
from handlers.parsing.json_fields import ParameterReader, Reader
from handlers.parsing.vllm_parameters import TextReader, read_vllm_parameters
from tests.contracts.exchange import JSON

NAMES = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "use_beam_search", "length_penalty", "early_stopping", "stop", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "logit_bias"),
    *("allowed_token_ids", "structured_outputs", "guided_decoding", "logits_processors", "extra_args"),
)


def test_null_is_absent() -> None:
    assert read_vllm_parameters(dict.fromkeys(NAMES)) == read_vllm_parameters({})


def test_what_the_answer_shows_is_apart_from_sampling() -> None:
    parameters = read_vllm_parameters(
        {"logprobs": 0, "prompt_logprobs": 2, "truncate_prompt_tokens": 9, "detokenize": False}
    )
    assert parameters.request.sampling == SamplingParameters(max_tokens=16, temperature=1.0)
    assert (parameters.logprobs, parameters.prompt_logprobs) == (0, 2)
    assert (parameters.request.truncate_prompt_tokens, parameters.detokenize) == (9, False)


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
