from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.request import GenerationRequest
from handlers.contract import Exchange, Reply
from handlers.lmi.asynchronous import LmiAsyncContract
from tests.contracts.exchange import JSON, MODEL, call, outcome, refusal_of
from tests.settings import configured


def contract(defaults: dict[str, Any] | None = None, **settings: Any) -> LmiAsyncContract:
    return LmiAsyncContract(configured(MODEL, **settings), model_defaults=defaults)


def request_of(parameters: dict[str, Any], defaults: dict[str, Any]) -> GenerationRequest:
    return contract(defaults).parse(call({"inputs": "Tell me", "parameters": parameters})).requests[0]


def test_the_models_own_defaults_count_where_the_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99, "unknown": 1}
    sampling = request_of({}, defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 30)
    assert request_of({"temperature": 0.1}, defaults).sampling.temperature == 0.1
    assert request_of({"do_sample": False}, defaults).sampling.greedy


def test_parameters_without_effect_are_noted_and_refused_when_strict() -> None:
    document = {"inputs": "x", "parameters": {"num_beams": 2, "top_n_tokens": 3}, "adapters": "a"}
    assert contract().parse(call(document)).notes == (
        "parameters without effect: num_beams, top_n_tokens",
        "fields without effect: adapters",
    )
    assert refusal_of(contract(strict_parameters=True), call(document)).status == 424


NAMES = st.sampled_from(["max_new_tokens", "do_sample", "stop_sequences", "stop", "seed", "truncate", "details", "n"])


@given(
    st.fixed_dictionaries(
        {}, optional={"inputs": JSON, "parameters": st.dictionaries(NAMES, JSON) | JSON, "stream": JSON}
    )
)
def test_any_document_is_understood_or_refused_with_a_valid_body(document: dict[str, Any]) -> None:
    check(outcome(contract(), call(json.dumps(document).encode())))


@given(st.binary())
def test_any_bytes_are_understood_or_refused(data: bytes) -> None:
    check(outcome(contract(), call(data)))


def check(found: Exchange | Reply) -> None:
    if isinstance(found, Reply):
        assert json.loads(found.body)["code"] == found.status == 424
    else:
        assert found.requests[0].prompt
