from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Call, ContractError, ExplainAsked, Reply, ReplyWriter, Running
from handlers.lmi.invocations import InvocationsHandler
from handlers.lmi.sessions import Sessions
from handlers.model_config import ModelConfig
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.queue import EngineQueue
from tests.settings import configured
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "hi"}]


def call(document: Any, content_type: str = "application/json") -> Call:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return Call(body=body, content_type=content_type, request_id="r", path="/invocations", query=(("a", "b"),))


class Lmi:
    """A handler that records that it was called."""

    request_id = "r"

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        self.calls.append(call)
        return self

    def cancel(self) -> None:
        pass


class OpenAI(Lmi):
    def __init__(self) -> None:
        super().__init__()
        self.writer: ReplyWriter | None = None
        self.path = ""
        self.any_model = False
        self.adapter: str | None = None

    async def begin(
        self, call: Call, writer: ReplyWriter, path: str, *, any_model: bool, adapter: str | None = None, **_: object
    ) -> Running:
        self.calls.append(call)
        self.writer, self.path, self.any_model, self.adapter = writer, path, any_model, adapter
        return self


async def handled(document: Any, openai: OpenAI | None, content_type: str = "application/json", **options: Any) -> Lmi:
    lmi = Lmi()
    config = configured(ModelConfig(name="m", model_dir=Path("."), model_id="m"), **options)
    handler = InvocationsHandler(lmi, openai, config, EngineQueue(ScriptedEngine(), 10), Sessions(None, 503))  # type: ignore[arg-type]
    await handler.handle(call(document, content_type), CollectedReply())
    return lmi


async def kind_of(document: Any, **options: Any) -> str:
    """Return the path of the front end that answers a body, or else `lmi` or `session`."""
    openai = OpenAI()
    try:
        lmi = await handled(document, openai, **options)
    except ContractError:
        return "session"  # Sessions are off.
    return "lmi" if lmi.calls else {CHAT: "chat", COMPLETIONS: "completion"}[openai.path]


@pytest.mark.parametrize(
    ("document", "rolling", "asynchronous"),
    [
        ({"messages": MESSAGES}, "chat", "chat"),
        ({"prompt": "x"}, "completion", "completion"),
        ({"inputs": "x"}, "lmi", "lmi"),
        ({"requestType": "NEW_SESSION"}, "session", "session"),
        ({"messages": MESSAGES, "prompt": "x", "inputs": "x"}, "chat", "completion"),
        ({"messages": MESSAGES, "inputs": "x"}, "chat", "lmi"),
        ({"prompt": "x", "inputs": "x"}, "completion", "completion"),
        ({"inputs": "x", "requestType": "CLOSE"}, "lmi", "lmi"),
        ({"messages": None, "inputs": "x"}, "lmi", "lmi"),
        ({"inputs": '"messages"', "parameters": {"prompt": 1}}, "lmi", "lmi"),
        ({}, "lmi", "lmi"),
        ([{"messages": 1}], "lmi", "lmi"),
        (b'{"messages": [', "lmi", "lmi"),
        (b'{"messages": ' + b"[" * 100_000, "lmi", "lmi"),
    ],
)
async def test_the_first_field_in_the_order_says_what_a_body_is(document: Any, rolling: str, asynchronous: str) -> None:
    assert await kind_of(document) == rolling
    assert await kind_of(document, async_mode=True) == asynchronous


@pytest.mark.parametrize(
    ("content_type", "plain"),
    [
        ("application/json", False),
        ("Application/JSON; charset=utf-8", False),
        ("application/jsonlines", False),
        ("", False),
        ("application/octet-stream", False),
        ("application/x-www-form-urlencoded", False),
        ("text/plain", True),
        ("text/csv", True),
    ],
)
async def test_only_json_is_looked_into(content_type: str, plain: bool) -> None:
    openai = OpenAI()
    lmi = await handled({"messages": MESSAGES}, openai, content_type)
    assert (len(lmi.calls), len(openai.calls)) == ((1, 0) if plain else (0, 1))


@given(st.binary(), st.sampled_from([b"", b'{"messages"', b'{"prompt": ', b'{"requestType": 1}']), st.booleans())
def test_any_bytes_are_some_kind_of_body(data: bytes, before: bytes, async_mode: bool) -> None:
    assert asyncio.run(kind_of(before + data, async_mode=async_mode))


async def test_chat_goes_to_vllm_as_json_whatever_model_it_names() -> None:
    openai = OpenAI()
    lmi = await handled({"messages": MESSAGES, "model": "x", "stop_token_ids": [7]}, openai, "")
    assert lmi.calls == []
    assert (openai.path, openai.any_model) == ("/v1/chat/completions", True)
    (sent,) = openai.calls
    assert (sent.content_type, sent.method, sent.query) == ("application/json", "POST", ())
    assert isinstance(openai.writer, CollectedReply)


async def refused(document: Any, openai: OpenAI | None) -> Reply:
    with pytest.raises(ContractError) as caught:
        await handled(document, openai)
    return caught.value.reply


@pytest.mark.parametrize("field", ["messages", "prompt"])
async def test_an_engine_without_chat_says_what_is_needed(field: str) -> None:
    reply = await refused({field: "x"}, None)
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert json.loads(reply.body) == {
        "error": f"Input Parsing failed. `{field}` needs vLLM as the engine (option.rolling_batch=vllm); "
        "send `inputs` instead.",
        "code": 424,
    }
    assert (await handled({field: "x", "inputs": "y"}, None)).calls


@pytest.mark.parametrize("variant", [False, True])
async def test_a_session_is_checked_once_for_an_explained_call(variant: bool) -> None:
    lmi, explanation, queue = Lmi(), ExplainAsked(variant=variant), EngineQueue(ScriptedEngine(), 10)
    config = ModelConfig(name="m", model_dir=Path("."), model_id="m")
    handler = InvocationsHandler(lmi, None, config, queue, Sessions(None, 503))
    asked = replace(call({"inputs": "a"}), headers={b"x-amzn-sagemaker-session-id": b"one"}, explanation=explanation)
    with nullcontext() if variant else pytest.raises(ContractError, match="session"):
        await handler.handle(asked, CollectedReply())
    assert len(lmi.calls) == variant


async def test_a_long_body_is_read_in_a_thread_and_understood() -> None:
    openai = OpenAI()
    await handled({"padding": "x" * 300_000, "messages": MESSAGES}, openai)
    assert openai.calls


@pytest.mark.parametrize("document", [{"messages": MESSAGES}, {"prompt": "x"}])
async def test_chats_and_completions_go_to_the_adapter_that_they_name(document: Any) -> None:
    async def asked(more: dict[str, Any], **settings: Any) -> str | None:
        openai = OpenAI()
        await handled({**document, **more}, openai, **settings)
        return openai.adapter

    assert await asked({"adapters": "a"}, enable_lora=True) == "a"
    assert await asked({"adapters": ["a"]}, enable_lora=True) == "a"
    assert await asked({"adapters": ""}, enable_lora=True) == ""
    assert await asked({}, enable_lora=True) is None
    assert await asked({"adapters": "a"}) is None


async def test_adapters_of_a_chat_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ContractError) as caught:
        await handled({"messages": MESSAGES, "adapters": ["a", "b"]}, OpenAI(), enable_lora=True)
    assert caught.value.reply.status == 424
    assert b"`adapters` must name one adapter" in caught.value.reply.body
