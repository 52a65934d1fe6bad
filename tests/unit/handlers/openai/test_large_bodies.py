"""Large bodies whose cost for vLLM's front end does not depend on the model's context."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engines.errors import InvalidRequest
from handlers.contract import Call
from handlers.openai.current_call import OpenAICall
from handlers.openai.vllm_body import for_vllm
from handlers.parsing.json_limits import JsonDecoder
from handlers.queue import EngineQueue
from tests.python_calls import python_calls
from tests.stand_ins.scripted_engine import ScriptedEngine


def translated(path: str, body: dict[str, Any]) -> Call:
    given = Call(body=json.dumps(body).encode(), content_type="application/json", request_id="r", path=path)
    return for_vllm(given, path, OpenAICall(EngineQueue(ScriptedEngine(), 1000)))


LONG = "a" * (2 << 20)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (5 << 20)}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": ["text"] * 3000}, "`input` .*3000 .*1000 "),
        ("/v1/rerank", {"query": "a", "documents": ["text"] * 3000}, "`documents` .*3000 "),
        ("/v1/embeddings", {"input": [[1]] * 5000}, "`input` .*5000 "),
        ("/tokenize", {"prompt": LONG}, "`prompt` .*1048576 bytes"),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 1}, "`truncation_side`"),
        ("/v1/embeddings", {"input": ["a", LONG], "truncate_prompt_tokens": 1}, "`truncation_side`"),
        (
            "/v1/chat/completions",
            {"messages": [{"content": LONG}], "truncate_prompt_tokens": 1},
            "`truncation_side`",
        ),
        ("/v1/rerank", {"documents": {"content": [{"text": "a" * 20}] * 1500}}, "`documents` .*1500 "),
        ("/tokenize", {"messages": [{"content": LONG}]}, "`messages` .*1048576 bytes"),
        ("/tokenize", {"messages": [{"content": [{"text": "é" * 600_000}]}]}, " 1200"),
        ("/rendered_chat", {"messages": [], "tools": [{"function": {"description": LONG}}]}, " 1048576 bytes"),
        ("/tokenize", {"messages": [], "tools": [{"image_url": LONG}]}, " 1048576 bytes"),
        ("/tokenize", {"messages": [{"content": "", "image_url": LONG}]}, " 1048576 bytes"),
        ("/tokenize", {"messages": [], "chat_template_kwargs": {LONG: 1}}, " 1048576 bytes"),
        ("/v1/chat/completions", {"messages": [{}] * 20_001}, " 40[0-9]{3} .*40000"),
        ("/tokenize", {"messages": [{}] * 20_001}, "40000"),
        ("/pooling", {"messages": [{}] * 20_001}, "40000"),
        ("/v1/responses", {"input": [{}] * 5_000}, "8000"),
        ("/v1/completions", {"prompt": "a", "logit_bias": [[]] * 250_000}, "2500000"),
    ],
)
def test_they_are_refused(path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        translated(path, body)


@pytest.mark.parametrize("path", ["/tokenize", "/pooling"])
@pytest.mark.parametrize("split", [False, True])
def test_values_beside_messages_are_counted_if_a_letter_of_the_name_is_escaped(path: str, split: bool) -> None:
    body = json.dumps({"messages": [{}] * 20_001}).encode().replace(b"messages", rb"\u006dessages")
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if split else None
    given = Call(body=body, content_type="application/json", request_id="r", path=path, fields=fields)
    with pytest.raises(InvalidRequest, match="40000"):
        for_vllm(given, path, OpenAICall(EngineQueue(ScriptedEngine(), 1000)))


def test_a_long_body_is_checked_once() -> None:
    text = json.dumps({"model": "m", "prompt": [1] * 2_000_000}).encode()
    given = Call(body=text, content_type="application/json", request_id="r", path="/v1/completions")
    call = OpenAICall(EngineQueue(ScriptedEngine(), 1000))
    once = python_calls(lambda: JsonDecoder(dict[str, msgspec.Raw]).decode(text))
    assert python_calls(lambda: for_vllm(given, "/v1/completions", call)) < 2 * once


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 20_000, "vllm_xargs": {"a": 1}}),
        ("/v1/embeddings", {"input": list(range(10_000))}),
        ("/v1/embeddings", {"input": ["text" * 10] * 1000}),
        ("/v1/responses", {"input": [{"role": "user", "content": "a" * 20}] * 2000}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 1, "truncation_side": "left"}),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": None}),
        ("/v1/embeddings", {"input": ["a" * 2000] * 900, "truncate_prompt_tokens": -1}),
        ("/v1/chat/completions", {"messages": [{"content": [IMAGE]}], "truncate_prompt_tokens": 1}),
        ("/tokenize", {"messages": [{"content": [IMAGE]}]}),
        ("/tokenize", {"messages": [{"content": "é" * 500_000}]}),
    ],
)
def test_others_pass(path: str, body: dict[str, Any]) -> None:
    assert json.loads(translated(path, body).body) == body


@pytest.mark.parametrize(
    "body", [b'{"prompt": "' + b"x" * 20_000 + b'\xff"}', b'{"a": {"\xff": "' + b"x" * 20_000 + b'"}}']
)
def test_bytes_that_are_no_text_are_refused(body: bytes) -> None:
    given = Call(body=body, content_type="application/json", request_id="r", path="/tokenize")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        for_vllm(given, "/tokenize", OpenAICall(EngineQueue(ScriptedEngine(), 1000)))
