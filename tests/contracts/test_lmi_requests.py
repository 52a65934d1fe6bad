"""LMI's bodies and parameters, and the engine requests that result from them. Source: LMI schema v0.31."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidParameter
from engines.request import BeamSearch, SamplingParameters
from handlers.contract import Reply
from handlers.lmi.parameters import ParameterRules, read_parameters
from handlers.lmi.rolling_batch import LmiRollingContract
from tests.contracts.exchange import MODEL, attempt, call, parse, refusal, request_of


def sampling(settings: dict[str, Any] | None = None, **parameters: Any) -> SamplingParameters:
    return request_of({"inputs": "x", "parameters": parameters}, **(settings or {})).sampling


def test_the_defaults_are_thirty_greedy_tokens() -> None:
    request = request_of({"inputs": "Tell me"})
    assert request.prompt == "Tell me"
    assert request.sampling == SamplingParameters(max_tokens=30)
    assert request.sampling.greedy
    assert not any((request.stream, request.want_tokens, request.want_logprobs, request.want_prompt_tokens))


@pytest.mark.parametrize(
    ("name", "value", "field", "meaning"),
    [
        ("max_new_tokens", 5, "max_tokens", 5),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("seed", 7, "seed", 7),
        ("seed", "7", "seed", 7),
        ("stop_sequences", ["a", "b"], "stop", ("a", "b")),
        ("stop_sequences", "a", "stop", ("a",)),
        ("stop", ["a"], "stop", ("a",)),
        ("stop_token_ids", [1, 2], "stop_token_ids", (1, 2)),
        ("ignore_eos_token", True, "ignore_eos", True),
        ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("spaces_between_special_tokens", False, "spaces_between_special_tokens", False),
        ("min_tokens", 3, "min_tokens", 3),
        ("min_new_tokens", 3, "min_tokens", 3),
        ("bad_words", ["x"], "bad_words", ("x",)),
        ("logit_bias", {"5": -1}, "logit_bias", {5: -1.0}),
        ("allowed_token_ids", [5], "allowed_token_ids", (5,)),
        ("top_k", -1, "top_k", 0),
    ],
)
def test_parameters_are_translated(name: str, value: Any, field: str, meaning: Any) -> None:
    assert getattr(sampling(**{name: value}), field) == meaning


@pytest.mark.parametrize(
    ("parameters", "inferred", "temperature"),
    [
        ({}, True, 0.0),
        ({"do_sample": True}, True, 1.0),
        ({"do_sample": True}, False, 1.0),
        ({"do_sample": True, "temperature": 0.5}, False, 0.5),
        ({"do_sample": False, "temperature": 0.5}, True, 0.0),
        ({"temperature": 0.5}, True, 0.5),
        ({"temperature": 0.5}, False, 0.0),
        ({"top_p": 0.9}, True, 1.0),
        ({"top_p": 0.9}, False, 0.0),
        ({"top_k": 5}, True, 1.0),
        ({"temperature": 0.0}, True, 0.0),
        ({"repetition_penalty": 1.5}, True, 0.0),
    ],
)
def test_do_sample_decides_and_is_inferred_where_the_model_says_so(
    parameters: dict[str, Any], inferred: bool, temperature: float
) -> None:
    assert sampling({"do_sample_inferred": inferred}, **parameters).temperature == temperature


def test_the_same_parameters_are_read_once_and_mean_the_same() -> None:
    contract = LmiRollingContract(MODEL)
    documents = [{"inputs": "x", "parameters": {"max_new_tokens": n, "stop": ["a"]}} for n in (3, 4, 3)]
    limits = [contract.parse(call(document)).requests[0].sampling.max_tokens for document in documents]
    assert limits == [3, 4, 3]


def test_null_parameters_are_absent() -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "seed", "stop_sequences", "n", "truncate", "details", "do_sample"))
    assert sampling(**nothing) == SamplingParameters(max_tokens=30)


@pytest.mark.parametrize(
    ("parameters", "sequences", "candidates"),
    [
        ({"n": 2}, 2, 2),
        ({"best_of": 3}, 3, 3),
        ({"n": 2, "best_of": 3}, 2, 3),
        ({"n": 2, "best_of": 1}, 2, 2),
    ],
)
def test_n_and_best_of_say_how_many_sequences(parameters: dict[str, Any], sequences: int, candidates: int) -> None:
    request = request_of({"inputs": "x", "parameters": {"do_sample": True, **parameters}})
    assert (request.sequences, request.candidates) == (sequences, candidates)
    assert request.want_tokens
    assert request.want_logprobs


def test_a_stream_generates_one_sequence_since_it_shows_one() -> None:
    request = request_of({"inputs": "x", "stream": True, "parameters": {"do_sample": True, "n": 3}})
    assert (request.sequences, request.candidates) == (1, 1)


def test_num_beams_asks_for_beam_search() -> None:
    parameters = {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True}
    request = request_of({"inputs": "x", "parameters": parameters})
    assert request.beam_search == BeamSearch(width=4, length_penalty=0.5, early_stopping=True)


def test_log_probs_are_asked_for_only_where_the_answer_shows_them() -> None:
    plain = request_of({"inputs": "x", "parameters": {"logprobs": 3, "decoder_input_details": True, "top_n_tokens": 2}})
    assert (plain.want_logprobs, plain.want_prompt_tokens, plain.top_tokens) == (False, False, 0)
    detailed = request_of({"inputs": "x", "parameters": {"details": True, "decoder_input_details": True}})
    assert (detailed.want_logprobs, detailed.want_prompt_tokens) == (True, True)


def test_truncate_and_typical_p_are_for_the_engine() -> None:
    assert request_of({"inputs": "x", "parameters": {"truncate": 5}}).truncate_prompt_tokens == 5
    assert sampling({"rolling_batch": "lmi-dist"}, typical_p=0.5).typical_p == 0.5


TRTLLM = ParameterRules(trtllm=True)


def on_trtllm(**parameters: Any) -> SamplingParameters:
    return read_parameters(parameters, TRTLLM).request.sampling


def test_the_defaults_on_tensorrt_llm_are_thirty_greedy_tokens() -> None:
    assert on_trtllm() == SamplingParameters(max_tokens=30)


@pytest.mark.parametrize(
    ("parameters", "choice"),
    [
        ({"do_sample": True}, (1.0, 5, 0.85)),
        ({"temperature": 0.5}, (0.5, 5, 0.85)),
        ({"do_sample": True, "top_k": 0}, (1.0, 0, 0.85)),
        ({"do_sample": True, "top_p": 1.0}, (1.0, 5, 1.0)),
        ({"do_sample": True, "top_p": 0}, (1.0, 5, 1.0)),
        ({"do_sample": True, "temperature": 1.5, "top_k": 7, "top_p": 0.5}, (1.5, 7, 0.5)),
        ({"do_sample": True, "top_k": 0, "top_p": 0}, (0.0, 0, 1.0)),
        ({"top_k": 0, "top_p": 0.0, "temperature": 0.7}, (0.0, 0, 1.0)),
        ({"do_sample": False, "temperature": 0.5, "top_k": 3}, (0.0, 0, 1.0)),
    ],
)
def test_sampling_on_tensorrt_llm_has_its_own_defaults(
    parameters: dict[str, Any], choice: tuple[float, int, float]
) -> None:
    sampling = on_trtllm(**parameters)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == choice


@pytest.mark.parametrize(
    ("name", "value", "field", "meaning"),
    [
        ("min_length", 3, "min_tokens", 3),
        ("min_tokens", 3, "min_tokens", 3),
        ("bad_sequences", ["a", "b"], "bad_words", ("a", "b")),
        ("stop", ["a"], "stop", ("a",)),
        ("stop_sequences", ["a"], "stop", ("a",)),
        ("presence_penalty", 0.5, "presence_penalty", 0.5),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
        ("seed", 7, "seed", 7),
    ],
)
def test_tensorrt_llms_names_are_translated(name: str, value: Any, field: str, meaning: Any) -> None:
    assert getattr(on_trtllm(**{name: value}), field) == meaning


def test_length_penalty_on_tensorrt_llm_belongs_to_beam_search() -> None:
    parameters = read_parameters({"num_beams": 2, "length_penalty": 0.5}, TRTLLM)
    assert parameters.request.beam_search == BeamSearch(width=2, length_penalty=0.5)


def test_a_boolean_stop_has_no_effect_on_tensorrt_llm() -> None:
    parameters = read_parameters({"stop": True}, TRTLLM)
    assert (parameters.request.sampling.stop, parameters.ignored) == ((), ("stop",))


@pytest.mark.parametrize("name", ["min_length", "bad_sequences"])
def test_what_constrains_on_tensorrt_llm_alone_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_parameters({name: 1}, ParameterRules())
    assert refused.value.parameter == name
    assert read_parameters({name: None}, ParameterRules()).ignored == ()


def test_unknown_parameters_and_fields_are_ignored_and_noted() -> None:
    exchange = parse({"inputs": "x", "watermark": 1, "parameters": {"foo": 1, "typical_p": 0.5, "max_new_tokens": 2}})
    assert exchange.requests[0].sampling == SamplingParameters(max_tokens=2)
    assert exchange.notes == ("parameters without effect: foo, typical_p", "fields without effect: watermark")


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"seed": "9" * 5000}, "seed"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1001]}, "stop_sequences"),
    ],
)
def test_a_bad_parameter_is_refused_with_the_schemas_object_naming_it(parameters: dict[str, Any], field: str) -> None:
    reply = refusal({"inputs": "x", "parameters": parameters})
    assert (reply.status, reply.content_type) == (424, "application/json")
    document = json.loads(reply.body)
    assert document["generated_text"] == ""
    assert document["details"] == {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}
    assert document["error"].startswith(f"`{field}` ")
    assert document["code"] == 424


def test_a_body_that_is_no_utf_8_is_refused_with_error_and_code_alone() -> None:
    reply = refusal(b'{"inputs": "\xff"}')
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert list(json.loads(reply.body)) == ["error", "code"]


@pytest.mark.parametrize(
    ("content_type", "body", "prompt"),
    [
        ("text/plain", "Tell me 😀".encode(), "Tell me 😀"),
        ("text/plain; charset=utf-8", b"Tell me", "Tell me"),
        ("application/x-www-form-urlencoded", b"inputs=Tell+me", "Tell me"),
        ("application/x-www-form-urlencoded", b"data=Tell%20me", "Tell me"),
        ("application/x-www-form-urlencoded", b"anything=Tell+me&other=x", "Tell me"),
        ("application/x-www-form-urlencoded", b"parameters={}&stream=true&text=Tell+me", "Tell me"),
        ("application/x-www-form-urlencoded", b'{"inputs": "Tell me"}', "Tell me"),
        ("text/csv", b"\xef\xbb\xbfinputs\r\nTell me\r\n", "Tell me"),
        ("text/csv", b"Tell me\n", "Tell me"),
        ("text/csv", b'"Tell me, please"', "Tell me, please"),
        ("", b'{"inputs": "Tell me"}', "Tell me"),
        ("application/json; charset=utf-8", b'{"inputs": "Tell me"}', "Tell me"),
    ],
)
def test_text_and_forms_are_prompts(content_type: str, body: bytes, prompt: str) -> None:
    exchange = parse(body, content_type)
    assert [request.prompt for request in exchange.requests] == [prompt]


def test_empty_fields_and_columns_constrain_nothing() -> None:
    assert parse(
        b"inputs=hi&guided_regex=&min_tokens=0&guided_json=null&parameters={}", "application/x-www-form-urlencoded"
    ).requests
    assert parse(b"inputs,guided_regex\nhi,\n", "text/csv").requests


def test_the_newer_name_of_the_least_tokens_goes_first() -> None:
    assert sampling(min_tokens=2, min_new_tokens=10).min_tokens == 10


def test_what_is_wrong_with_a_form_is_named() -> None:
    body = refusal(b"adapters=a", "application/x-www-form-urlencoded").body
    assert body == b'{"error":"Input Parsing failed. The form has no field `inputs`.","code":424}'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("image/png", b"x"),
        ("text/plain", b"\xff"),
        *(("text/csv", body) for body in (b"", b"inputs", b"parameters", b'""', b"a,b", b"a\nb", b"a,inputs\nb")),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(content_type: str, body: bytes) -> None:
    assert refusal(body, content_type).status == 424


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "do_sample",
        "seed",
        "temperature",
        "repetition_penalty",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "max_new_tokens",
        "details",
        "stop_sequences",
        "return_full_text",
        "decoder_input_details",
        "truncate",
        "ignore_eos_token",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "best_of",
        "num_beams",
        "length_penalty",
        "early_stopping",
        "stop_token_ids",
        "logprobs",
        "top_n_tokens",
        "logit_bias",
        "output_formatter",
    ]
)


@given(
    st.fixed_dictionaries(
        {"inputs": st.text(min_size=1, max_size=5)},
        optional={"parameters": st.dictionaries(NAMES, JSON_VALUES, max_size=4), "stream": JSON_VALUES},
    )
)
def test_any_document_is_understood_or_refused_with_424(document: dict[str, Any]) -> None:
    outcome = attempt(json.dumps(document).encode())
    if isinstance(outcome, Reply):
        assert outcome.status == 424
        assert json.loads(outcome.body)["code"] == 424
    else:
        assert len(outcome.requests) == 1


@given(
    st.binary(max_size=60), st.sampled_from(["", "application/json", "text/plain", "application/x-www-form-urlencoded"])
)
def test_any_bytes_are_understood_or_refused_with_424(body: bytes, content_type: str) -> None:
    outcome = attempt(body, content_type)
    if isinstance(outcome, Reply):
        assert outcome.status == 424
        json.loads(outcome.body)
    else:
        assert all(isinstance(request.prompt, str) and request.prompt for request in outcome.requests)


def test_a_csv_with_many_columns_takes_no_memory_for_missing_cells() -> None:
    columns = ",".join(map(str, range(100_000)))
    assert refusal(f"inputs,{columns}\n".encode() + b"a\n" * 10_001, "text/csv").status == 424
