"""Explanations of calls on a scripted engine: the origins of parameters, the limits, and no trace of the call."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import InvalidRequest
from handlers.contract import Call, ContractError, Exchange, Explanation, ReplyWriter, Running, read_steering
from handlers.engine_handler import EngineHandler
from handlers.explanation import explain
from handlers.formatter_thread import FormatterThread
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL, call
from tests.freed import bytes_in_cycles
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio


class Counting(LmiRollingContract):
    """A contract that counts the bodies that it reads."""

    bodies = 0

    def parse(self, call: Call) -> Exchange:
        self.bodies += 1
        return super().parse(call)


async def explained(handler: EngineHandler, asked: Call) -> dict[str, Any]:
    async def answer(variant: Call, writer: ReplyWriter) -> Running | None:
        return await handler.handle(variant, writer)

    writer = CollectedReply()
    assert await explain(replace(asked, explanation=Explanation()), answer, writer) is None
    assert writer.whole is not None
    assert writer.whole.status == 200
    document: dict[str, Any] = json.loads(writer.whole.body)
    return document


def handler_of(engine: ScriptedEngine, contract: LmiRollingContract, thread: FormatterThread | None = None) -> Any:
    return EngineHandler(EngineQueue(engine, limit=4), contract, thread=thread)


async def test_nothing_reaches_the_engine_and_nothing_is_counted() -> None:
    engine = ScriptedEngine()
    queue = EngineQueue(engine, limit=4)
    found = await explained(EngineHandler(queue, LmiRollingContract(MODEL)), call({"inputs": ["a", "b"]}))
    assert (found["prompt_count"], found["limits"]["free_places"]) == (2, 4)
    assert (engine.sinks, queue.open_sequences, queue.running) == ([], 0, {})
    assert engine.statistics.calls.failed == engine.statistics.calls.succeeded == 0


async def test_a_given_value_that_is_the_default_comes_from_the_body() -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 30, "top_p": 1.0, "ignore_eos_token": False}}
    found = await explained(handler_of(ScriptedEngine(), LmiRollingContract(MODEL)), call(body))
    assert found["parameters"]["max_tokens"] == {"value": 30, "from": "body", "fields": ["parameters.max_new_tokens"]}
    assert found["parameters"]["top_p"]["from"] == found["parameters"]["ignore_eos"]["from"] == "body"
    assert found["parameters"]["min_p"] == {"value": 0.0, "from": "default"}
    assert found["translated"]["parameters.ignore_eos_token"] == "ignore_eos"


@pytest.mark.parametrize(
    ("headers", "key", "origin"),
    [({}, "", None), ({b"x-cache-salt": b"mine"}, "", "header"), ({}, "of the key", "key")],
)
async def test_the_salt_is_named_by_its_origin_and_not_shown(
    headers: dict[bytes, bytes], key: str, origin: str | None
) -> None:
    steering, _ = read_steering(headers, key)
    asked = replace(call({"inputs": "a"}), headers=headers, key_salt=key, steering=steering)
    found = await explained(handler_of(ScriptedEngine(), LmiRollingContract(MODEL)), asked)
    assert found["cache_salt"] == origin
    assert not key or key not in json.dumps(found)


async def test_a_customers_formatter_reads_the_body_once() -> None:
    thread = FormatterThread(30.0)
    try:
        contract = Counting(MODEL)
        found = await explained(handler_of(ScriptedEngine(), contract, thread), call({"inputs": "a"}))
    finally:
        thread.stop()
    assert contract.bodies == 1
    assert found["origins_known"] is False
    assert found["parameters"]["max_tokens"] == {"value": 30, "from": None}


async def test_the_work_for_a_body_is_bounded() -> None:
    contract = Counting(MODEL)
    body = {"inputs": "a", "parameters": {f"unknown {place}": place for place in range(500)}}
    found = await explained(handler_of(ScriptedEngine(), contract), call(body))
    assert contract.bodies <= 2 + 2 * 64
    assert found["origins_known"] is False
    prompts = ["a" * 30_000] * 20
    found = await explained(handler_of(ScriptedEngine(), contract), call({"inputs": prompts[:4]}))
    assert [len(prompt["text"]) for prompt in found["prompts"]] == [30_000, 30_000, 30_000, 10_000]
    assert [prompt["characters"] for prompt in found["prompts"]] == [30_000] * 4


async def test_a_refusal_of_the_engine_is_the_contracts() -> None:
    engine = ScriptedEngine()
    engine.failures[0] = InvalidRequest("it is too long")
    handler = handler_of(engine, LmiRollingContract(MODEL))
    with pytest.raises(ContractError) as refused:
        await explained(handler, call({"inputs": "a"}))
    with pytest.raises(ContractError) as always:
        await handler.handle(call({"inputs": "a"}), CollectedReply())
    assert refused.value.reply == always.value.reply


async def test_a_call_leaves_no_cycle_when_it_was_explained() -> None:
    handler = handler_of(ScriptedEngine(), LmiRollingContract(MODEL))
    body = {"inputs": "a" * 1_000_000, "parameters": {"top_p": 0.5}}
    await explained(handler, call(body))
    bytes_in_cycles()
    await explained(handler, call(body))
    assert bytes_in_cycles() < 100_000
