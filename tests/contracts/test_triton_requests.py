"""Bodies of generate requests: their meaning, and the refusals of wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UnknownAdapter
from engines.request import BeamSearch, Constraint, SamplingParameters
from handlers.contract import Exchange, Reply
from handlers.triton.errors import message_of
from tests.contracts.triton_exchange import PROMPT, attempt, parse, refused, request_of
from tests.stand_ins.request_headers import request_headers

GREEDY = SamplingParameters(max_tokens=16)


def test_the_specifications_example_is_a_greedy_prompt() -> None:
    body = b'{"id": "42", "text_input": "client input", "parameters": {"stream": false, "temperature": 0}}'
    request = request_of(body)
    assert (request.prompt, request.sampling, request.stream) == ("client input", GREEDY, False)
    assert not any((request.want_tokens, request.want_logprobs, request.want_ranks, request.want_prompt_tokens))


@pytest.mark.parametrize(
    "document",
    [
        {"text_input": "hello", "stream": True, "max_tokens": 8, "temperature": 0},
        {"text_input": "hello", "parameters": {"stream": True, "max_tokens": 8, "temperature": 0}},
        {"parameters": {"text_input": "hello", "stream": True, "max_tokens": "8", "temperature": "0"}},
        {"text_input": ["hello"], "stream": [True], "sampling_parameters": '{"max_tokens": 8, "temperature": 0.0}'},
        {"text_input": "hello", "stream": True, "n": 3, "sampling_parameters": '{"max_tokens": 8, "temperature": 0}'},
    ],
)
def test_the_same_request_in_its_forms(document: dict[str, Any]) -> None:
    request = request_of(document, "generate_stream")
    assert (request.prompt, request.stream, request.sequences) == ("hello", True, 1)
    assert request.sampling == SamplingParameters(max_tokens=8)


def test_vllms_defaults_are_sixteen_sampled_tokens() -> None:
    assert request_of(PROMPT).sampling == SamplingParameters(max_tokens=16, temperature=1.0)


def test_a_parameter_given_twice_is_taken_from_its_last_place() -> None:
    body = b'{"text_input": "x", "max_tokens": 5, "parameters": {"max_tokens": 6, "max_tokens": 7}}'
    assert request_of(body).sampling.max_tokens == 7


def test_a_list_of_stop_strings_comes_in_sampling_parameters() -> None:
    document = PROMPT | {"sampling_parameters": json.dumps({"stop": ["a", "b"], "temperature": 0})}
    assert request_of(document).sampling.stop == ("a", "b")
    assert request_of(PROMPT | {"stop": "a"}).sampling.stop == ("a",)


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_constraints_are_a_json_object_in_a_string(name: str) -> None:
    document = PROMPT | {"parameters": {name: json.dumps({"choice": ["yes", "no"]})}}
    assert request_of(document).sampling.constraint == Constraint(parameter=f"{name}.choice", choice=("yes", "no"))


def test_the_engine_is_asked_only_for_what_the_answer_shows() -> None:
    quiet = request_of(PROMPT | {"logprobs": 5, "prompt_logprobs": 1})
    assert not any((quiet.want_tokens, quiet.want_logprobs, quiet.want_ranks, quiet.top_tokens))
    assert quiet.tokens_apart  # A step whose text is held back is an event, too.
    cumulative = request_of(PROMPT | {"return_cumulative_logprob": True})
    assert (cumulative.want_logprobs, cumulative.want_ranks, cumulative.top_tokens) == (True, False, 0)
    shown = request_of(PROMPT | {"return_logprobs": True, "logprobs": 5})
    assert (shown.want_tokens, shown.want_logprobs, shown.want_ranks, shown.top_tokens) == (True, True, True, 5)
    nothing = request_of(PROMPT | {"return_logprobs": True})
    assert not any((nothing.want_logprobs, nothing.want_ranks))


def test_names_that_triton_keeps_for_itself_have_no_effect_and_are_noted() -> None:
    exchange = parse(PROMPT | {"priority": 1, "timeout": 5, "parameters": {"sequence_id": 7, "id": "x"}})
    assert exchange.notes == ("parameters without effect: id, priority, sequence_id, timeout",)


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize("names", [{"model": "model"}, {"model": "model", "version": "1"}])
def test_the_version_may_be_left_out(route: str, names: dict[str, str]) -> None:
    assert request_of(PROMPT, route, names=names).prompt == "hello"


TENSORRT_LLM = PROMPT | {"max_tokens": 20, "bad_words": "", "stop_words": ""}


def test_tensorrt_llms_request_is_greedy_without_a_sampling_parameter() -> None:
    assert request_of(TENSORRT_LLM).sampling == SamplingParameters(max_tokens=20)


@pytest.mark.parametrize(
    ("values", "temperature", "top_k", "top_p"),
    [
        ({"temperature": 0.5}, 0.5, 0, 1.0),
        ({"top_k": 5}, 1.0, 5, 1.0),
        ({"top_p": 0.5}, 1.0, 0, 0.5),
        ({"top_k": 0, "top_p": 0.5}, 1.0, 0, 0.5),
        ({"top_k": 5, "top_p": 0.0}, 1.0, 5, 1.0),
        ({"top_k": 0, "top_p": 0.0, "temperature": 0.7}, 0.0, 0, 1.0),
        ({"temperature": 0}, 0.0, 0, 1.0),
    ],
)
def test_tensorrt_llms_zeros_switch_sampling_off(
    values: dict[str, Any], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = request_of(TENSORRT_LLM | values).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (temperature, top_k, top_p)


@pytest.mark.parametrize(
    ("values", "field", "meaning"),
    [
        ({"stop_words": ["a", "", "b"]}, "stop", ("a", "b")),
        ({"stop_words": "a"}, "stop", ("a",)),
        ({"bad_words": ["a"]}, "bad_words", ("a",)),
        ({"end_id": 7, "pad_id": 0}, "stop_token_ids", (7,)),
        ({"end_id": 7}, "ignore_eos", True),
        ({"end_id": 2}, "stop_token_ids", ()),
        ({"end_id": 2}, "ignore_eos", False),
        ({"end_id": -1}, "ignore_eos", True),
        ({"end_id": -1}, "stop_token_ids", ()),
        ({"end_id": 7, "stop_token_ids": "[5, 6]"}, "stop_token_ids", (5, 6, 7)),
        ({"end_id": -1, "stop_token_ids": "[5]"}, "stop_token_ids", (5,)),
        ({"end_id": 2, "stop_token_ids": "[5]"}, "stop_token_ids", (5,)),
        ({"min_length": 3}, "min_tokens", 3),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"random_seed": 5}, "seed", 5),
        ({"repetition_penalty": 1.5, "length_penalty": 2.0}, "repetition_penalty", 1.5),
        ({"sampling_param_max_tokens": 4}, "max_tokens", 4),
        ({"sampling_param_temperature": 0.5}, "temperature", 0.5),
        ({"sampling_param_stop": ["a", "b"]}, "stop", ("a", "b")),
    ],
)
def test_tensorrt_llms_names_are_translated(values: dict[str, Any], field: str, meaning: Any) -> None:
    assert getattr(request_of(PROMPT | {"pad_id": 0} | values).sampling, field) == meaning


def test_beam_width_asks_for_beams_of_which_all_or_some_are_shown() -> None:
    document = PROMPT | {"beam_width": 4, "length_penalty": 0.5, "early_stopping": True}
    every = request_of(document)
    assert every.beam_search == BeamSearch(width=4, length_penalty=0.5, early_stopping=True)
    assert every.sequences == 4
    assert request_of(document | {"num_return_sequences": 2}).sequences == 2


def test_vllms_beams_keep_their_parameters_beside_names_of_tensorrt_llm() -> None:
    document = PROMPT | {"stop_words": "x", "use_beam_search": True, "n": 2, "length_penalty": 2.0}
    assert request_of(document).beam_search == BeamSearch(width=2, length_penalty=2.0)
    assert request_of(PROMPT | {"beam_width": 2, "best_of": 2}).beam_search == BeamSearch(width=2)


@pytest.mark.parametrize(("given", "added"), [({}, True), ({"sampling_param_add_special_tokens": False}, False)])
def test_special_tokens_may_be_left_out(given: dict[str, Any], added: bool) -> None:
    assert request_of(PROMPT | {"pad_id": 0} | given).add_special_tokens is added


def test_bad_words_in_sampling_parameters_are_vllms() -> None:
    request = request_of(PROMPT | {"sampling_parameters": '{"bad_words": ["x"]}'})
    assert (request.sampling.bad_words, request.sampling.temperature) == (("x",), 1.0)


def test_stream_has_two_names_which_may_come_together() -> None:
    assert request_of(PROMPT | {"stream": True, "parameters": {"streaming": True}}).stream


def test_num_return_sequences_alone_samples_so_many() -> None:
    request = request_of(PROMPT | {"num_return_sequences": 3, "temperature": 1.0})
    assert (request.sequences, request.candidates, request.beam_search) == (3, 3, None)


@pytest.mark.parametrize(
    ("kind", "guide", "constraint"),
    [
        ("json", None, Constraint(parameter="guided_decoding_guide", json_object=True)),
        ("json_schema", "{}", Constraint(parameter="guided_decoding_guide", json_schema="{}")),
        ("regex", "a+", Constraint(parameter="guided_decoding_guide", regex="a+")),
        ("ebnf_grammar", "root ::= x", Constraint(parameter="guided_decoding_guide", grammar="root ::= x")),
    ],
)
def test_guides_are_constraints(kind: str, guide: str | None, constraint: Constraint) -> None:
    document = PROMPT | {"guided_decoding_guide_type": kind}
    if guide is not None:
        document |= {"guided_decoding_guide": guide}
    assert request_of(document).sampling.constraint == constraint


def test_a_model_on_tensorrt_llm_answers_every_request_as_it_does() -> None:
    assert request_of(PROMPT, rolling_batch="trtllm").sampling == GREEDY


def test_an_input_given_twice_is_told_by_the_requests_id() -> None:
    reply = refused(b'{"id": "42", "stream": true, "text_input": "x", "stream": true}')
    assert reply.body == b'{"error":"[request id: 42] input \'stream\' already exists in request"}'


def test_a_text_that_names_an_input_is_no_second_input() -> None:
    assert request_of(b'{"text_input": "stream", "stop": "stream", "stream": false}').prompt == "stream"


def test_adapters_that_cannot_be_used_have_the_backends_words() -> None:
    assert refused(PROMPT | {"lora_name": "x"}).body == b'{"error":"LoRA feature is not enabled."}'
    message = message_of(UnknownAdapter("x", ["sheep", "doll"]))
    assert message == "LoRA x is not supported, we currently support ['doll', 'sheep']"


def test_booleans_may_be_one_and_zero() -> None:
    sampling = request_of(PROMPT | {"ignore_eos": 1, "skip_special_tokens": 0}).sampling
    assert (sampling.ignore_eos, sampling.skip_special_tokens) == (True, False)


def test_several_sequences_streamed_to_generate_are_refused_before_inference() -> None:
    assert refused(PROMPT | {"n": 2, "stream": True}).body == (
        b'{"error":"generate expects model to produce exactly 1 response, use generate stream for model that generates '
        b'various number of responses"}'
    )


@pytest.mark.parametrize(
    ("names", "status", "message"),
    [
        ({"model": "nope"}, 404, "Request for unknown model: 'nope' is not found"),
        ({"model": "nope", "version": "1"}, 404, "Request for unknown model: 'nope' is not found"),
        ({"model": "model", "version": "2"}, 404, "Request for unknown model: 'model' version 2 is not found"),
        ({"model": "model", "version": "0"}, 404, "Request for unknown model: 'model' version 0 is not found"),
        (
            {"model": "model", "version": "9" * 5000},
            400,
            "failed to get model version from specified version string",
        ),
    ],
)
def test_another_model_or_version_is_not_found(names: dict[str, str], status: int, message: str) -> None:
    reply = refused(PROMPT, "generate_stream", names=names)
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert json.loads(reply.body) == {"error": message}


def test_a_compressed_body_is_refused_and_identity_is_not() -> None:
    reply = refused(PROMPT, headers=request_headers(("Content-Encoding", "gzip")))
    assert reply.status == 400
    assert reply.body == (b'{"error":"Content-Encoding \'gzip\' is not supported; send the body as it is (identity)"}')
    assert request_of(PROMPT, headers=request_headers(("Content-Encoding", "identity"))).prompt == "hello"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
NAMES = st.text(max_size=5) | st.sampled_from(
    [
        *("text_input", "id", "parameters", "stream", "exclude_input_in_output", "sampling_parameters", "image", "n"),
        *(
            "return_logprobs",
            "logprobs",
            "max_tokens",
            "temperature",
            "stop",
            "seed",
            "structured_outputs",
            "lora_name",
        ),
        *("bad_words", "stop_words", "end_id", "beam_width", "num_return_sequences", "top_k", "top_p", "streaming"),
        *("length_penalty", "early_stopping", "guided_decoding_guide", "guided_decoding_guide_type", "triton_x"),
        *("sampling_param_max_tokens", "sampling_param_stop", "return_log_probs", "logit_bias", "best_of"),
    ]
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=5)


def check(outcome: Exchange | Reply) -> None:
    if isinstance(outcome, Reply):
        assert (outcome.status, outcome.content_type) == (400, "application/json")
        (message,) = json.loads(outcome.body).values()
        assert isinstance(message, str)
    else:
        assert isinstance(outcome.requests[0].prompt, str)


@given(DOCUMENTS, DOCUMENTS, st.sampled_from(["generate", "generate_stream"]))
def test_any_document_is_understood_or_refused_with_400(
    document: dict[str, Any], parameters: dict[str, Any], route: str
) -> None:
    check(attempt({"text_input": "x", **document}, route))
    check(attempt({"text_input": "x", "parameters": parameters} | document, route))


@given(DOCUMENTS)
def test_any_sampling_parameters_are_understood_or_refused_with_400(parameters: dict[str, Any]) -> None:
    check(attempt(PROMPT | {"sampling_parameters": json.dumps(parameters)}))
    check(attempt(PROMPT | {"stop_words": "", "sampling_parameters": json.dumps(parameters)}))


@given(st.binary(max_size=60))
def test_any_bytes_are_understood_or_refused_with_400(body: bytes) -> None:
    check(attempt(body))


def test_a_body_nested_without_end_is_refused() -> None:
    check(attempt(b'{"text_input":' * 5000))
    check(attempt(b'{"text_input":"x","x":' + b"[" * 5000 + b"]" * 5000 + b"}"))
