"""Golden bytes for TGI's answers."""

from __future__ import annotations

import json
import math
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import FinishReason, Token, TokenDelta
from handlers.contract import Reply
from handlers.tgi.errors import IncompleteGeneration, refuse
from tests.contracts.exchange import whole
from tests.contracts.tgi_exchange import END, TURN, parse

PROMPT = {"inputs": "Tell me"}
A, JOKE = Token(7, " a", -0.4000000059604645), Token(9, " joke", -0.25)
TOKENS = (
    b'[{"id":7,"text":" a","logprob":-0.4,"special":false},{"id":9,"text":" joke","logprob":-0.25,"special":false}]'
)


def answer(path: str, parameters: dict[str, Any], *deltas: TokenDelta, **fields: Any) -> bytes:
    exchange = parse(path, PROMPT | {"parameters": parameters} | fields)
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas)


def a_joke(finish_reason: FinishReason = FinishReason.LENGTH) -> tuple[TokenDelta, TokenDelta]:
    return (
        TokenDelta(" a", [A], token_count=1, prompt_token_count=5),
        TokenDelta(" joke", [JOKE], finish_reason=finish_reason, token_count=2, prompt_token_count=5, last=True),
    )


def test_generate_answers_with_an_object_that_has_the_text_alone() -> None:
    assert answer("/generate", {}, whole(" a joke", A, JOKE)) == b'{"generated_text":" a joke"}'


def test_the_root_answers_with_an_array_and_the_full_text() -> None:
    assert answer("/", {}, whole(" a joke", A, JOKE)) == b'[{"generated_text":"Tell me a joke"}]'
    without = answer("/", {"return_full_text": False}, whole(" a joke", A, JOKE))
    assert without == b'[{"generated_text":" a joke"}]'


def test_return_full_text_puts_the_prompt_in_front_on_generate_as_well() -> None:
    assert answer("/generate", {"return_full_text": True}, whole("!")) == b'{"generated_text":"Tell me!"}'


def test_details_have_prefill_and_tokens_and_a_seed_that_is_null_for_greedy_decoding() -> None:
    assert answer("/generate", {"details": True}, whole(" a joke", A, JOKE)) == (
        b'{"generated_text":" a joke","details":{"finish_reason":"length","generated_tokens":2,"seed":null,'
        b'"prefill":[],"tokens":' + TOKENS + b"}}"
    )


def test_decoder_input_details_implies_details_and_the_first_logprob_is_null() -> None:
    delta = whole(" a", A, prompt_tokens=[Token(4, "Tell"), Token(5, " me", -1.5)])
    assert answer("/generate", {"decoder_input_details": True}, delta) == (
        b'{"generated_text":" a","details":{"finish_reason":"length","generated_tokens":1,"seed":null,'
        b'"prefill":[{"id":4,"text":"Tell","logprob":null},{"id":5,"text":" me","logprob":-1.5}],'
        b'"tokens":[{"id":7,"text":" a","logprob":-0.4,"special":false}]}}'
    )


def test_top_tokens_follow_as_a_list_for_each_token() -> None:
    token = Token(7, " a", -0.5, top=(Token(7, " a", -0.5), Token(END, "</s>", -0.75, special=True)))
    body = answer("/generate", {"details": True, "top_n_tokens": 2}, whole(" a", token))
    assert body.endswith(
        b'"top_tokens":[[{"id":7,"text":" a","logprob":-0.5,"special":false},'
        b'{"id":2,"text":"</s>","logprob":-0.75,"special":true}]]}}'
    )


def test_a_special_token_shows_its_own_text_which_is_not_in_the_generated_text() -> None:
    end = Token(END, "", -0.125, special=True)
    body = answer("/generate", {"details": True}, whole(" a", A, end, finish_reason=FinishReason.EOS))
    assert body.startswith(b'{"generated_text":" a","details":{"finish_reason":"eos_token","generated_tokens":2,')
    assert body.endswith(b'{"id":2,"text":"</s>","logprob":-0.125,"special":true}]}}')


