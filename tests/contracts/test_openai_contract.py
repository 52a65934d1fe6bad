"""The bodies that Slipway's own contract of OpenAI's routes understands, and its requests.

`cases/openai` has the bytes of its answers. tests/live/test_openai_ways_live.py shows that vLLM sends the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import Constraint, GenerationRequest, Token
from handlers.contract import Call, Exchange
from handlers.openai.answer import in_document, in_stream
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.contract import FrontEnd, OpenAIContract
from tests.contracts.openai_exchange import FRONT_END
from tests.stand_ins.request_headers import request_headers

HI = [{"role": "user", "content": "Hi"}]


def parsed(document: Any, path: str = COMPLETIONS, front_end: FrontEnd = FRONT_END, **how: Any) -> Exchange | None:
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    call = Call(body=body, content_type=how.pop("content_type", "application/json"), request_id="r")
    return OpenAIContract(front_end).parse(replace(call, headers=how.pop("headers", ())), path, **how)


def understood(document: Any, path: str = COMPLETIONS, front_end: FrontEnd = FRONT_END, **how: Any) -> Exchange:
    exchange = parsed(document, path, front_end, **how)
    assert exchange is not None, "it was left to vLLM"
    return exchange


def request_of(front_end: FrontEnd = FRONT_END, **fields: Any) -> GenerationRequest:
    return understood({"prompt": "Hi"} | fields, front_end=front_end).requests[0]


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"stream_options": {"include_usage": True}}])
def test_fields_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    assert request_of(**fields) == request_of()


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"use_beam_search": True},
        {"suffix": "x"},
        {"unknown": None},
        {"request_id": "x"},
        {"n": "2"},
        {"n": 2.0},
        {"n": True},
        {"n": 9, "temperature": 1},
        {"n": 2, "temperature": 0},
        {"temperature": "0"},
        {"max_tokens": 101},
        {"max_tokens": 0},
        {"seed": 2**63},
        {"stop": ["a", "b", "c"]},
        {"stop": ["x" * 1001]},
        {"logprobs": -1},
        {"ignore_eos": None},
        {"ignore_eos": 1},
        {"logit_bias": {" 1": 1}},
        {"logit_bias": {"x": 1}},
        {"stream": True, "stream_options": {"more": True}},
        {"model": "other"},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", ""]},
        {"prompt": ["a", 1]},
        {"prompt": [[1], []]},
        {"prompt": [-1]},
        {"prompt": ["a"] * 4},
        {"prompt": None},
        {"response_format": {"type": "grammar", "value": "x"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}, "min_tokens": 1},
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        {"structured_outputs": {"json": "{}"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json": 1}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"structural_tag": "{}"}},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_vllm(fields: dict[str, Any]) -> None:
    assert parsed({"prompt": "Hi"} | fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"chat_template": "x"},
        {"top_logprobs": 1},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        {"messages": [{"role": "user", "content": "x", "more": 1}]},
    ],
    ids=str,
)
def test_chats_that_are_not_plain_text_are_left_to_vllm(fields: dict[str, Any]) -> None:
    assert parsed({"messages": HI} | fields, CHAT) is None


def test_so_are_other_content_types_routes_and_headers_that_steer() -> None:
    document = {"prompt": "Hi"}
    assert parsed(document) is not None
    assert parsed(document, content_type="APPLICATION/JSON; charset=utf-8") is not None
    assert parsed(document, content_type="text/plain") is None
    assert parsed(document, "/v1/responses") is None
    assert parsed(document, headers=request_headers(("X-Vllm-Priority", "1"))) is None
    assert parsed(b'{"prompt": "\\ud800"}') is None
    assert parsed(b'{"prompt": "x", "temperature": NaN}') is None
    assert parsed(b"[" * 100_000) is None


def test_chats_of_a_model_whose_answers_are_parsed_are_left_to_vllm() -> None:
    assert parsed({"messages": HI}, CHAT, replace(FRONT_END, render=None)) is None


def test_a_template_that_refuses_is_left_to_vllm_to_report() -> None:
    def render(_: Any) -> str:
        raise ZeroDivisionError

    assert parsed({"messages": HI}, CHAT, replace(FRONT_END, render=render)) is None


def test_a_body_becomes_a_request() -> None:
    request = request_of()
    assert (request.request_id, request.prompt, request.sequences, request.stream) == ("cmpl-r-0", "Hi", 1, False)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_k) == (16, 1.0, 0)
    assert (request.want_tokens, request.want_logprobs) == (False, False)
    request = request_of(logprobs=2, n=3, stop="x", logit_bias={"5": 300}, min_tokens=4, stream=True)
    assert (request.top_tokens, request.want_logprobs, request.candidates, request.room) == (2, True, 3, 4)
    assert (request.sampling.stop, request.sampling.logit_bias) == (("x",), {5: 100.0})


def test_the_models_own_defaults_hold_where_the_body_is_silent() -> None:
    defaults = {"temperature": 0.5, "top_k": 7, "max_tokens": 20, "stop_token_ids": [3]}
    front_end = replace(FRONT_END, default_sampling=defaults, most_new_tokens=18)
    sampling = request_of(front_end, temperature=None, top_k=2, stop_token_ids=[4, 3], max_tokens=None).sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop_token_ids) == (0.5, 2, (4, 3))
    assert sampling.max_tokens == 16
    chat = understood({"messages": HI}, CHAT, front_end).requests[0]
    assert (chat.sampling.max_tokens, chat.prompt, chat.add_special_tokens) == (18, "<user>Hi", False)
    limited = understood({"messages": HI, "max_tokens": 3, "max_completion_tokens": 5}, CHAT, front_end).requests[0]
    assert limited.sampling.max_tokens == 5


def test_prompts_may_be_several_and_token_ids() -> None:
    several = understood({"prompt": ["a", "b"]})
    assert [(request.request_id, request.prompt) for request in several.requests] == [
        ("cmpl-r-0", "a"),
        ("cmpl-r-1", "b"),
    ]
    assert request_of(prompt=[1, 2]).prompt == (1, 2)
    assert [request.prompt for request in understood({"prompt": [[1], [2, 3]]}).requests] == [(1,), (2, 3)]


def test_names_select_the_model_or_an_adapter() -> None:
    assert [request_of(model=name).adapter for name in ("m", "tgi", "", None, "a")] == [None, None, None, None, "a"]
    assert understood({"prompt": "x", "model": "other"}, any_model=True).requests[0].adapter is None
    assert understood({"prompt": "x", "model": "m"}, adapter="a").requests[0].adapter == "a"
    assert understood({"prompt": "x", "model": "a"}, adapter="").requests[0].adapter is None


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"json_schema": '{"type":"object"}', "strict": False},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
            {"json_schema": "{}", "strict": True},
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, {"json_schema": '{"a":1}'}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"regex": "x", "choice": None}}, {"regex": "x"}),
        ({"structured_outputs": {"grammar": "g"}, "response_format": {"type": "text"}}, {"grammar": "g"}),
    ],
)
def test_constraints_are_handed_on_as_they_are(fields: dict[str, Any], constraint: dict[str, Any] | None) -> None:
    expected = None if constraint is None else Constraint(parameter="structured_outputs", as_is=True, **constraint)
    assert request_of(**fields).sampling.constraint == expected


@given(value=st.floats(-1e4, 0, width=32))
def test_log_probabilities_are_read_back_as_they_were(value: float) -> None:
    token = Token(1, "", value)
    assert msgspec.json.decode(in_stream(token)) == msgspec.json.decode(in_document(token)) == max(value, -9999.0)
