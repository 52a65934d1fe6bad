from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import EngineDead, GenerationFailed, InvalidParameter, Overloaded
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta
from handlers.contract import ContractError, Exchange, Reply
from handlers.lmi.asynchronous import LmiAsyncContract
from tests.contracts.exchange import MODEL, a_joke, call, whole
from tests.settings import configured


def parse(document: Any, defaults: dict[str, Any] | None = None, **settings: Any) -> Exchange:
    return LmiAsyncContract(configured(MODEL, **settings), model_defaults=defaults).parse(call(document))


def request_of(parameters: dict[str, Any], defaults: dict[str, Any] | None = None, **more: Any) -> GenerationRequest:
    return parse({"inputs": "Tell me", "parameters": parameters, **more}, defaults).requests[0]


def attempt(document: Any, **settings: Any) -> Exchange | Reply:
    try:
        return parse(document, **settings)
    except ContractError as error:
        return error.reply


def refusal(document: Any, **settings: Any) -> Reply:
    reply = attempt(document, **settings)
    assert isinstance(reply, Reply), "the call was not refused"
    return reply


def body(document: Any, *deltas: TokenDelta) -> bytes:
    exchange = parse(document)
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas)


JOKE = (Token(7, " a", -0.5), Token(9, " joke", -0.25))


def test_a_whole_answer_is_one_line() -> None:
    assert body({"inputs": "Tell me"}, whole(" a joke")) == b'{"generated_text": " a joke"}\n'


def test_the_full_text_begins_with_the_prompt() -> None:
    document = {"inputs": "Tell me", "parameters": {"return_full_text": True}}
    assert body(document, whole(" a joke")) == b'{"generated_text": "Tell me a joke"}\n'


def test_details_have_the_newer_schemas_fields() -> None:
    document = {"inputs": "Tell me", "parameters": {"details": True, "seed": 3}}
    assert body(document, whole(" a joke", *JOKE)) == (
        b'{"generated_text": " a joke", "details": {"finish_reason": "length", "generated_tokens": 2, "seed": 3, '
        b'"prefill": [], "tokens": [{"id": 7, "text": " a", "logprob": -0.5}, '
        b'{"id": 9, "text": " joke", "logprob": -0.25}]}}\n'
    )


def test_prompt_tokens_are_among_the_details_if_asked_for() -> None:
    document = {"inputs": "Tell me", "parameters": {"details": True, "decoder_input_details": True}}
    exchange = parse(document)
    assert exchange.requests[0].want_prompt_tokens
    delta = whole("", prompt_tokens=[Token(1, "Tell"), Token(2, " me", -1.5)])
    answer = json.loads(exchange.answer.feed(0, delta))
    assert answer["details"]["prefill"] == [
        {"id": 1, "text": "Tell", "logprob": None},
        {"id": 2, "text": " me", "logprob": -1.5},
    ]
    assert not request_of({"decoder_input_details": True}).want_prompt_tokens


def test_a_stream_is_a_line_for_each_token_and_two_empty_ones() -> None:
    assert body({"inputs": "Tell me", "stream": True}, *a_joke()) == (
        b'{"index": 0, "token": {"id": 7, "text": " a", "logprob": -0.5}, "generated_text": null, "details": null}\n'
        b'{"index": 0, "token": {"id": 9, "text": " joke", "logprob": -0.25}, "generated_text": " a joke", '
        b'"details": null}\n\n\n'
    )


def test_the_last_record_of_a_stream_has_the_details() -> None:
    document = {"inputs": "Tell me", "stream": True, "parameters": {"details": True, "return_full_text": True}}
    first, last = a_joke(FinishReason.EOS)
    last.prompt_token_count = 2
    exchange = parse(document)
    exchange.answer.feed(0, first)
    assert exchange.answer.feed(0, last) == (
        b'{"index": 0, "token": {"id": 9, "text": " joke", "logprob": -0.25}, "generated_text": "Tell me a joke", '
        b'"details": {"finish_reason": "eos_token", "seed": null, "generated_tokens": 2, "input_length": 2}}\n\n\n'
    )


def test_a_log_probability_that_is_no_number_is_null() -> None:
    stream = {"inputs": "Tell me", "stream": True}
    for logprob in (None, float("-inf")):
        assert b'"logprob": null' in body(stream, whole("x", Token(1, "x", logprob)))