@pytest.mark.parametrize(
    ("reason", "name"),
    [(FinishReason.LENGTH, b"length"), (FinishReason.EOS, b"eos_token"), (FinishReason.STOP, b"stop_sequence")],
)
def test_finish_reasons_have_tgis_names(reason: FinishReason, name: bytes) -> None:
    for path in ("/generate", "/generate_stream"):
        assert b'"finish_reason":"' + name + b'"' in answer(
            path, {"details": True}, whole(" a", A, finish_reason=reason)
        )


def test_the_seed_is_shown_where_the_request_samples() -> None:
    given_seed = answer("/generate", {"details": True, "do_sample": True, "seed": 2**64 - 1}, whole(" a", A))
    assert b'"seed":18446744073709551615,' in given_seed
    assert b'"seed":null,' in answer("/generate", {"details": True, "seed": 5}, whole(" a", A))


def test_best_of_shows_the_sequence_of_the_highest_mean_logprob_and_lists_the_other() -> None:
    exchange = parse("/generate", PROMPT | {"parameters": {"best_of": 2, "do_sample": True, "details": True}})
    first, second = (request.sampling.seed for request in exchange.requests)
    worse = whole(" a joke", A, JOKE, cumulative_logprob=-2.0)  # -1 for each token
    better = whole("!", Token(3, "!", -0.5), cumulative_logprob=-0.5, finish_reason=FinishReason.EOS)
    assert exchange.answer.feed(0, worse) == b""
    assert exchange.answer.feed(1, better) == (
        b'{"generated_text":"!","details":{"finish_reason":"eos_token","generated_tokens":1,'
        b'"seed":%d,"prefill":[],"tokens":[{"id":3,"text":"!","logprob":-0.5,"special":false}],'
        b'"best_of_sequences":[{"generated_text":" a joke","finish_reason":"length","generated_tokens":2,'
        b'"seed":%d,"prefill":[],"tokens":%s}]}}' % (second, first, TOKENS)
    )


def test_best_of_without_details_is_the_best_text_alone() -> None:
    exchange = parse("/generate", PROMPT | {"parameters": {"best_of": 2, "temperature": 0.5}})
    exchange.answer.feed(1, whole(" b", A, cumulative_logprob=-0.4))
    assert exchange.answer.feed(0, whole(" a", A, cumulative_logprob=-3.0)) == b'{"generated_text":" b"}'


def test_a_stream_is_an_event_for_each_token_without_a_blank_after_the_colon() -> None:
    assert answer("/generate_stream", {"details": True}, *a_joke()) == (
        b'data:{"index":1,"token":{"id":7,"text":" a","logprob":-0.4,"special":false},'
        b'"generated_text":null,"details":null}\n\n'
        b'data:{"index":2,"token":{"id":9,"text":" joke","logprob":-0.25,"special":false},'
        b'"generated_text":" a joke","details":{"finish_reason":"length","generated_tokens":2,"seed":null,'
        b'"input_length":5}}\n\n'
    )


def test_a_stream_without_details_ends_with_the_text_alone() -> None:
    events = answer("/generate_stream", {}, *a_joke())
    assert events.endswith(b'"special":false},"generated_text":" a joke","details":null}\n\n')


def test_the_root_streams_the_full_text_where_the_body_says_so() -> None:
    events = answer("/", {}, *a_joke(), stream=True)
    assert events.count(b"data:{") == 2
    assert events.endswith(b'"generated_text":"Tell me a joke","details":null}\n\n')


def test_top_tokens_of_a_stream_follow_their_token() -> None:
    token = Token(7, " a", -0.5, top=(Token(7, " a", -0.5),))
    delta = TokenDelta(" a", [token], token_count=1)
    assert answer("/generate_stream", {"top_n_tokens": 1}, delta) == (
        b'data:{"index":1,"token":{"id":7,"text":" a","logprob":-0.5,"special":false},'
        b'"top_tokens":[{"id":7,"text":" a","logprob":-0.5,"special":false}],"generated_text":null,"details":null}\n\n'
    )


def test_a_delta_of_several_tokens_is_as_many_events_and_one_of_none_is_nothing() -> None:
    several = TokenDelta(" a joke", [A, JOKE], token_count=2)
    end = TokenDelta("", [Token(END, "", -1.0, special=True)], finish_reason=FinishReason.EOS, token_count=3, last=True)
    events = answer("/generate_stream", {}, several, TokenDelta("", []), end).split(b"\n\n")
    assert [json.loads(event.removeprefix(b"data:"))["index"] for event in events[:-1]] == [1, 2, 3]
    assert b'"text":"</s>","logprob":-1.0,"special":true},"generated_text":" a joke"' in events[2]


