"""TGI's seeds, TGI's errors, and bodies of every kind. `requests/tgi.yaml` has the requests that bodies become."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.request import SamplingParameters
from handlers.contract import Exchange
from handlers.tgi.request import RequestParameters
from tests.contracts.exchange import JSON
from tests.contracts.tgi_exchange import attempt, parse, requests_of

ROUTES = ("/", "/generate", "/generate_stream")


def sampling(parameters: dict[str, Any] | None, **model: Any) -> SamplingParameters:
    return requests_of(parameters, **model).sampling


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


def test_all_candidates_have_the_adapter() -> None:
    parameters = {"adapter_id": "a", "best_of": 2, "do_sample": True}
    parsed = parse("/generate", {"inputs": "x", "parameters": parameters}, enable_lora=True)
    assert [request.adapter for request in parsed.requests] == ["a", "a"]


def test_unknown_fields_have_no_effect_but_a_note() -> None:
    document = {"inputs": "x", "parameters": {"n": 2}, "model": "tgi"}
    assert parse("/generate", document).notes == ("fields without effect: n, model",)


_NUMBERS = st.integers(-3, 10) | st.floats(-3, 3) | st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**30])
PARAMETER_VALUES = st.dictionaries(st.sampled_from(RequestParameters.__struct_fields__), JSON | _NUMBERS, max_size=5)
BODIES = st.binary(max_size=40) | st.one_of(
    JSON,
    st.fixed_dictionaries({"inputs": st.text()}, optional={"parameters": PARAMETER_VALUES, "stream": st.booleans()}),
).map(lambda value: json.dumps(value).encode())


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
