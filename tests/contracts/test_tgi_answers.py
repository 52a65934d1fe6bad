"""The exact bytes of TGI's answers."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import DEADLINE, FinishReason, Token, TokenDelta
from tests.contracts.exchange import whole
from tests.contracts.tgi_exchange import parse

PROMPT = {"inputs": "Tell me"}
A, JOKE = Token(7, " a", -0.4000000059604645), Token(9, " joke", -0.25)
TOKENS = (
    b'[{"id":7,"text":" a","logprob":-0.4,"special":false},{"id":9,"text":" joke","logprob":-0.25,"special":false}]'
)


def answer(path: str, parameters: dict[str, Any], *deltas: TokenDelta, **fields: Any) -> bytes:
    exchange = parse(path, PROMPT | {"parameters": parameters} | fields)
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas)


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


def test_best_of_shows_a_sequence_with_tokens_if_others_have_none_at_the_deadline() -> None:
    exchange = parse("/generate", PROMPT | {"parameters": {"best_of": 2, "do_sample": True}})
    begun = whole(" a joke", A, JOKE, cumulative_logprob=-2.0, prompt_token_count=5, stop_reason=DEADLINE)
    assert exchange.answer.feed(0, begun) == b""
    assert exchange.answer.feed(1, whole("", stop_reason=DEADLINE)) == b'{"generated_text":" a joke"}'
    assert dict(exchange.answer.headers)["x-prompt-tokens"] == "5"


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


def number(logprob: float | None) -> str:
    """Return the text of a log probability in an answer."""
    body = answer("/generate", {"details": True}, whole(" a", Token(7, " a", logprob))).decode()
    return body.partition('"logprob":')[2].partition(",")[0]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_number_of_single_precision_is_read_back_as_it_was(value: float) -> None:
    assert struct.pack("<f", json.loads(number(value))) == struct.pack("<f", value)
