from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.request import GenerationRequest
from handlers.contract import ContractError, Exchange, Reply
from handlers.lmi.asynchronous import LmiAsyncContract
from tests.contracts.exchange import JSON, MODEL, call
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


def test_the_models_own_defaults_count_where_the_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99, "unknown": 1}
    sampling = request_of({}, defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 30)
    assert request_of({"temperature": 0.1}, defaults).sampling.temperature == 0.1
    assert request_of({"do_sample": False}, defaults).sampling.greedy


def test_parameters_without_effect_are_noted_and_refused_when_strict() -> None:
    document = {"inputs": "x", "parameters": {"num_beams": 2, "top_n_tokens": 3}, "adapters": "a"}
    assert parse(document).notes == (
        "parameters without effect: num_beams, top_n_tokens",
        "fields without effect: adapters",
    )
    assert refusal(document, strict_parameters=True).status == 424


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
