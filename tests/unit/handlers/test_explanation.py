"""Explanations of calls on a scripted engine: the origins of parameters, and the limits. They leave no traces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, NotReady, Overloaded, RequestError
from engines.interface import ExplainedRequest
from engines.request import GenerationRequest
from handlers import explanation
from handlers.contract import Call, ContractError, Exchange, ExplainAsked, Reply, ReplyWriter, Running, read_steering
from handlers.deadline import DeadlineConfig
from handlers.engine_handler import EngineHandler
from handlers.explanation import explain
from handlers.formatter_thread import FormatterThread
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL, call
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine can stop for seconds, and then the search would end too early."""
    monkeypatch.setattr(explanation, "_MOST_SECONDS", 600.0)


class CountingEngine(ScriptedEngine):
    """An engine that counts the prompts that it prepares. `events` has functions to call, by the number of prompts."""

    prepared = 0

    def __init__(self, events: Mapping[int, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.events = events or {}

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        self.prepared += 1
        if event := self.events.get(self.prepared):
            event()
        return await super().explain(request)


class Letters(ScriptedEngine):
    """An engine whose tokens are the letters of a prompt. A beam search has its own parameters."""

    texts = SimpleNamespace(decode=lambda token_ids: "".join(map(chr, token_ids)))

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        explained = await super().explain(request)
        assert isinstance(request.prompt, str)
        letters = [ord(letter) for letter in request.prompt][-(request.truncate_prompt_tokens or 0) :]
        search = request.beam_search
        parameters = explained.parameters if search is None else msgspec.structs.asdict(search)
        return msgspec.structs.replace(explained, token_ids=letters, parameters=parameters)


class Counting(LmiRollingContract):
    """A contract that counts the bodies that it reads."""

    bodies = 0
    limits: tuple[float | None, ...] = ()

    def parse(self, call: Call) -> Exchange:
        self.bodies += 1
        self.limits += (call.time_limit,)
        return super().parse(call)


async def explained(handler: EngineHandler, asked: Call, searches: asyncio.Lock | None = None) -> dict[str, Any]:
    async def answer(variant: Call, writer: ReplyWriter) -> Running | None:
        return await handler.handle(variant, writer)

    writer = CollectedReply()
    assert await explain(replace(asked, explanation=ExplainAsked()), answer, writer, searches or asyncio.Lock()) is None
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
    assert found["translated"]["parameters.ignore_eos_token"] == ["ignore_eos"]


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
    contract, engine = Counting(MODEL), CountingEngine()
    body = {"inputs": ["a"] * 200, "parameters": {f"unknown {place}": place for place in range(500)}}
    found = await explained(EngineHandler(EngineQueue(engine, limit=200), contract), call(body))
    assert contract.bodies <= 3 + 5 * 64
    assert engine.prepared < 200 + contract.bodies, "a variant prepares one prompt"
    assert found["prompt_count"] == 200
    assert found["origins_known"] is False
    prompts = ["a" * 30_000] * 20
    found = await explained(handler_of(ScriptedEngine(), contract), call({"inputs": prompts[:4]}))
    assert [len(prompt["text"]) for prompt in found["prompts"]] == [30_000, 30_000, 30_000, 10_000]
    assert [prompt["characters"] for prompt in found["prompts"]] == [30_000] * 4


@pytest.mark.parametrize("failure", [InvalidRequest("it is too long"), NotReady("it loads")])
async def test_a_refusal_of_the_engine_is_the_contracts(failure: RequestError) -> None:
    engine = ScriptedEngine()
    engine.failures[0] = failure
    handler = handler_of(engine, LmiRollingContract(MODEL))
    with pytest.raises(ContractError) as refused:
        await explained(handler, call({"inputs": "a"}))
    with pytest.raises(ContractError) as always:
        await handler.handle(call({"inputs": "a"}), CollectedReply())
    assert refused.value.reply == always.value.reply


async def test_a_full_queue_refuses_an_explanation_and_counts_none() -> None:
    queue = EngineQueue(ScriptedEngine(), limit=1)
    queue.admit(1)
    full = Reply(429, "", b"full")
    for handler in (
        EngineHandler(queue, LmiRollingContract(MODEL)),
        EngineHandler(queue, LmiRollingContract(MODEL), refuse_unread=lambda _: full),
    ):
        with pytest.raises(ContractError, match="the queue is full"):
            await explained(handler, call({"inputs": "a"}))
    assert queue.statistics.calls.failed == 0


async def test_a_queue_that_fills_during_the_search_changes_nothing() -> None:
    engine = CountingEngine()
    queue = EngineQueue(engine, limit=1)
    engine.events = {4: lambda: queue.admit(1)}
    handler = EngineHandler(queue, LmiRollingContract(MODEL), refuse_unread=lambda _: Reply(429, "", b"full"))
    body = {"inputs": "a", "parameters": {"top_p": 0.5, "max_new_tokens": 7}}
    found = await explained(handler, call(body))
    assert found == await explained(handler_of(ScriptedEngine(), LmiRollingContract(MODEL)), call(body)) | {
        "limits": found["limits"]
    }
    assert found["origins_known"] is True
    assert (queue.open_sequences, queue.statistics.calls.failed) == (1, 0)


@pytest.mark.parametrize("failure", [EngineDead(), GenerationFailed("it failed"), Overloaded("it is busy")])
@pytest.mark.parametrize("at", [2, 3, 6])
async def test_an_engine_that_fails_during_the_search_ends_it(failure: RequestError, at: int) -> None:
    engine = CountingEngine()
    engine.events = {at: lambda: engine.failures.update({0: failure})}
    body = {"inputs": "a", "parameters": {"top_p": 0.5, "max_new_tokens": 7}}
    found = await explained(handler_of(engine, LmiRollingContract(MODEL)), call(body))
    assert (found["origins_known"], found["effect_unknown"], engine.prepared) == (False, [], at)
    assert found["parameters"]["max_tokens"] == {"value": 7, "from": None}


async def test_an_explanation_waits_a_bounded_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "_MOST_SECONDS", 0.01)
    async with (searches := asyncio.Lock()):
        found = await explained(
            handler_of(ScriptedEngine(), LmiRollingContract(MODEL)), call({"inputs": "a"}), searches
        )
    assert found["origins_known"] is False
    assert found["parameters"]["max_tokens"] == {"value": 30, "from": None}


@pytest.mark.parametrize(
    ("header", "limit", "stream", "deadline"),
    [
        ({b"x-slipway-deadline": b"5"}, 5.0, False, {"value": 5.0, "from": "header"}),
        ({}, 5.0, False, {"value": 5.0, "from": "attribute"}),
        ({}, None, False, {"value": 20.0, "from": "option.answer_deadline"}),
        ({}, 70.0, True, {"value": 60.0, "from": "option.stream_deadline"}),
    ],
)
async def test_the_deadline_is_shown_and_does_not_end_the_search(
    header: dict[bytes, bytes], limit: float | None, stream: bool, deadline: dict[str, Any]
) -> None:
    contract = Counting(MODEL)
    queue = EngineQueue(ScriptedEngine(), limit=4, deadlines=DeadlineConfig(answer=20.0, stream=60.0))
    asked = replace(call({"inputs": "a", "stream": stream}), headers=header, time_limit=limit)
    found = await explained(EngineHandler(queue, contract), asked)
    assert found["deadline"] == deadline
    assert found["origins_known"] is True
    assert contract.limits == (limit, *[None] * (contract.bodies - 1))


async def test_a_preparation_ends_at_the_deadline_and_is_not_counted() -> None:
    class Stuck(ScriptedEngine):
        """An engine that never finishes the preparation of a request."""

        async def explain(self, request: GenerationRequest) -> ExplainedRequest:
            await asyncio.Event().wait()
            raise AssertionError

    queue = EngineQueue(engine := Stuck(), limit=4, deadlines=DeadlineConfig(answer=0.01))
    with pytest.raises(ContractError) as refused:
        await explained(EngineHandler(queue, LmiRollingContract(MODEL)), call({"inputs": "a"}))
    assert ("x-slipway-deadline", "reached") in refused.value.reply.headers
    assert (engine.statistics.calls.failed, sum(engine.statistics.deadlines.values()), queue.open_sequences) == (
        0,
        0,
        0,
    )


async def test_a_field_may_set_several_parameters() -> None:
    class Both(LmiRollingContract):
        """A contract whose `top_p` sets `min_p`, too."""

        def parse(self, call: Call) -> Exchange:
            exchange = super().parse(call)
            (request,) = exchange.requests
            sampling = msgspec.structs.replace(request.sampling, min_p=request.sampling.top_p / 2)
            return replace(exchange, requests=(msgspec.structs.replace(request, sampling=sampling),))

    found = await explained(
        handler_of(ScriptedEngine(), Both(MODEL)), call({"inputs": "a", "parameters": {"top_p": 0.5}})
    )
    assert found["translated"] == {"parameters.top_p": ["min_p", "top_p"]}


@pytest.mark.parametrize(
    ("parameters", "fields", "without_effect"),
    [
        # Two fields may set one parameter, or one field may hide the other.
        ({"stop": ["x"], "stop_sequences": ["y"]}, {"stop": ["stop", "stop_sequences"]}, []),
        ({"ignore_eos": True, "ignore_eos_token": True}, {"ignore_eos": ["ignore_eos_token"]}, ["ignore_eos"]),
        # Null counts as absent.
        ({"temperature": None, "top_p": 0.5, "unknown": None}, {"top_p": ["top_p"]}, ["temperature", "unknown"]),
        # Other values of each field are tried. For some fields below, the first of these values has the same meaning as
        # the given value. Other fields below have the lowest or the highest value that is allowed.
        ({"top_k": -1, "top_p": 0.5}, {"top_k": ["top_k"], "top_p": ["top_p"]}, []),
        ({"top_p": 1.0, "min_p": 0.0, "max_new_tokens": 1}, {"top_p": ["top_p"], "min_p": ["min_p"]}, []),
        ({"max_new_tokens": 2048}, {"max_tokens": ["max_new_tokens"]}, []),
        ({"seed": (1 << 63) - 1}, {"seed": ["seed"]}, []),
        # Without sampling, `temperature` has no effect.
        ({"do_sample": False, "temperature": 0.5}, {"temperature": ["do_sample"]}, ["temperature"]),
        # An empty value differs from a missing value.
        ({"stop_sequences": [], "logit_bias": {}}, {"stop": ["stop_sequences"]}, []),
    ],
)
async def test_each_field_has_the_effect_that_it_has(
    parameters: dict[str, Any], fields: dict[str, list[str]], without_effect: list[str]
) -> None:
    found = await explained(
        handler_of(Letters(), LmiRollingContract(MODEL)), call({"inputs": "a", "parameters": parameters})
    )
    set_by = {name: shown.get("fields", []) for name, shown in found["parameters"].items()}
    assert {name: set_by[name] for name in fields} == {
        name: [f"parameters.{field}" for field in by] for name, by in fields.items()
    }
    assert found["without_effect"] == [f"parameters.{name}" for name in without_effect]


VALUES: dict[tuple[str, ...], list[Any]] = {
    ("temperature", "repetition_penalty"): [None, 1e-9, 0.5, 1, 1.0, 1.5],
    ("top_p", "typical_p"): [None, 1e-9, 0.5, 1, 1.0],
    ("top_k",): [None, -1, 0, 1, 30],
    ("min_p", "frequency_penalty"): [None, 0, 0.0, 0.5, 1.0],
    ("max_new_tokens", "truncate", "n", "best_of", "num_beams"): [None, 1, 2],
    ("seed", "min_new_tokens", "unknown"): [None, 0, 1],
    ("do_sample", "details", "ignore_eos", "ignore_eos_token"): [None, True, False],
    ("stop", "stop_sequences", "bad_words"): [None, [], ["a"], ["b", "a"]],
}
PARAMETERS = {name: st.sampled_from(values) for names, values in VALUES.items() for name in names}


@settings(max_examples=40)
@given(st.fixed_dictionaries({}, optional=PARAMETERS))
async def test_fields_without_effect_can_be_left_out(parameters: dict[str, Any]) -> None:
    handler = handler_of(Letters(), LmiRollingContract(MODEL))
    try:
        found = await explained(handler, call({"inputs": "a b c", "parameters": parameters}))
    except ContractError:
        assume(False)  # The body is refused.
    told = {field for shown in found["parameters"].values() for field in shown.get("fields", ())}
    told |= {*found["changes_prompt"], *found["without_effect"], *found["effect_unknown"]}
    assert told == {"inputs", *(f"parameters.{name}" for name in parameters)}
    kept = {name: value for name, value in parameters.items() if f"parameters.{name}" not in found["without_effect"]}
    less = await explained(handler, call({"inputs": "a b c", "parameters": kept}))
    values = [{name: shown["value"] for name, shown in one["parameters"].items()} for one in (found, less)]
    assert values[0] == values[1]
    assert found["prompts"] == less["prompts"]


LONGEST = 10**4300 - 1  # The longest integer that Python writes.


@settings(max_examples=40)
@example({"unknown": LONGEST})
@example({"unknown": [LONGEST]})
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["inputs", "parameters", "stop", "n", "a"]) | st.text(), inner)
        ),
    )
)
async def test_any_body_is_explained_or_refused(document: Any) -> None:
    handler = handler_of(Letters(), LmiRollingContract(MODEL))
    for body in (document, {"inputs": "a", "parameters": document}):
        with contextlib.suppress(ContractError):
            await explained(handler, call(body))