def test_an_answer_that_was_ended_from_outside_is_an_incomplete_one() -> None:
    ended = TokenDelta("", finish_reason=FinishReason.ABORT, token_count=1, last=True)
    begun = TokenDelta(" a", [A], token_count=1)
    with pytest.raises(IncompleteGeneration) as caught:
        answer("/generate", {}, begun, ended)
    assert refuse(caught.value) == Reply(
        500, "application/json", b'{"error":"Incomplete generation","error_type":"incomplete_generation"}'
    )
    assert answer("/generate_stream", {}, begun, ended).endswith(
        b'\n\ndata:{"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'
    )


def test_text_is_escaped_as_serde_does_it() -> None:
    text = '"\\\n\t\x01\x7f日本😀/'
    assert answer("/generate", {}, whole(text)) == ('{"generated_text":"\\"\\\\\\n\\t\\u0001\x7f日本😀/"}'.encode())


def test_the_headers_of_a_plain_reply_count_tokens_and_characters() -> None:
    exchange = parse("/generate", PROMPT)
    exchange.answer.feed(0, whole(" a joke", A, JOKE, prompt_token_count=5))
    headers = dict(exchange.answer.headers)
    assert list(headers) == [
        *("x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time"),
        *("x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens"),
    ]
    assert [headers[name] for name in ("x-compute-characters", "x-prompt-tokens", "x-generated-tokens")] == [
        "7",
        "5",
        "2",
    ]
    assert 0.0 <= float(headers["x-compute-time"]) < 60.0


def test_the_times_of_a_plain_reply_are_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    exchange = parse("/generate", PROMPT)
    delta = whole(" a joke", A, JOKE, prompt_token_count=5)
    delta.submitted_at, delta.queued_seconds = 101.0, 2.0
    now = 108.0
    exchange.answer.feed(0, delta)
    headers = dict(exchange.answer.headers)
    names = ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token")
    assert [headers[name] for name in names] == ["8000", "1000", "2000", "5000", "2500"]


def test_a_stream_that_is_idle_sends_an_empty_comment() -> None:
    assert parse("/generate_stream", PROMPT).comment == b":\n\n"
    assert parse("/", {**PROMPT, "stream": True}).comment == b":\n\n"
    assert parse("/generate", PROMPT).comment == b""


def test_the_headers_of_a_stream_keep_proxies_from_holding_it_back() -> None:
    assert parse("/generate_stream", PROMPT).answer.headers == (
        ("x-compute-type", "lmi-dist"),
        ("x-compute-characters", "7"),
        ("x-accel-buffering", "no"),
        ("cache-control", "no-cache"),
    )


def test_content_types_are_those_of_json_and_of_events() -> None:
    assert parse("/generate", PROMPT).answer.content_type == "application/json"
    assert parse("/", PROMPT | {"stream": True}).answer.content_type == "text/event-stream"


def number(logprob: float | None) -> str:
    """Return a log probability as an answer has it."""
    body = answer("/generate", {"details": True}, whole(" a", Token(7, " a", logprob))).decode()
    return body.partition('"logprob":')[2].partition(",")[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-0.4000000059604645, "-0.4"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (-12.0, "-12.0"),
        (-2.5839844, "-2.5839844"),
        (-1e-05, "-0.00001"),
        (-1.1920928955078125e-07, "-1.1920929e-7"),
        (None, "null"),
        (math.nan, "null"),
        (-math.inf, "null"),
        (1e39, "null"),
    ],
)
def test_numbers_are_written_with_as_few_digits_as_single_precision_needs(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_number_of_single_precision_is_read_back_as_it_was(value: float) -> None:
    assert struct.pack("<f", json.loads(number(value))) == struct.pack("<f", value)


def test_special_tokens_that_are_stop_texts_are_stop_tokens() -> None:
    request = parse("/generate", PROMPT | {"parameters": {"stop": ["<|turn|>", "x", "</s>"]}}).requests[0]
    assert request.sampling.stop == ("x",)
    assert request.sampling.stop_token_ids == (TURN,), "the end token ends the text anyway, as an end token"
