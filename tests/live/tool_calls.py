"""The calls that a model makes if a request names a tool or requires a call, in each contract that has tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openai

from tests.live.server import Server

REQUIRED = "required"
"""A choice that requires a call of any tool. All other choices are names of tools."""
_PROMPT = "Hello!"

Calls = list[tuple[str, str]]
"""Names of tools, and the texts of their arguments."""
Tools = Mapping[str, Any]
"""The schemas of tools, by their names."""


def chat_calls(server: Server, tools: Tools, choice: str, *, stream: bool, max_tokens: int) -> Calls:
    named: Any = {"type": "function", "function": {"name": choice}}
    functions: Any = [{"type": "function", "function": {"name": n, "parameters": tools[n]}} for n in tools]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer: Any = client.chat.completions.create(
            model=server.name or "",
            messages=[{"role": "user", "content": _PROMPT}],
            tools=functions,
            tool_choice=REQUIRED if choice == REQUIRED else named,
            max_tokens=max_tokens,
            temperature=0,
            stream=stream,
        )
        if not stream:
            called = answer.choices[0].message.tool_calls or ()
            return [(call.function.name, call.function.arguments) for call in called]
        calls: dict[int, list[str]] = {}
        for part in answer:
            for call in (part.choices[0].delta.tool_calls or ()) if part.choices else ():
                pieces = calls.setdefault(call.index, ["", ""])
                pieces[0] += call.function.name or ""
                pieces[1] += call.function.arguments or ""
    return [(name, text) for name, text in calls.values()]


def response_calls(server: Server, tools: Tools, choice: str, *, stream: bool, max_tokens: int) -> Calls:
    named: Any = {"type": "function", "name": choice}
    functions: Any = [{"type": "function", "name": n, "parameters": tools[n]} for n in tools]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        response: Any = client.responses.create(
            model=server.name or "",
            input=_PROMPT,
            tools=functions,
            tool_choice=REQUIRED if choice == REQUIRED else named,
            max_output_tokens=max_tokens,
            temperature=0,
            stream=stream,
        )
        if stream:
            response = list(response)[-1].response
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def message_calls(server: Server, tools: Tools, choice: str, *, stream: bool, max_tokens: int) -> Calls:
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "tools": [{"name": name, "input_schema": tools[name]} for name in tools],
        "tool_choice": {"type": "any"} if choice == REQUIRED else {"type": "tool", "name": choice},
        "stream": stream,
    }
    response = server.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        uses = [part for part in response.json()["content"] if part["type"] == "tool_use"]
        return [(use["name"], json.dumps(use["input"], separators=(",", ":"), ensure_ascii=False)) for use in uses]
    calls: dict[int, list[str]] = {}
    parts = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    for event in map(json.loads, parts):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[event["index"]][1] += event["delta"]["partial_json"]
    return [(name, text) for name, text in calls.values()]


CONTRACTS = {"chat": chat_calls, "responses": response_calls, "messages": message_calls}
