from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Call
from handlers.openai.constraints import CHAT, RENDER
from handlers.openai.current_call import OpenAICall
from handlers.openai.vllm_body import for_vllm
from handlers.queue import EngineQueue
from tests.contracts.exchange import call
from tests.stand_ins.scripted_engine import ScriptedEngine


def without_nulls(given: Call, path: str) -> Call:
    return for_vllm(given, path, OpenAICall(EngineQueue(ScriptedEngine(), 1)))


@pytest.mark.parametrize("path", [CHAT, "/tokenize", RENDER])
def test_null_fields_of_messages_are_absent_and_all_else_stays(path: str) -> None:
    body = b'{"seed": null, "n": 1.50, "messages": [{"role": "user", "content": "null", "name": null}]}'
    assert without_nulls(call(body), path).body == (
        b'{"seed":null,"n":1.50,"messages":[{"role":"user","content":"null"}]}'
    )


def test_null_fields_of_long_messages_are_absent() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20), "name": None}]}).encode()
    assert "name" not in json.loads(without_nulls(call(body), CHAT).body)["messages"][0]


def test_null_fields_of_a_response_are_absent() -> None:
    body = b'{"background": null, "input": [{"role": "user", "content": null}], "store": false}'
    assert without_nulls(call(body), "/v1/responses").body == (
        b'{"input":[{"role": "user", "content": null}],"store":false}'
    )


def test_a_null_field_of_a_response_changes_nothing_else() -> None:
    body = b'{"model": null, "input": "x", "guided_regex": "a+", "structured_outputs": null}'
    held = OpenAICall(EngineQueue(ScriptedEngine(), 1))
    translated = json.loads(for_vllm(call(body), "/v1/responses", held, model="adapter").body)
    assert (translated["model"], translated["structured_outputs"]["regex"]) == ("adapter", "a+")


def test_a_message_may_have_null_as_its_content() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": []}]
    body = json.dumps({"messages": messages}).encode()
    assert without_nulls(call(body), CHAT).body == body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"messages": [{"name": null}]}'),
        (CHAT, b'{"messages": [{"name": "x"}]}'),
        (CHAT, b'{"messages": null}'),
        (CHAT, b'{"messages": [null]}'),
        (CHAT, b"null"),
        (CHAT, b'{"messages": [{"name": null}]'),
        ("/v1/completions", b'{"user": null}'),
    ],
)
def test_what_is_no_chat_with_nulls_is_not_touched(path: str, body: bytes) -> None:
    assert without_nulls(call(body), path).body is body


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=8,
)


@given(_VALUES, st.lists(st.dictionaries(st.text(), _VALUES, max_size=4), max_size=4))
def test_any_chat_keeps_what_is_not_null(other: Any, messages: list[dict[str, Any]]) -> None:
    document = {"other": other, "messages": messages}
    seen = json.loads(without_nulls(call(json.dumps(document).encode()), CHAT).body)
    assert seen["other"] == other
    kept = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    assert seen["messages"] == kept


@pytest.mark.parametrize(
    ("path", "given", "kept"),
    [
        (CHAT, {"stream_options": {"include_usage": True}}, {}),
        (CHAT, {"stream": False, "stream_options": 5}, {"stream": False}),
        ("/v1/completions", {"suffix": "", "stream_options": {}}, {}),
        (CHAT, {"tools": [], "tool_choice": "auto"}, {}),
        (CHAT, {"tools": None, "tool_choice": "none"}, {}),
        (CHAT, {"tool_choice": "auto"}, {}),
        *((path, {"tools": [], "tool_choice": "auto", "stream_options": {}}, {}) for path in ("/tokenize", RENDER)),
        *((path, {"request_id": ""}, {"request_id": ""}) for path in (CHAT, "/v1/messages/count_tokens")),
        ("/v1/messages/count_tokens", {"request_id": "a b"}, {"request_id": "a b"}),
    ],
)
def test_fields_that_ask_for_nothing_are_left_out(path: str, given: dict[str, Any], kept: dict[str, Any]) -> None:
    assert json.loads(without_nulls(call(json.dumps({"n": 1} | given).encode()), path).body) == {"n": 1} | kept


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"stream": "true", "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"suffix": "x"}),
        (CHAT, {"tools": [{}], "tool_choice": "auto"}),
        ("/v1/responses", {"tools": [], "tool_choice": "auto"}),
    ],
)
def test_fields_that_ask_for_something_stay(path: str, given: dict[str, Any]) -> None:
    body = json.dumps(given).encode()
    assert without_nulls(call(body), path).body == body


def test_messages_of_the_assistant_in_a_response_get_their_type() -> None:
    user, spoken = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    typed = {"type": "message", "role": "assistant", "content": "c"}
    body = json.dumps({"input": [user, spoken, {**spoken, "type": None}, typed, 5]}).encode()
    expected = [user, {**spoken, "type": "message"}, {**spoken, "type": "message"}, typed, 5]
    assert json.loads(without_nulls(call(body), "/v1/responses").body)["input"] == expected
    text = b'{"input": "\\"assistant\\""}'
    assert without_nulls(call(text), "/v1/responses").body == text
