"""The handler that calls an engine: its places in the queue, its replies and its counts. The engine is scripted."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import weakref
from dataclasses import replace

import pytest

from engines.errors import EngineDead, GenerationFailed, InvalidRequest, RequestError
from engines.interface import Generation, Sink
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta
from handlers.contract import (
    LONG_BODY,
    Answer,
    Call,
    ContractError,
    Exchange,
    Reply,
    not_held_header,
    read_steering,
)
from handlers.deadline import REACHED
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.formatter_thread import FormatterThread
from handlers.happy_vllm.answer import StreamAnswer
from handlers.happy_vllm.routes import HappyVllmContract
from handlers.lmi.dynamic_batch import LmiDynamicContract
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.queue import EngineQueue
from handlers.triton.routes import TritonContract
from tests.contracts.exchange import MODEL, call
from tests.freed import bytes_in_cycles
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.request_headers import request_headers
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.waiting import until


class Commenting(LmiRollingContract):
    """A contract that keeps its streams alive, as TGI's does."""

    def parse(self, call: Call) -> Exchange:
        return replace(super().parse(call), comment=b":\n\n")


def last(text: str) -> TokenDelta:
    return TokenDelta(text, finish_reason=FinishReason.LENGTH, token_count=1, last=True)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def queue(engine: ScriptedEngine) -> EngineQueue:
    return EngineQueue(engine, limit=4)


CONTRACT = LmiRollingContract(MODEL)


async def test_a_place_is_taken_while_a_call_runs_and_free_after(queue: EngineQueue, engine: ScriptedEngine) -> None:
    writer = CollectedReply()
    running = await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x"}), writer)
    assert running is not None
    assert queue.open_sequences == 1
    engine.sinks[0].on_delta(last("y"))
    running.cancel()
    assert queue.open_sequences == 0
    assert writer.whole is not None
    assert writer.whole.body == b'{"generated_text": "y"}'


async def test_sequences_count_and_what_does_not_fit_is_refused(queue: EngineQueue) -> None:
    sampling = {"do_sample": True}
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": ["a", "b", "c"]}), CollectedReply())
    with pytest.raises(ContractError) as full:
        await EngineHandler(queue, CONTRACT).handle(
            call({"inputs": "x", "parameters": sampling | {"n": 2}}), CollectedReply()
        )
    assert full.value.reply.status == 503
    with pytest.raises(ContractError) as never:
        await EngineHandler(queue, CONTRACT).handle(
            call({"inputs": ["a", "b"], "parameters": sampling | {"n": 3}}), CollectedReply()
        )
    assert never.value.reply.status == 424
    assert "at most 4 can be served" in never.value.reason
    assert queue.open_sequences == 3


def steered(given: Call, *headers: tuple[str, str]) -> Call:
    """Return a call with an API key and these headers."""
    steering, fault = read_steering(request_headers(*headers), "of the key")
    return replace(given, steering=steering, steering_fault=fault)


async def test_headers_and_the_key_steer_every_prompt_of_a_call(queue: EngineQueue, engine: ScriptedEngine) -> None:
    given = steered(call({"inputs": ["a", "b"]}), ("Traceparent", "00-1-2-01"), ("X-Vllm-Priority", "-3"))
    await EngineHandler(queue, CONTRACT).handle(given, CollectedReply())
    salted = replace(steered(given, ("X-Cache-Salt", "own")), request_id="s")
    await EngineHandler(queue, CONTRACT).handle(salted, CollectedReply())
    seen = [(r.trace_context, r.priority, r.cache_salt) for r in (running.request for running in engine.running)]
    first = ({"traceparent": "00-1-2-01"}, -3, "of the key")
    assert seen == [first, first, (None, 0, "own"), (None, 0, "own")]


