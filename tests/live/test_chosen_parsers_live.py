"""Chats with and without tools on models for which no setting names a parser of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.server import Server, hosted, write_model
from tests.live.tool_calls import REQUIRED, chat_calls

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CHAT, INVOCATIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/invocations", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello!"}]
# Bodies whose answers contain no tool call.
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO}),
    "chat, left to vLLM": (CHAT, {"messages": HELLO, "echo": True, "return_token_ids": True}),
    "chat, hidden reasoning": (CHAT, {"messages": HELLO, "include_reasoning": False, "logprobs": True}),
    "chat, no choice": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}),
    "LMI's chat": (INVOCATIONS, {"messages": HELLO}),
    "LMI's chat, no choice": (INVOCATIONS, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}),
    "response": (RESPONSES, {"input": "Hello!"}),
    "message": (MESSAGES, {"messages": HELLO}),
    "message, no choice": (
        MESSAGES,
        {"messages": HELLO, "tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "none"}},
    ),
}
_TIME = re.compile(r'(?<="created":)\d+|(?<="created_at":)\d+|(?<="created": )\d+')
_ID = re.compile(r"(?<=[_-])[0-9a-f]{12,}")  # Of vLLM.


@pytest.fixture(scope="module")
def models(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[dict[str, Server]]:
    """Two models with the same template. One has no setting for its parser, and the other has the setting `none`."""
    directories = {}
    for name, options in (("chosen", {}), ("off", {"tool_call_parser": "none"})):
        options = small_options | {"chat_template": "own.jinja"} | options
        directories[name] = write_model(tmp_path_factory.mktemp(name) / "model", **options)
        (directories[name] / "own.jinja").write_text(TEMPLATE)
    with hosted(host, directories["chosen"]) as chosen, hosted(host, directories["off"]) as off:
        yield {"chosen": chosen, "off": off}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, INVOCATIONS])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_a_chat_with_tools_is_answered(models: dict[str, Server], choice: Any, path: str, stream: bool) -> None:
    body = {"model": models["chosen"].name, "messages": HELLO, "tools": [TOOL], "max_tokens": 4, "stream": stream}
    answer = models["chosen"].client.post(path, json=body | choice)
    assert answer.status_code == 200, answer.text
    if not stream:
        message = answer.json()["choices"][0]["message"]
        assert message.get("content") or message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_requires_a_tool_has_a_call(models: dict[str, Server], stream: bool) -> None:
    ((name, text),) = chat_calls(models["chosen"], {"weather": CITY}, REQUIRED, stream=stream, max_tokens=100)
    assert name == "weather"
    assert json.loads(text) in ({"city": "Paris"}, {"city": "Rome"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_an_answer_without_tools_is_that_of_a_model_without_a_parser(
    models: dict[str, Server], name: str, stream: bool
) -> None:
    path, body = PLAIN[name]
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    found = {}
    for key, model in models.items():
        given = {"model": model.name, "temperature": 0, length: 24, "stream": stream, **body}
        answer = model.client.post(path, json=given, headers={"x-request-id": "the-same"})
        assert answer.status_code == 200, answer.text
        text = _ID.sub("", _TIME.sub("0", answer.text)).replace(str(model.name), "")
        found[key] = _joined(text) if stream else text
    assert found["chosen"] == found["off"]


def _joined(stream: str) -> tuple[list[str], str]:
    """Return the shapes of a stream's events, and all of its text. A busy server joins tokens in one event."""
    shapes, texts = [""], list[str]()
    for line in stream.splitlines():
        start, brace, rest = line.partition("{")
        shape = start + (str(_shape(json.loads(brace + rest), texts)) if brace else "")
        if shape and shape not in shapes[-2:]:  # an event of a response has two lines
            shapes.append(shape)
    return shapes, "".join(texts)


def _shape(value: Any, texts: list[str], name: str = "") -> Any:
    """Return a value without its text and without single tokens. The text is added to `texts`."""
    if isinstance(value, dict):
        return {key: _shape(member, texts, key) for key, member in value.items()}
    if isinstance(value, list):
        of_tokens = name == "token_ids" or any(isinstance(item, dict) and "logprob" in item for item in value)
        return "tokens" if of_tokens else [_shape(item, texts) for item in value]
    if name in ("content", "delta", "text") and isinstance(value, str):
        texts.append(value)
        return "text"
    return 0 if name == "sequence_number" else value


@pytest.mark.parametrize("path", [CHAT, INVOCATIONS])
def test_a_refusal_names_the_setting_and_its_values(models: dict[str, Server], path: str) -> None:
    assert_refused(models["off"], path)


@pytest.mark.parametrize("path", [CHAT, INVOCATIONS])
def test_a_model_whose_template_has_no_tools_refuses_them(server: Server, path: str) -> None:
    """The shared server's model has SmolLM2's template."""
    assert_refused(server, path)


def assert_refused(model: Server, path: str) -> None:
    refused = model.client.post(path, json={"model": model.name, "messages": HELLO, "tools": [TOOL]})
    assert refused.status_code in (400, 424)
    assert "option.tool_call_parser" in refused.text
    assert all(value in refused.text for value in ("auto", "hermes", "mistral"))
