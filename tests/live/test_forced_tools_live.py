"""A model calls a tool that a request names or requires, also if other models of the server have other grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.live.server import Server, hosted, write_model

pytestmark = pytest.mark.slow

PLUGIN = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


@ToolParserManager.register_module("own")
class OwnToolParser(Hermes2ProToolParser):
    structural_tag_model = "hermes"
"""
TAGS: dict[str, object] = {"structured_outputs_config": '{"backend": "xgrammar"}', "tool_call_parser": "hermes"}
MODELS: dict[str, dict[str, object]] = {
    "tags": TAGS,
    "a plugin": {"tool_parser_plugin": "plugin.py", "tool_call_parser": "own"},
    "with reasoning": {"tool_call_parser": "hermes", "reasoning_parser": "granite"},
    "tags, with reasoning": {**TAGS, "reasoning_parser": "granite"},
}
FUNCTION: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 100,
    "temperature": 0,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def first(
    host: Server, tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]
) -> Iterator[Server]:
    """Return a first model of a server. It writes calls in its own syntax."""
    directory = write_model(tmp_path_factory.mktemp("tools") / "model", **engine_options, **_options("tags"))
    with hosted(host, directory) as running:
        yield running


def _options(name: str) -> dict[str, object]:
    return {"rolling_batch": "vllm", "enable_auto_tool_choice": "true", **MODELS[name]}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "tags" else pytest.mark.long) for name in MODELS],
)
def model(
    request: pytest.FixtureRequest,
    host: Server,
    first: Server,
    tmp_path_factory: pytest.TempPathFactory,
    engine_options: dict[str, object],
) -> Iterator[Server]:
    """One of several models of the server."""
    if request.param == "tags":
        yield first
        return
    directory = write_model(tmp_path_factory.mktemp("more") / "model", **engine_options, **_options(request.param))
    (directory / "plugin.py").write_text(PLUGIN)
    with hosted(host, directory) as running:
        yield running


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    """Return the calls of a chat, whole or streamed."""
    if not isinstance(answer, list):
        return [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls or ()]
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    for choice in answer:
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            texts[call.index] = texts.get(call.index, "") + (call.function.arguments or "")
    return [(name, json.loads(texts[index])) for index, name in names.items()]


def assert_obeyed(calls: list[tuple[str, Any]]) -> None:
    assert calls
    assert all(call in (("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})) for call in calls), calls


@pytest.mark.parametrize(("choice", "stream"), [("required", False), (NAMED, True)])
def test_a_chat_calls_the_tool(model: Server, choice: Any, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="none") as client:
        answer: Any = client.chat.completions.create(model=model.name, stream=stream, tool_choice=choice, **CHAT)
        whole = [part.choices[0] for part in answer if part.choices] if stream else answer.choices[0]
    assert_obeyed(calls_of(whole))


@pytest.mark.parametrize(("choice", "stream"), [({"type": "function", "name": "weather"}, False), ("required", True)])
def test_a_response_calls_the_tool(model: Server, choice: Any, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{model.url}/v1", api_key="none") as client:
        tool: Any = {"type": "function", **FUNCTION}
        response: Any = client.responses.create(
            model=model.name,
            input="Hello!",
            tools=[tool],
            tool_choice=choice,
            max_output_tokens=100,
            temperature=0,
            stream=stream,
        )
        if stream:
            response = list(response)[-1].response
    calls = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    assert_obeyed(calls)


@pytest.mark.parametrize(("choice", "stream"), [({"type": "any"}, False), ({"type": "tool", "name": "weather"}, True)])
def test_a_message_calls_the_tool(model: Server, choice: Any, stream: bool) -> None:
    body = {
        "model": model.name,
        "messages": CHAT["messages"],
        "max_tokens": 100,
        "temperature": 0,
        "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": choice,
        "stream": stream,
    }
    response = model.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        uses = [part for part in response.json()["content"] if part["type"] == "tool_use"]
        assert_obeyed([(use["name"], use["input"]) for use in uses])
        return
    names: list[str] = []
    texts: list[str] = []
    parts = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, parts):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names.append(event["content_block"]["name"])
            texts.append("")
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            texts[-1] += event["delta"]["partial_json"]
    assert_obeyed([(name, json.loads(text)) for name, text in zip(names, texts, strict=True)])