@pytest.mark.parametrize("priority", ["high", "", "1.5", "2147483648", "99999999999999999999", "\xb2"])
async def test_a_wrong_priority_is_refused_in_the_form_of_the_contract(queue: EngineQueue, priority: str) -> None:
    given = steered(call({"inputs": "a"}), ("X-Vllm-Priority", priority))
    with pytest.raises(ContractError) as refused:
        await EngineHandler(queue, CONTRACT).handle(given, CollectedReply())
    assert refused.value.reply.status == 424
    assert re.search(rf"`X-Vllm-Priority` .*{re.escape(repr(priority))}", refused.value.reason)
    assert queue.open_sequences == 0


@pytest.mark.parametrize("salt", ["../etc", "a@b", "a\\b", "x" * 129, "\xe9", "a b"])
async def test_a_salt_that_vllm_would_refuse_is_refused(queue: EngineQueue, salt: str) -> None:
    given = steered(call({"inputs": "a"}), ("X-Cache-Salt", salt))
    with pytest.raises(ContractError) as refused:
        await EngineHandler(queue, CONTRACT).handle(given, CollectedReply())
    assert "`X-Cache-Salt` must have at most 128 characters of visible ASCII" in refused.value.reason


async def test_where_no_place_is_left_a_call_is_refused_before_its_body_is_understood(queue: EngineQueue) -> None:
    handler = EngineHandler(queue, CONTRACT, refuse_unread=overloaded)
    await handler.handle(call({"inputs": ["a", "b", "c", "d"]}), CollectedReply())
    with pytest.raises(ContractError) as full:
        await handler.handle(call(b"{"), CollectedReply())
    with pytest.raises(ContractError) as understood:
        await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x", "stream": True}), CollectedReply())
    assert full.value.reply == understood.value.reply
    assert full.value.reply.status == 503
    assert queue.engine.statistics.calls.failed == 2


@pytest.mark.parametrize("failure", [GenerationFailed("no"), ZeroDivisionError("a bug")])
async def test_a_submit_that_fails_frees_every_place_and_cancels_the_others(
    queue: EngineQueue, engine: ScriptedEngine, failure: Exception
) -> None:
    engine.failures[1] = failure
    with pytest.raises((ContractError, ZeroDivisionError)):
        await EngineHandler(queue, CONTRACT).handle(call({"inputs": ["a", "b"]}), CollectedReply())
    assert queue.open_sequences == 0
    assert [running.cancelled for running in engine.running] == [True]


class Eager(ScriptedEngine):
    """An engine that generates a token for each prompt before it takes the next prompt."""

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        generation = await super().submit(request, sink)
        sink.on_delta(TokenDelta(" a", token_count=1))
        return generation


async def test_a_prompt_that_is_refused_once_the_stream_has_begun_ends_it_with_the_error() -> None:
    engine, writer = Eager(), CollectedReply()
    engine.failures[1] = InvalidRequest("the prompt is too long")
    queue = EngineQueue(engine, limit=4)
    contract = LmiDynamicContract(replace(MODEL, rolling_batch="disable", enable_streaming="huggingface"))
    running = await EngineHandler(queue, contract).handle(call({"inputs": ["x", "y"]}), writer)
    assert writer.whole is None
    assert (writer.status, writer.content_type) == (200, "application/jsonlines")
    records = [json.loads(line) for line in writer.body.splitlines()]
    assert records[0] == {"outputs": ["x", "y"]}
    assert records[1:] == [
        {"outputs": [" a", ""]},
        {"code": 424, "message": "invoke handler failure", "error": "the prompt is too long"},
    ]
    assert [one.cancelled for one in engine.running] == [True]
    running.cancel()
    assert (queue.open_sequences, engine.statistics.calls.failed) == (0, 1)


