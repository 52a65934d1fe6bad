"""The bodies that Slipway's own contract for OpenAI's routes understands, and the requests that they become.

`cases/openai` has the bytes of its answers. tests/live/test_openai_ways_live.py shows that vLLM sends the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engines.request import GenerationRequest, Token
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


def test_names_select_the_model_or_an_adapter() -> None:
    assert [request_of(model=name).adapter for name in ("m", "tgi", "", None, "a")] == [None, None, None, None, "a"]
    assert understood({"prompt": "x", "model": "other"}, any_model=True).requests[0].adapter is None
    assert understood({"prompt": "x", "model": "m"}, adapter="a").requests[0].adapter == "a"
    assert understood({"prompt": "x", "model": "a"}, adapter="").requests[0].adapter is None


@given(value=st.floats(-1e4, 0, width=32))
def test_log_probabilities_are_read_back_as_they_were(value: float) -> None:
    token = Token(1, "", value)
    assert msgspec.json.decode(in_stream(token)) == msgspec.json.decode(in_document(token)) == max(value, -9999.0)