@pytest.mark.parametrize(
    ("parameters", "field", "expected"),
    [
        ({}, "max_tokens", 30),
        ({"max_new_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 6}, "max_tokens", 6),
        ({"max_tokens": 6, "max_new_tokens": 5}, "max_tokens", 6),
        ({"max_tokens": None, "max_new_tokens": 5}, "max_tokens", 5),
        ({"ignore_eos": False, "ignore_eos_token": True}, "ignore_eos", False),
        ({}, "temperature", 1.0),
        ({"do_sample": False}, "temperature", 0.0),
        ({"do_sample": False, "temperature": 0.7}, "temperature", 0.0),
        ({"do_sample": True}, "temperature", 1.0),
        ({"temperature": 0.7}, "temperature", 0.7),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"ignore_eos_token": True}, "ignore_eos", True),
        ({"stop": ["a"]}, "stop", ("a",)),
        ({"stop_sequences": ["b"], "stop": "a"}, "stop", ("b", "a")),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"seed": 5}, "seed", 5),
        ({"temperature": None}, "temperature", 1.0),
    ],
)
def test_parameters_are_translated_as_lmi_does(parameters: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(request_of(parameters).sampling, field) == expected


def test_the_models_own_defaults_count_where_the_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99, "unknown": 1}
    sampling = request_of({}, defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 30)
    assert request_of({"temperature": 0.1}, defaults).sampling.temperature == 0.1
    assert request_of({"do_sample": False}, defaults).sampling.greedy


def test_truncation_and_streaming_reach_the_engine() -> None:
    request = request_of({"truncate": 8}, stream=True)
    assert (request.truncate_prompt_tokens, request.stream, request.want_tokens) == (8, True, True)
    assert request_of({"stream": True}).stream


def test_parameters_without_effect_are_noted_and_refused_when_strict() -> None:
    document = {"inputs": "x", "parameters": {"num_beams": 2, "top_n_tokens": 3}, "adapters": "a"}
    assert parse(document).notes == (
        "parameters without effect: num_beams, top_n_tokens",
        "fields without effect: adapters",
    )
    assert refusal(document, strict_parameters=True).status == 424


def test_an_array_of_one_prompt_is_that_prompt() -> None:
    assert parse({"inputs": ["Tell me"]}).requests[0].prompt == "Tell me"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"{", "Input Parsing failed. The body is not valid JSON: Input data was truncated."),
        (
            [],
            "Input Parsing failed. The body must be a JSON object with `inputs`, `messages` or `prompt`, got an array.",
        ),
        ({}, "Input Parsing failed. The body has none of `inputs`, `messages` and `prompt`."),
        ({"inputs": ["a", "b"]}, "Input Parsing failed. `inputs` must be one prompt: a string, or an array of one."),
        ({"inputs": ""}, "Input Parsing failed. `inputs` must not be empty."),
        ({"inputs": "a", "parameters": 1}, "Input Parsing failed. `parameters` must be an object, got a number."),
        ({"inputs": "a", "stream": "yes"}, "Input Parsing failed. `stream` must be true or false, got a string."),
        (
            {"inputs": "a", "parameters": {"max_new_tokens": 0}},
            "Input Parsing failed. `max_new_tokens` must be at least 1, got 0.",
        ),
        (
            {"inputs": "a", "parameters": {"temperature": "hot"}},
            'Input Parsing failed. `temperature` must be a number, got "hot".',
        ),
    ],
)
def test_what_cannot_be_understood_is_424_with_the_reason(document: Any, message: str) -> None:
    reply = refusal(document)
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert json.loads(reply.body) == {"error": message, "code": 424}


def test_errors_before_the_first_token_have_a_status() -> None:
    answer = parse({"inputs": "a"}).answer
    assert answer.fail(InvalidParameter("max_new_tokens", "is too large")) == Reply(
        424, "application/json", b'{"error":"`max_new_tokens` is too large","code":424}'
    )
    assert answer.fail(GenerationFailed("no token")).body == b'{"error":"no token","code":500}'
    assert answer.fail(EngineDead()).status == 500
    assert answer.fail(Overloaded("full")).body == (
        b'{\n  "code": 503,\n  "type": "WlmCapacityException",\n  "message": "full"\n}\n'
    )


def test_an_error_midway_is_vllms_error_object() -> None:
    answer = parse({"inputs": "a", "stream": True}).answer
    assert answer.fail_midway(GenerationFailed("no token")) == (
        b'{"error":{"message":"no token","type":"InternalServerError","param":null,"code":500}}\n\n'
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["max_new_tokens", "do_sample", "stop_sequences", "stop", "seed", "truncate", "details", "n"])


@given(
    st.fixed_dictionaries(
        {}, optional={"inputs": JSON, "parameters": st.dictionaries(NAMES, JSON) | JSON, "stream": JSON}
    )
)
def test_any_document_is_understood_or_refused_with_a_valid_body(document: dict[str, Any]) -> None:
    check(attempt(json.dumps(document).encode()))


@given(st.binary())
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    check(attempt(data))


def check(outcome: Exchange | Reply) -> None:
    if isinstance(outcome, Reply):
        assert json.loads(outcome.body)["code"] == outcome.status == 424
    else:
        assert outcome.requests[0].prompt
