"""happy_vllm's keywords and the requests that they become. Source: happy_vllm, "Generating endpoints"."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import RequestError
from engines.request import Constraint, EngineMemo, GenerationRequest, SamplingParameters
from handlers.contract import Reply
from handlers.happy_vllm.request import read_generation
from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.parsing.parameter_memo import ParameterMemo
from tests.contracts.exchange import call
from tests.contracts.happy_vllm_exchange import contract

NAMES = (
    *("prompt", "prompt_in_response", "response_pool", "json_format", "json_format_is_json_schema", "n", "best_of"),
    *("temperature", "max_tokens", "min_tokens", "stop", "use_beam_search", "structured_outputs", "detokenize"),
)


def request_of(document: dict[str, Any], *, stream: bool = False) -> GenerationRequest:
    return contract(stream=stream).parse(call({"prompt": "p"} | document)).requests[0]


def constraint_of(document: dict[str, Any]) -> Constraint:
    constraint = request_of(document).sampling.constraint
    assert constraint is not None
    return constraint


def schema_of(document: dict[str, Any]) -> Any:
    return json.loads(constraint_of(document).json_schema or "")


def test_a_bare_prompt_has_vllms_defaults_and_wants_text_alone() -> None:
    assert request_of({}) == GenerationRequest(
        request_id="r",
        prompt="p",
        tokens_apart=True,
        sampling=SamplingParameters(max_tokens=16, temperature=1.0),
        memo=EngineMemo(),
    )


def test_the_route_decides_whether_it_is_streamed() -> None:
    assert request_of({}, stream=True).stream
    assert not request_of({}).stream


def test_the_body_is_read_as_json_whatever_its_content_type_says() -> None:
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert contract().parse(call({"prompt": "p"}, content_type)).requests[0].prompt == "p"


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert contract().parse(call(b'\xef\xbb\xbf{"prompt": "p"}')).requests[0].prompt == "p"


def test_null_is_absent_but_for_the_prompt() -> None:
    assert request_of({name: None for name in NAMES if name != "prompt"}) == request_of({})


def test_a_pool_is_a_choice_and_keeps_the_limit_of_16_tokens() -> None:
    sampling = request_of({"response_pool": ["Yes", "No", "Yes"]}).sampling
    assert sampling.constraint == Constraint(parameter="response_pool", choice=("Yes", "No"))
    assert sampling.max_tokens == 16


@pytest.mark.parametrize("document", [{"response_pool": []}, {"json_format": {}}, {"json_format_is_json_schema": True}])
def test_an_empty_pool_or_form_is_switched_off(document: dict[str, Any]) -> None:
    assert request_of(document).sampling.constraint is None


def test_a_pool_with_min_tokens_of_zero_is_no_conflict() -> None:
    assert constraint_of({"response_pool": ["a"], "min_tokens": 0}).choice == ("a",)


def test_a_pool_with_an_empty_form_is_no_conflict() -> None:
    assert constraint_of({"response_pool": ["a"], "json_format": {}}).choice == ("a",)
    assert constraint_of({"response_pool": ["a"], "guided_choice": ["a"]}).choice == ("a",)


def test_the_simple_form_requires_every_field_and_allows_no_other() -> None:
    form = {
        "name": "string",
        "age": "integer",
        "is_alive": "boolean",
        "height_in_meters": "number",
        "names_of_children": ["string"],
    }
    assert schema_of({"json_format": form}) == {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "is_alive": {"type": "boolean"},
            "height_in_meters": {"type": "number"},
            "names_of_children": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "is_alive", "height_in_meters", "names_of_children"],
        "additionalProperties": False,
    }


def test_a_form_is_written_on_one_line() -> None:
    constraint = constraint_of({"json_format": {"a": "string"}})
    assert (constraint.parameter, constraint.any_whitespace) == ("json_format", False)


def test_a_json_schema_is_taken_as_it_is() -> None:
    schema = {"type": "object", "properties": {"é": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"const": 1}}}
    assert schema_of({"json_format": schema, "json_format_is_json_schema": True}) == schema


@pytest.mark.parametrize("kind", ["str", "array", "object", "", 1, True, {}, {"a": "string"}, [], ["string"] * 2, [[]]])
def test_the_simple_form_has_its_four_types_and_arrays_of_one_of_them_only(kind: Any) -> None:
    with pytest.raises(RequestError) as caught:
        request_of({"json_format": {"field": kind}})
    assert HAPPY_VLLM.refuse(caught.value).status == 422
    assert json.loads(HAPPY_VLLM.refuse(caught.value).body)["detail"][0]["loc"] == ["body", "json_format", "field"]


def test_sampling_keywords_stand_beside_the_prompt() -> None:
    request = request_of({"n": 2, "best_of": 3, "max_tokens": 5, "truncate_prompt_tokens": 7})
    assert (request.sequences, request.candidates, request.truncate_prompt_tokens) == (2, 3, 7)
    assert request.sampling.max_tokens == 5


def test_a_beam_search_is_not_streamed_before_its_end() -> None:
    request = request_of({"use_beam_search": True, "n": 2}, stream=True)
    assert request.beam_search is not None
    assert not request.stream


def test_log_probabilities_are_accepted_and_not_computed() -> None:
    assert request_of({"logprobs": 5, "prompt_logprobs": 5}) == request_of({})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(document=JSON | st.dictionaries(st.sampled_from(NAMES) | st.text(), JSON), stream=st.booleans())
def test_any_json_is_understood_or_refused_with_a_detail(document: Any, stream: bool) -> None:
    refusal: Reply | None = None
    try:
        contract(stream=stream).parse(call(document))
    except RequestError as error:
        refusal = HAPPY_VLLM.refuse(error)
    if refusal is not None:
        assert refusal.status == 422
        assert json.loads(refusal.body)["detail"]


@settings(deadline=None)
@given(body=st.binary())
def test_any_bytes_are_understood_or_refused_with_a_detail(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        contract().parse(call(body))
    assert HAPPY_VLLM.refuse(caught.value).status == 422
    assert json.loads(HAPPY_VLLM.refuse(caught.value).body)["detail"]


@pytest.mark.parametrize(
    ("lax", "strict"),
    [
        ({"temperature": "0.5", "max_tokens": "16"}, {"temperature": 0.5, "max_tokens": 16}),
        ({"ignore_eos": "yes", "skip_special_tokens": "off"}, {"ignore_eos": True, "skip_special_tokens": False}),
        ({"use_beam_search": 1, "n": " 2 "}, {"use_beam_search": True, "n": 2}),
        (
            {"json_format": {"type": "object"}, "json_format_is_json_schema": "TRUE"},
            {"json_format": {"type": "object"}, "json_format_is_json_schema": True},
        ),
    ],
)
def test_types_are_taken_as_pydantic_takes_them(lax: dict[str, Any], strict: dict[str, Any]) -> None:
    assert request_of(lax) == request_of(strict)


@pytest.mark.parametrize(("value", "shown"), [(1, True), ("yes", True), ("t", True), (0, False), ("No", False)])
def test_the_prompt_in_the_response_may_be_asked_for_as_pydantic_allows(value: Any, shown: bool) -> None:
    assert read_generation({"prompt": "p", "prompt_in_response": value}, ParameterMemo()).prompt_in_response is shown


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_in_response", 2), ("prompt_in_response", "maybe"), ("max_tokens", "many"), ("temperature", "0x1")],
)
def test_what_pydantic_refuses_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        request_of({name: value})
    assert json.loads(HAPPY_VLLM.refuse(caught.value).body)["detail"][0]["loc"] == ["body", name]
