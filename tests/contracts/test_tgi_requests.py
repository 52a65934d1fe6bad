"""TGI's bodies and parameters: the engine requests that result, and the refusal of wrong ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import (
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
)
from engines.request import Constraint, SamplingParameters
from handlers.contract import Exchange
from handlers.route_declarations import GenerationRoute
from handlers.tgi.request import RequestParameters
from handlers.tgi.routes import TGI
from tests.contracts.exchange import call as posted
from tests.contracts.tgi_exchange import attempt, contract, parse, requests_of

ROUTES = ("/", "/generate", "/generate_stream")


def sampling(parameters: dict[str, Any] | None, **model: Any) -> SamplingParameters:
    return requests_of(parameters, **model).sampling


def test_given_parameters_decode_greedily_to_the_end_of_the_context() -> None:
    request = requests_of({})
    assert request.prompt == "Tell me"
    assert request.sampling == SamplingParameters(include_stop_str_in_output=True)
    assert not any((request.stream, request.want_tokens, request.want_logprobs, request.want_prompt_tokens))


def test_missing_parameters_sample() -> None:
    assert sampling(None) == SamplingParameters(temperature=1.0, include_stop_str_in_output=True)
    assert requests_of(None, "/generate_stream").stream


@pytest.mark.parametrize(
    ("name", "value", "field", "meaning"),
    [
        ("max_new_tokens", 5, "max_tokens", 5),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("frequency_penalty", -2, "frequency_penalty", -2.0),
        ("seed", 7, "seed", 7),
        ("seed", 2**64 - 1, "seed", -1),
        ("stop", ["a", "b"], "stop", ("a", "b")),
    ],
)
def test_parameters_are_translated(name: str, value: Any, field: str, meaning: Any) -> None:
    assert getattr(sampling({name: value}), field) == meaning


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("top_k", 5), ("top_p", 0.9), ("typical_p", 0.9)])
def test_parameters_of_sampling_switch_it_on_unless_the_model_says_that_do_sample_alone_does(
    name: str, value: float
) -> None:
    for given_parameters in ({name: value}, {name: value, "do_sample": False}, {name: value, "do_sample": True}):
        samples = sampling(given_parameters)
        assert not samples.greedy
        assert getattr(samples, name) == value
    assert sampling({name: value}, do_sample_inferred=False) == sampling({})
    assert not sampling({name: value, "do_sample": True}, do_sample_inferred=False).greedy


def test_a_temperature_of_one_alone_does_not_sample() -> None:
    assert sampling({"temperature": 1.0}).greedy


def test_null_is_absent_as_the_python_client_sends_it() -> None:
    assert sampling(dict.fromkeys(RequestParameters.__struct_fields__)) == sampling({})


def test_log_probabilities_are_computed_only_where_they_are_shown() -> None:
    assert requests_of({"details": True}).want_logprobs
    assert requests_of({"details": True, "top_n_tokens": 3}).top_tokens == 3
    assert requests_of({"top_n_tokens": 3}).top_tokens == 0
    stream = requests_of({"top_n_tokens": 3}, "/generate_stream")
    assert (stream.stream, stream.want_tokens, stream.want_logprobs, stream.top_tokens) == (True, True, True, 3)
    assert requests_of({"decoder_input_details": True}).want_prompt_tokens


def test_a_seed_is_drawn_where_it_will_be_shown() -> None:
    drawn = {sampling({"do_sample": True, "details": True}).seed for _ in range(3)}
    assert len(drawn) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn)
    assert sampling({"do_sample": True}).seed is None
    assert sampling({"details": True}).seed is None


def test_best_of_is_as_many_requests_with_a_seed_each() -> None:
    requests = parse("/", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True, "details": True}}).requests
    assert [request.request_id for request in requests] == ["r-0", "r-1"]
    assert len({request.sampling.seed for request in requests}) == 2
    assert all(request.want_logprobs for request in requests)


@pytest.mark.parametrize(("asked", "room"), [(None, 1), (20, 20), (1024, 1024), (100_000, 1024)])
def test_the_context_must_have_room_for_the_new_tokens_up_to_1024(asked: int | None, room: int) -> None:
    request = requests_of({"max_new_tokens": asked})
    assert (request.room, request.sampling.max_tokens) == (room, asked)


SCHEMA = {"properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("grammar", "constraint"),
    [
        ({"type": "regex", "value": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"type": "json", "value": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json_object", "value": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json", "value": json.dumps(SCHEMA, separators=(",", ":"))}, {"json_schema": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    ],
)
def test_a_grammar_is_a_constraint(grammar: dict[str, Any], constraint: dict[str, Any]) -> None:
    if "json_schema" in constraint:
        constraint = {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))}
    expected = Constraint(parameter="grammar", any_whitespace=False, **constraint)
    if expected.regex is not None:
        expected = Constraint(parameter="grammar", **constraint)
    assert sampling({"grammar": grammar}).constraint == expected


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(NotReady("loading"), 503, "healthcheck"), (NotServed("no text here"), 404, "not_found")],
)
def test_errors_of_the_server_have_tgis_status_and_kind(error: RequestError, status: int, kind: str) -> None:
    reply = TGI.refuse(error)
    assert (reply.status, json.loads(reply.body)["error_type"]) == (status, kind)


def test_unknown_fields_have_no_effect_but_a_note() -> None:
    document = {"inputs": "x", "parameters": {"n": 2}, "model": "tgi"}
    assert parse("/generate", document).notes == ("fields without effect: n, model",)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
_NUMBERS = st.integers(-3, 10) | st.floats(-3, 3) | st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**30])
PARAMETER_VALUES = st.dictionaries(
    st.sampled_from(RequestParameters.__struct_fields__), JSON_VALUES | _NUMBERS | st.just(SCHEMA), max_size=5
)
BODIES = st.binary(max_size=40) | st.one_of(
    JSON_VALUES,
    st.fixed_dictionaries({"inputs": st.text()}, optional={"parameters": PARAMETER_VALUES, "stream": st.booleans()}),
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=400)
@given(st.sampled_from(ROUTES), BODIES, st.sampled_from(["application/json", "", "text/plain"]))
def test_any_body_is_understood_or_refused_with_a_proper_error(path: str, body: bytes, content_type: str) -> None:
    outcome = attempt(path, body, content_type)
    if isinstance(outcome, Exchange):
        for request in outcome.requests:
            _check(request.sampling)
            assert 1 <= request.room <= 1024
        return
    if outcome.content_type == "text/event-stream":
        assert outcome.status == 200
        assert outcome.body.startswith(b"data:{")
        assert outcome.body.endswith(b"}\n\n")
        error = json.loads(outcome.body.removeprefix(b"data:"))
    elif outcome.content_type == "application/json":
        assert outcome.status == 422
        error = json.loads(outcome.body)
    else:
        assert outcome.status in (400, 415, 422)
        assert outcome.body
        return
    assert set(error) == {"error", "error_type"}


def _check(s: SamplingParameters) -> None:
    """Check the ranges that engines rely on."""
    assert s.max_tokens is None or s.max_tokens >= 1
    assert s.temperature >= 0.0
    assert s.top_k >= 0
    assert 0.0 < s.top_p <= 1.0
    assert 0.0 < s.typical_p <= 1.0
    assert s.repetition_penalty > 0.0
    assert -2.0 <= s.frequency_penalty <= 2.0
    assert s.seed is None or -(2**63) <= s.seed < 2**63
    assert all(s.stop)


def test_a_full_queue_is_refused_in_tgis_form_if_no_stream_was_asked_for() -> None:
    full = Overloaded("the queue is full")
    bodies: dict[str, Any] = {"/": {"inputs": "x"}, "/generate": {"inputs": "x"}, "/generate_stream": {"inputs": "x"}}
    for route in TGI.routes:
        if isinstance(route, GenerationRoute):
            answer = contract(route.path).parse(posted(bodies[route.path])).answer
            assert route.queued == (route.path not in ("/", "/generate_stream"))
            assert route.path == "/generate_stream" or answer.fail(full) == TGI.refuse(full)