async def test_an_aborted_stream_ends_as_aborted_with_what_there_is(queue: EngineQueue, engine: ScriptedEngine) -> None:
    writer = CollectedReply()
    body = {"inputs": "x", "stream": True, "parameters": {"details": True}}
    await EngineHandler(queue, CONTRACT).handle(call(body), writer)
    engine.sinks[0].on_delta(TokenDelta("y", [Token(7, "y", -0.5)], token_count=1))
    queue.abort("r")
    assert engine.running[0].aborted
    assert queue.open_sequences == 0
    assert b'"generated_text": "y!"' in writer.body
    assert b'"finish_reason": "abort", "generated_tokens": 1' in writer.body
    queue.abort("r")
    assert writer.body.count(b'"abort"') == 1


async def test_a_stream_with_a_comment_begins_at_once_and_comments_while_it_is_idle(
    queue: EngineQueue, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handlers.running_call.KEEP_ALIVE_SECONDS", 0.05)
    writer = CollectedReply()
    await EngineHandler(queue, Commenting(MODEL)).handle(call({"inputs": "x", "stream": True}), writer)
    assert (writer.status, writer.content_type) == (200, "application/jsonlines")
    assert writer.body == b""
    await until(lambda: len(writer.parts) > 1)
    assert set(writer.parts) == {b":\n\n"}
    engine.sinks[0].on_delta(TokenDelta("y", [Token(7, "y", -0.5)], finish_reason=FinishReason.EOS, last=True))
    assert writer.ended
    assert b'"generated_text": "y"' in writer.parts[-1]
    sent = len(writer.parts)
    await asyncio.sleep(0.1)
    assert len(writer.parts) == sent


async def test_an_aborted_batch_ends_every_sequence_that_is_open(queue: EngineQueue, engine: ScriptedEngine) -> None:
    writer = CollectedReply()
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": ["a", "b"], "parameters": {"details": True}}), writer)
    engine.sinks[1].on_delta(last("done"))
    queue.abort("no such call")
    assert not writer.finished
    queue.abort("r")
    answers = json.loads(writer.body)
    assert [answer["generated_text"] for answer in answers] == ["!", "done"]
    assert [answer["details"]["finish_reason"] for answer in answers] == ["abort", "length"]
    assert [answer["details"]["generated_tokens"] for answer in answers] == [1, 1]


async def test_calls_are_counted_as_succeeded_or_failed_and_not_when_the_client_leaves(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    calls = engine.statistics.calls
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x"}), CollectedReply())
    engine.sinks[0].on_delta(last("y"))
    assert (calls.succeeded, calls.failed) == (1, 0)
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x"}), CollectedReply())
    engine.sinks[1].on_error(GenerationFailed("no"))
    assert (calls.succeeded, calls.failed) == (1, 1)
    running = await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x"}), CollectedReply())
    running.cancel()
    assert (calls.succeeded, calls.failed) == (1, 1)
    assert calls.succeeded_seconds > 0
    assert time.time() - calls.last_at < 60


async def test_a_call_is_answered_once_when_the_engine_dies_while_it_is_submitted(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    engine.failures[1] = EngineDead()
    writer = CollectedReply()
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": ["a", "b"]}), writer)
    assert writer.whole is not None
    assert writer.whole.status == 500
    assert queue.open_sequences == 0


async def test_one_failed_prompt_fails_its_call_and_cancels_its_mates(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    writer = CollectedReply()
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": ["a", "b"]}), writer)
    engine.sinks[0].on_delta(last("done"))
    engine.sinks[1].on_error(GenerationFailed("it broke"))
    engine.sinks[1].on_delta(last("late"))
    assert writer.whole is not None
    assert json.loads(writer.whole.body)["error"] == "it broke"
    assert all(running.cancelled for running in engine.running)
    assert queue.open_sequences == 0


class Shouting:
    """An answer that may block or fail, as a customer's formatter may."""

    content_type = "text/plain"
    headers = ()
    blocks = True

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        if delta.text == "bad":
            raise GenerationFailed("the formatter failed")
        if delta.text == "bug":
            raise ZeroDivisionError("a bug")
        time.sleep(0.01)
        return delta.text.upper().encode()

    def fail(self, error: RequestError) -> Reply:
        return Reply(424, "", error.message.encode())

    def fail_midway(self, error: RequestError) -> bytes:
        return b"!" + error.message.encode()


class ShoutingContract:
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def parse(self, call: Call) -> Exchange:
        if call.body == b"refuse":
            raise ContractError(Reply(424, "", b"refused"), "refused")
        if call.body == b"hang":
            self.may_end.wait()
        if call.body == b"leave":
            raise SystemExit(1)
        return Exchange((GenerationRequest(request_id="r", prompt="x"),), Shouting())

    def refusal(self, error: RequestError) -> Reply:
        return Reply(424, "", error.message.encode())


async def shout(queue: EngineQueue, engine: ScriptedEngine, *deltas: TokenDelta) -> CollectedReply:
    writer = CollectedReply()
    contract = EngineHandler(queue, ShoutingContract(), thread=FormatterThread(60))
    await contract.handle(Call(body=b"", request_id="r"), writer)
    for delta in deltas:
        engine.sinks[-1].on_delta(delta)
    await until(lambda: writer.finished)
    return writer


async def test_a_contract_that_may_block_answers_in_order_off_the_event_loop(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    deltas = [TokenDelta(f"t{i} ", last=i == 19) for i in range(20)]
    writer = await shout(queue, engine, *deltas)
    assert writer.body == "".join(f"T{i} " for i in range(20)).encode()
    assert queue.open_sequences == 0


@pytest.mark.parametrize(("text", "message"), [("bad", b"the formatter failed"), ("bug", b"internal error: a bug")])
async def test_a_formatter_that_fails_ends_its_request_and_frees_its_place(
    queue: EngineQueue, engine: ScriptedEngine, text: str, message: bytes
) -> None:
    writer = await shout(queue, engine, TokenDelta("ok "), TokenDelta(text), TokenDelta("late", last=True))
    assert writer.body == b"OK !" + message
    assert engine.running[-1].cancelled
    assert queue.open_sequences == 0
    assert (await shout(queue, engine, TokenDelta(text), TokenDelta("late"))).body == message


async def test_a_refusal_by_a_contract_that_may_block_is_a_refusal(queue: EngineQueue) -> None:
    contract = EngineHandler(queue, ShoutingContract(), thread=FormatterThread(60))
    with pytest.raises(ContractError):
        await contract.handle(Call(body=b"refuse", request_id="r"), CollectedReply())


@pytest.mark.parametrize(
    ("body", "limit", "reason"), [(b"hang", 0.1, "predict_timeout"), (b"leave", 60, "SystemExit: 1")]
)
async def test_a_contract_that_hangs_or_exits_while_it_reads_refuses_its_call(
    queue: EngineQueue, body: bytes, limit: float, reason: str
) -> None:
    contract = ShoutingContract()
    handler = EngineHandler(queue, contract, thread=FormatterThread(limit))
    with pytest.raises(ContractError, match=reason) as refused:
        await handler.handle(Call(body=body, request_id="r"), CollectedReply())
    contract.may_end.set()
    assert refused.value.reply.status == 424


async def test_a_call_whose_input_formatter_runs_at_the_deadline_gets_the_error_and_leaves_nothing(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    class Waiting(ShoutingContract):
        def parse(self, call: Call) -> Exchange:
            if call.body:
                release.wait()
            exchange = super().parse(call)
            parsed.append(weakref.ref(exchange.answer))
            return exchange

    release, parsed = threading.Event(), list[weakref.ref[Answer]]()
    handler = EngineHandler(queue, Waiting(), thread=FormatterThread(60))
    with pytest.raises(ContractError, match=r"no answer at its deadline \(0.05 s\)") as refused:
        await handler.handle(Call(body=b"wait", request_id="r", time_limit=0.05), CollectedReply())
    assert (refused.value.reply.status, refused.value.reply.headers) == (424, REACHED)
    assert engine.statistics.deadlines == {"partial": 0, "nothing": 1}
    assert (queue.open_sequences, queue.running, engine.sinks) == (0, {}, [])
    del refused  # Its traceback holds the frames that wait for the formatter.
    release.set()
    await until(lambda: bool(parsed) and parsed[0]() is None)
    await handler.handle(Call(body=b"", request_id="r", time_limit=60.0), CollectedReply())
    assert len(engine.sinks) == 1


async def test_nothing_more_is_formatted_for_a_client_that_has_gone(queue: EngineQueue, engine: ScriptedEngine) -> None:
    contract = EngineHandler(queue, ShoutingContract(), thread=FormatterThread(60))
    gone = await contract.handle(Call(body=b"", request_id="r"), CollectedReply())
    for _ in range(6000):
        engine.sinks[-1].on_delta(TokenDelta("x"))
    gone.cancel()
    started = time.monotonic()
    await shout(queue, engine, last("next"))
    assert time.monotonic() - started < 30, "six thousand calls of 10 ms each were made for nobody"


async def test_an_answer_that_does_not_block_does_not_wait_for_formatters(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    class Plain(Shouting):
        blocks = False

    class PlainContract(ShoutingContract):
        def parse(self, call: Call) -> Exchange:
            return replace(super().parse(call), answer=Plain())

    thread, begun, release = FormatterThread(60), threading.Event(), threading.Event()
    writer = CollectedReply()
    await EngineHandler(queue, PlainContract(), thread=thread).handle(Call(body=b"", request_id="r"), writer)
    blocking: asyncio.Future[object] = asyncio.ensure_future(thread.run(lambda: begun.set() or release.wait()))
    await until(begun.is_set)
    engine.sinks[-1].on_delta(last("done"))
    assert writer.body == b"DONE"
    release.set()
    await blocking


@pytest.mark.usefixtures("no_collection_by_itself")
async def test_a_formatted_call_that_has_ended_is_in_no_cycle(queue: EngineQueue, engine: ScriptedEngine) -> None:
    class Long(ShoutingContract):
        def parse(self, call: Call) -> Exchange:
            request = GenerationRequest(request_id="r", prompt=f"{len(call.body)}" * 100_000)
            return replace(super().parse(call), requests=(request,))

    async def ask(text: str) -> None:
        writer = CollectedReply()
        await EngineHandler(queue, Long(), thread=FormatterThread(60)).handle(Call(body=b"", request_id="r"), writer)
        engine.sinks[-1].on_delta(last(text))
        await until(lambda: writer.finished)
        engine.sinks.clear()
        engine.running.clear()

    for text in ("done", "bad"):
        await ask(text)
        bytes_in_cycles()
        await ask(text)
        assert bytes_in_cycles() < 100_000


async def test_a_body_that_takes_long_to_read_is_read_in_a_thread(queue: EngineQueue, engine: ScriptedEngine) -> None:
    class Slow(ShoutingContract):
        def parse(self, call: Call) -> Exchange:
            threads.append(threading.current_thread())
            return super().parse(call)

    threads: list[threading.Thread] = []
    for body in (b"", b" " * LONG_BODY):
        await EngineHandler(queue, Slow()).handle(Call(body=body, request_id="r"), CollectedReply())
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_an_answer_that_has_room_for_one_response_ends_the_call_at_the_second(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    body = b'{"text_input": "x", "stream": true}'
    writer = CollectedReply()
    generate = TritonContract(MODEL, engine, events=False)
    await EngineHandler(queue, generate).handle(
        Call(body=body, request_id="r", path_parameters={"model": MODEL.name}), writer
    )
    engine.sinks[0].on_delta(TokenDelta("y", token_count=1))
    assert not writer.finished
    engine.sinks[0].on_delta(TokenDelta("z", token_count=2))
    assert writer.whole is not None
    assert writer.whole.status == 400
    assert engine.running[0].cancelled
    assert (queue.open_sequences, engine.statistics.calls.failed) == (0, 1)
    engine.sinks[0].on_delta(last("!"))  # The writer would refuse a second reply.


async def cumulative(queue: EngineQueue, sequences: int) -> CollectedReply:
    writer = CollectedReply()
    body = {"prompt": "x", "n": sequences, "temperature": 1.0}
    await EngineHandler(queue, HappyVllmContract(MODEL, stream=True)).handle(call(body), writer)
    return writer


async def test_a_cumulative_answer_has_a_line_for_an_engine_step_and_not_for_each_sequence(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    writer = await cumulative(queue, 3)
    for step in range(2):
        for sequence in range(3):
            engine.sinks[0].on_delta(TokenDelta("y", sequence=sequence, token_count=step + 1))
        await asyncio.sleep(0)
    assert [json.loads(line)["responses"] for line in writer.parts] == [["y"] * 3, ["yy"] * 3]
    for sequence in range(3):
        end = TokenDelta("!", [], sequence, FinishReason.EOS, token_count=3, last=sequence == 2)
        engine.sinks[0].on_delta(end)
    await asyncio.sleep(0)
    assert writer.ended
    assert [json.loads(line)["responses"] for line in writer.parts[2:]] == [["yy!"] * 3]
    assert queue.open_sequences == 0


async def test_a_single_cumulative_sequence_is_told_at_once_and_long_ones_less_often(
    queue: EngineQueue, engine: ScriptedEngine
) -> None:
    writer = await cumulative(queue, 1)
    engine.sinks[0].on_delta(TokenDelta("y" * 400_000, token_count=1))
    assert len(writer.parts) == 1
    for count in range(100):
        engine.sinks[0].on_delta(TokenDelta("z", token_count=count))
        await asyncio.sleep(0)
    assert len(writer.parts) < 50
    engine.sinks[0].on_delta(last("!"))
    assert json.loads(writer.parts[-1])["responses"] == ["y" * 400_000 + "z" * 100 + "!"]
    sent = len(writer.parts)
    await asyncio.sleep(0.05)
    assert writer.ended
    assert len(writer.parts) == sent


async def test_a_part_that_cannot_be_made_between_two_steps_ends_the_reply_and_is_logged(
    queue: EngineQueue, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: StreamAnswer) -> bytes:
        raise ZeroDivisionError("a bug")

    writer = await cumulative(queue, 3)
    monkeypatch.setattr(StreamAnswer, "latest", broken)
    engine.sinks[0].on_delta(TokenDelta("y", token_count=1))
    await asyncio.sleep(0)
    assert writer.finished
    assert engine.running[0].cancelled
    assert queue.open_sequences == 0
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_an_error_names_no_such_parts(queue: EngineQueue, engine: ScriptedEngine) -> None:
    writer = CollectedReply()
    engine.not_held = ("#/a/contains",)
    await EngineHandler(queue, CONTRACT).handle(call({"inputs": "x"}), writer)
    engine.sinks[0].on_error(GenerationFailed("no token"))
    assert writer.whole is not None
    assert "x-slipway-not-held" not in dict(writer.whole.headers)


async def test_a_header_of_many_parts_ends_with_the_number_of_the_rest() -> None:
    places = [f"#/properties/{number}/uniqueItems" for number in range(100)]
    ((_, text),) = not_held_header(places)
    *shown, rest = text.split(",")
    assert shown == places[: len(shown)]
    assert rest == f"+{100 - len(shown)}"
    assert 950 < len(text) <= 1000
    assert not_held_header(["x" * 2000]) == (("x-slipway-not-held", "+1"),)
    assert not_held_header(["x" * 300] * 3 + ["y" * 200_000] * 500) == (
        ("x-slipway-not-held", ",".join(["x" * 300] * 3 + ["+500"])),
    )
    assert not_held_header([]) == ()
