"""OpenAI's routes give a call to the engine or to vLLM's front end. The engine refuses some calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engines.errors import InvalidRequest, Overloaded, UnknownAdapter
from engines.request import FinishReason, GenerationRequest, TokenDelta
from handlers.contract import Call, ExplainAsked
from handlers.explanation import Explained
from handlers.openai.body import read_completion, sampling_of
from handlers.openai.contract import OpenAIContract
from handlers.openai.current_call import current_call
from handlers.openai.handler import OpenAIHandler
from handlers.openai.vllm_call import VllmApp
from handlers.queue import EngineQueue
from tests.contracts.openai_exchange import FRONT_END
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.request_headers import request_headers
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.waiting import until

COMPLETION, CHAT = "/v1/completions", "/openai/v1/chat/completions"
TURNS = b'"messages": [{"role": "user", "content": "Hi"}]'


class Ways:
    """A handler with a scripted engine and an application. The default application answers every request with 418."""

    def __init__(self, limit: int = 4, app: Any = None) -> None:
        self.engine = ScriptedEngine()
        self.queue = EngineQueue(self.engine, limit)  # type: ignore[arg-type]
        self.bodies: list[bytes] = []
        self.writer = CollectedReply()
        contract = OpenAIContract(FRONT_END)
        self.handler = OpenAIHandler(VllmApp(app or self._app, None), self.queue, contract, "m", FRONT_END.adapters)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"vLLM's"})

    async def ask(self, body: bytes, path: str = COMPLETION, **how: Any) -> Any:
        call = Call(body=body, content_type="application/json", request_id="r", path=path, **how)
        return await self.handler.handle(call, self.writer)

    @property
    def requests(self) -> list[GenerationRequest]:
        return [running.request for running in self.engine.running]

    async def asked_vllm(self) -> bool:
        await until(lambda: self.writer.whole is not None)
        assert self.writer.whole is not None
        return self.writer.whole.status == 418


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, b'{"prompt": "Hi"}'), (CHAT, b'{"model": "x", %b}' % TURNS)])
async def test_a_common_call_is_answered_without_vllms_classes(path: str, body: bytes) -> None:
    ways = Ways()
    await ways.ask(body, path)
    ways.engine.sinks[0].on_delta(TokenDelta("a", finish_reason=FinishReason.EOS, token_count=1, last=True))
    assert ways.writer.whole is not None
    assert (ways.writer.whole.status, ways.bodies) == (200, [])
    assert b'"a"' in ways.writer.whole.body
    assert ways.queue.open_sequences == 0


async def test_any_other_call_goes_to_vllms_classes_as_it_came() -> None:
    ways = Ways()
    await ways.ask(b'{"prompt": "Hi", "echo": false}')
    assert await ways.asked_vllm()
    assert (ways.bodies, ways.requests) == ([b'{"prompt": "Hi", "echo": false}'], [])


async def test_what_the_engine_refuses_is_vllms_to_refuse() -> None:
    ways = Ways()
    ways.engine.failures = {0: InvalidRequest("too long")}
    await ways.ask(b'{"prompt": "Hi"}')
    assert await ways.asked_vllm()
    assert ways.queue.open_sequences == 0


async def test_prompts_are_refused_together_before_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(request: GenerationRequest) -> list[int]:
        if request.prompt == "long":
            raise InvalidRequest("too long")
        return [1, 2]

    ways = Ways()
    monkeypatch.setattr(ways.engine, "prompt_token_ids", tokenize)
    await ways.ask(b'{"prompt": ["short", "long"]}')
    assert await ways.asked_vllm()
    assert ways.requests == []
    ways = Ways()
    monkeypatch.setattr(ways.engine, "prompt_token_ids", tokenize)
    await ways.ask(b'{"prompt": ["short", "shorter"]}')
    assert [request.prompt for request in ways.requests] == [(1, 2), (1, 2)]


async def test_a_full_queue_is_refused_at_once() -> None:
    ways = Ways(limit=1)
    ways.queue.admit(1)
    with pytest.raises(Overloaded):
        await ways.ask(b'{"prompt": "Hi", "stream": true}')
    assert (ways.writer.whole, ways.bodies) == (None, [])
    assert ways.engine.statistics.calls.failed == 1


async def test_a_full_queue_refuses_an_explanation_and_counts_none() -> None:
    ways = Ways(limit=1)
    ways.queue.admit(1)
    with pytest.raises(Overloaded):
        await ways.ask(b'{"prompt": "Hi"}', explanation=ExplainAsked())
    assert ways.engine.statistics.calls.failed == 0


@pytest.mark.parametrize("body", [b'{"prompt": "Hi"}', b'{"prompt": "Hi", "echo": true}'])
async def test_a_variant_of_an_explained_call_needs_no_place(body: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        call.take(1)
        assert call.explained is not None
        call.explained.set_result([])

    ways = Ways(limit=1, app=app)
    ways.queue.admit(1)
    with pytest.raises(Explained):
        await ways.ask(body, explanation=ExplainAsked(variant=True))


@pytest.mark.parametrize(("status", "failed"), [(400, False), (500, True), (501, False), (503, True)])
async def test_vllms_status_tells_if_the_engine_has_failed(status: int, failed: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    variant = ExplainAsked(variant=True)
    await Ways(app=app).ask(b'{"prompt": "Hi", "echo": true}', explanation=variant)
    assert variant.failed is failed


async def test_an_explanation_of_vllms_front_end_ends_at_the_deadline_and_is_not_counted() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    ways, left = Ways(app=app), asyncio.Event()
    await ways.ask(b'{"prompt": "Hi", "echo": true}', time_limit=0.01, explanation=ExplainAsked())
    assert ways.writer.whole is not None
    assert ways.writer.whole.status == 504
    assert ("x-slipway-deadline", "reached") in ways.writer.whole.headers
    assert ways.engine.statistics.deadlines == {"partial": 0, "nothing": 0}
    await left.wait()


async def test_prompts_without_places_are_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(request: GenerationRequest) -> list[int]:
        raise AssertionError

    ways = Ways(limit=2)
    monkeypatch.setattr(ways.engine, "prompt_token_ids", tokenize)
    ways.queue.admit(1)
    await ways.ask(b'{"prompt": ["a", "b"]}')
    assert ways.writer.whole is not None
    assert (ways.writer.whole.status, ways.bodies) == (503, [])


async def test_a_call_with_more_prompts_than_the_queue_has_places_is_left_to_vllm() -> None:
    ways = Ways(limit=2)
    await ways.ask(b'{"prompt": ["a", "b", "c"]}')
    assert await ways.asked_vllm()


async def test_others_have_their_turn_while_many_prompts_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized: list[int] = []

    async def tokenize(request: GenerationRequest) -> list[int]:
        tokenized.append(1)
        return [1]

    ways = Ways()
    monkeypatch.setattr(ways.engine, "prompt_token_ids", tokenize)
    others_turn: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: others_turn.append(len(tokenized)))
    await ways.ask(b'{"prompt": ["a", "b", "c"]}')
    assert (others_turn, len(tokenized)) == ([2], 3)


async def test_tokenizing_many_prompts_counts_for_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(request: GenerationRequest) -> list[int]:
        await asyncio.Event().wait()
        raise AssertionError

    ways = Ways()
    ways.engine.begun = False
    monkeypatch.setattr(ways.engine, "prompt_token_ids", tokenize)
    await ways.ask(b'{"prompt": ["a", "b"]}', time_limit=0.01)
    await until(lambda: ways.writer.whole is not None)
    assert ways.writer.whole is not None
    assert (ways.writer.whole.status, ways.bodies, ways.queue.open_sequences) == (504, [], 0)
    assert ways.engine.statistics.deadlines == {"partial": 0, "nothing": 1}


async def test_a_long_body_is_parsed_in_a_thread() -> None:
    ways = Ways()
    await ways.ask(b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"x" * 20_000), CHAT)
    assert len(ways.requests) == 1
    await ways.ask(b'{"prompt": "%b"}' % (b"x" * 300_000))
    assert len(ways.requests) == 2


async def test_sagemakers_header_names_the_adapter() -> None:
    def named(name: str) -> Any:
        return {"headers": request_headers(("X-Amzn-SageMaker-Adapter-Identifier", name))}

    ways = Ways()
    await ways.ask(b'{"prompt": "Hi"}', **named("a"))
    await ways.ask(b'{"prompt": "Hi", "model": "a"}', **named(""))
    assert [request.adapter for request in ways.requests] == ["a", None]
    with pytest.raises(UnknownAdapter):
        await ways.ask(b'{"prompt": "Hi"}', **named("other"))


@pytest.mark.parametrize(
    ("given", "default", "skips"),
    [({}, {}, True), ({}, {"skip_special_tokens": False}, False)]
    + [({"skip_special_tokens": value}, {"skip_special_tokens": not value}, value) for value in (True, False)],
)
def test_the_model_says_if_special_tokens_are_skipped_unless_the_body_does(
    given: dict[str, bool], default: dict[str, bool], skips: bool
) -> None:
    body = read_completion(json.dumps({"prompt": "x", **given}).encode())
    assert sampling_of(body, default, 16).skip_special_tokens is skips
