"""Deadlines: how they are read, and how a call ends at its deadline. The engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.interface import Generation, Sink
from engines.pooling import Pooling
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta, pooling_request
from handlers.contract import Call, ContractError, Exchange
from handlers.deadline import REACHED, DeadlineConfig, read_time_limit
from handlers.engine_handler import EngineHandler
from handlers.formatter_thread import FormatterThread
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.openai.contract import OpenAIContract
from handlers.openai.handler import OpenAIHandler
from handlers.openai.vllm_call import VllmApp
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL, call
from tests.contracts.openai_exchange import FRONT_END
from tests.freed import when_freed
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.request_headers import request_headers
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.waiting import pass_time, until

SOON = 0.02
LATE = 3600.0
CONTRACT = LmiRollingContract(MODEL)


class Stuck(ScriptedEngine):
    """An engine that accepts only `takes` requests. An engine that is being restarted accepts none."""

    def __init__(self, takes: int = 0) -> None:
        super().__init__()
        self._takes, self.left = takes, 0

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if len(self.running) < self._takes:
            return await super().submit(request, sink)
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        raise AssertionError("nothing sets the event")


class Commenting(LmiRollingContract):
    """A contract whose streams begin before their first token, as TGI's do."""

    def parse(self, call: Call) -> Exchange:
        return replace(super().parse(call), comment=b":\n\n")


class Vectors(LmiRollingContract):
    """A contract that asks for vectors."""

    def parse(self, call: Call) -> Exchange:
        exchange = super().parse(call)
        return replace(exchange, requests=(pooling_request("x", Pooling(task="embed")),))


def asked(document: object, seconds: float | None = SOON) -> Call:
    return replace(call(document), time_limit=seconds)


def token(text: str, sequence: int = 0, *, last: bool = False) -> TokenDelta:
    reason = FinishReason.LENGTH if last else None
    return TokenDelta(text, [Token(7, text, -0.5)], sequence, reason, 3, 1, last=last)


@given(
    own=st.none() | st.floats(0.001, 1e6),
    answer=st.none() | st.floats(0.001, 1e6),
    stream=st.none() | st.floats(0.001, 1e6),
    streams=st.none() | st.booleans(),
)
def test_a_call_may_shorten_the_models_deadline_and_never_extend_it(
    own: float | None, answer: float | None, stream: float | None, streams: bool | None
) -> None:
    deadline = DeadlineConfig(answer=answer, stream=stream).of(5.0, own, stream=streams)
    models = stream if streams else answer
    if streams is None:  # The later deadline applies.
        models = None if answer is None or stream is None else max(answer, stream)
    if own is None and models is None:
        assert deadline is None
        return
    assert deadline is not None
    assert deadline.seconds == min(seconds for seconds in (own, models) if seconds is not None)
    assert deadline.at == 5.0 + deadline.seconds


@given(st.floats(0.001, 999_999).map(lambda seconds: f"{seconds:.6f}"))
def test_the_header_and_the_attribute_have_seconds(text: str) -> None:
    assert read_time_limit(request_headers(("X-Slipway-Deadline", text)), ()) == (float(text), None)
    assert read_time_limit({}, [(b"deadline", text.encode())]) == (float(text), None)


def test_the_header_goes_before_the_attribute() -> None:
    headers = request_headers(("X-Slipway-Deadline", "2"))
    assert read_time_limit(headers, [(b"deadline", b"3")]) == (2.0, None)
    assert read_time_limit({}, [(b"route", b"/generate")]) == (None, None)


@given(st.text(st.characters(max_codepoint=255), max_size=40))
def test_any_other_value_is_refused_with_the_name_and_what_is_expected(text: str) -> None:
    seconds, fault = read_time_limit(request_headers(("X-Slipway-Deadline", text)), ())
    assert (seconds is None) == (fault is not None)
    if fault is not None:
        assert fault.parameter == "X-Slipway-Deadline"
        assert "must be seconds, a number above 0, at most 1000000000" in fault.message
    else:
        assert seconds is not None
        assert seconds > 0


@pytest.mark.parametrize(
    "text", ["0", "0.0", "-1", "nan", "inf", "1e10", "1000000001", "1e-999", "", "2 s", "1_0", "٣"]
)
def test_these_are_no_deadlines(text: str) -> None:
    assert read_time_limit({}, [(b"deadline", text.encode())])[1] is not None


class TestCalls:
    pytestmark = pytest.mark.asyncio

    async def test_a_whole_answer_ends_with_its_text_and_its_header_says_so(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "x"}), writer)
        await until(lambda: writer.finished)
        assert writer.whole is not None
        assert writer.whole.status == 200
        assert writer.whole.headers == REACHED
        assert engine.statistics.deadlines == {"partial": 1, "nothing": 0}
        assert (queue.open_sequences, queue.running) == (0, {})

    async def test_a_stream_ends_with_its_text_and_its_last_record_says_so(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "x", "stream": True}), writer)
        engine.sinks[0].on_delta(token("a"))
        await until(lambda: writer.finished)
        assert writer.body.endswith(b'"finish_reason": "length", "generated_tokens": 1, "stop_reason": "deadline"}}\n')

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_models_deadline_of_the_kind_of_answer_holds(self, stream: bool) -> None:
        deadlines = DeadlineConfig(answer=LATE, stream=SOON) if stream else DeadlineConfig(answer=SOON, stream=LATE)
        queue, writer = EngineQueue(ScriptedEngine(), 4, deadlines=deadlines), CollectedReply()
        await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "x", "stream": stream}, LATE), writer)
        await until(lambda: writer.finished)

    async def test_a_whole_call_of_a_handler_has_the_deadline_of_streams(self) -> None:
        deadlines = DeadlineConfig(answer=LATE, stream=SOON)
        queue, writer = EngineQueue(ScriptedEngine(), 4, deadlines=deadlines), CollectedReply()
        await EngineHandler(queue, CONTRACT).handle(replace(asked({"inputs": "x"}, None), from_handler=True), writer)
        await until(lambda: writer.finished)

    async def test_the_time_runs_from_the_arrival_of_the_head(self) -> None:
        queue, writer = EngineQueue(ScriptedEngine(), 4), CollectedReply()
        arrived = replace(asked({"inputs": "x"}, LATE), arrived_at=time.monotonic() - LATE)
        await EngineHandler(queue, CONTRACT).handle(arrived, writer)
        await until(lambda: writer.finished)

    async def test_an_answer_in_time_says_nothing_and_leaves_no_timer(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        running = await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "x"}, LATE), writer)
        assert running is not None
        engine.sinks[0].on_delta(token("y", last=True))
        assert writer.whole is not None
        assert (writer.whole.headers, writer.whole.body) == ((), b'{"generated_text": "y"}')
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 0}
        freed = when_freed(running)
        del engine.running[:], engine.sinks[:], running
        assert freed.is_set()

    @pytest.mark.parametrize("contract", [CONTRACT, Vectors(MODEL)])
    async def test_a_call_with_nothing_gets_an_error_and_is_cancelled(self, contract: LmiRollingContract) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        engine.begun = contract is not CONTRACT
        await EngineHandler(queue, contract).handle(asked({"inputs": "x"}), writer)
        await until(lambda: writer.finished)
        assert writer.whole is not None
        assert writer.whole.status == 424
        assert b"the call had no answer at its deadline (0.02 s)" in writer.whole.body
        assert engine.running[0].cancelled
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 1}
        assert engine.statistics.calls.failed == 1
        assert (queue.open_sequences, queue.running) == (0, {})

    async def test_a_stream_of_comments_alone_ends_with_an_error(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        engine.begun = False
        await EngineHandler(queue, Commenting(MODEL)).handle(asked({"inputs": "x", "stream": True}), writer)
        assert writer.status == 200
        await until(lambda: writer.ended)
        assert b'"finish_reason": "error"' in writer.body

    async def test_waiting_for_an_engine_counts(self) -> None:
        queue, writer = EngineQueue(engine := Stuck(), 4), CollectedReply()
        await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "a"}), writer)
        assert writer.whole is not None
        assert b"at its deadline" in writer.whole.body
        assert writer.whole.headers == REACHED
        assert engine.left == 1
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 1}
        assert (queue.open_sequences, queue.running) == (0, {})

    @pytest.mark.parametrize("begun", [False, True])
    async def test_a_prompt_that_the_engine_does_not_have_ends_empty_if_another_has_a_token(self, begun: bool) -> None:
        queue, writer = EngineQueue(engine := Stuck(takes=1), 8), CollectedReply()
        engine.begun = begun
        document = {"inputs": ["a", "b"], "parameters": {"do_sample": True, "n": 2, "details": True}}
        await EngineHandler(queue, CONTRACT).handle(asked(document), writer)
        assert writer.whole is not None
        assert writer.whole.headers == REACHED
        if begun:
            first, second = json.loads(writer.whole.body)
            assert (first["generated_text"], second["generated_text"]) == ("!", "")
            (other,) = second["details"]["best_of_sequences"]
            for ended in (second["details"], other):
                assert (ended["finish_reason"], ended["stop_reason"]) == ("length", "deadline")
        else:
            assert b"at its deadline" in writer.whole.body
        assert engine.left == 1
        assert engine.running[0].cancelled is not begun
        assert engine.statistics.deadlines == {"partial": begun, "nothing": not begun}
        assert (queue.open_sequences, queue.running) == (0, {})

    async def test_the_usage_has_the_tokens_of_prompts_that_the_engine_does_not_have(self) -> None:
        queue, writer = EngineQueue(Stuck(takes=1), 8), CollectedReply()
        openai = OpenAIHandler(VllmApp(None, None), queue, OpenAIContract(FRONT_END), FRONT_END.model)
        await openai.handle(replace(asked({"prompt": ["a", "b"]}), path="/v1/completions"), writer)
        await until(lambda: writer.finished)
        # The engine says 3 for its prompt. It tokenizes each prompt as 1 token.
        assert b'"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1' in writer.body

    async def test_each_unfinished_sequence_of_each_prompt_ends(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 8), CollectedReply()
        document = {"inputs": ["a", "b"], "parameters": {"do_sample": True, "n": 2, "details": True}}
        await EngineHandler(queue, CONTRACT).handle(asked(document), writer)
        engine.sinks[0].on_delta(token("1", last=False))
        await until(lambda: writer.finished)
        assert writer.body.count(b'"finish_reason": "length"') == 4
        assert writer.body.count(b'"stop_reason": "deadline"') == 4
        assert engine.statistics.deadlines == {"partial": 1, "nothing": 0}

    async def test_an_answer_that_waits_for_its_formatter_is_whole(self) -> None:
        formatted, reached = threading.Event(), threading.Event()

        class Formatted(LmiRollingContract):
            def parse(self, call: Call) -> Exchange:
                exchange = super().parse(call)
                answer = exchange.answer
                feed = answer.feed

                def slow(prompt: int, delta: TokenDelta) -> bytes:
                    formatted.wait(60)
                    return feed(prompt, delta)

                answer.blocks, answer.feed = True, slow  # type: ignore[method-assign]
                return exchange

        class Ended(ScriptedEngine):
            """An engine whose generation has ended before the deadline."""

            async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
                generation = await super().submit(request, sink)
                generation.abort = lambda **_: reached.set()  # type: ignore[method-assign]
                return generation

        queue, writer = EngineQueue(engine := Ended(), 4), CollectedReply()
        handler = EngineHandler(queue, Formatted(MODEL), thread=FormatterThread(60))
        await handler.handle(asked({"inputs": "x"}, 30.0), writer)
        engine.sinks[0].on_delta(token("y", last=True))
        await pass_time(31)
        assert reached.is_set()
        formatted.set()
        await until(lambda: writer.finished)
        assert writer.whole is not None
        assert (writer.whole.headers, writer.whole.body) == ((), b'{"generated_text": "y"}')
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 0}

    async def test_loading_images_counts(self) -> None:
        class Pictures(LmiRollingContract):
            def parse(self, call: Call) -> Exchange:
                return replace(super().parse(call), images=("https://a/b",))

        class Stalled:
            @contextlib.asynccontextmanager
            async def load(self, urls: Sequence[str]) -> AsyncIterator[Sequence[Any]]:
                await asyncio.Event().wait()
                yield ()

        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        handler = EngineHandler(queue, Pictures(MODEL), images=Stalled())
        with pytest.raises(ContractError) as refused:
            await handler.handle(asked({"inputs": "x"}), writer)
        assert (refused.value.reply.status, refused.value.reply.headers) == (424, REACHED)
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 1}

    async def test_a_client_that_has_left_reaches_no_deadline(self) -> None:
        queue, writer = EngineQueue(engine := ScriptedEngine(), 4), CollectedReply()
        running = await EngineHandler(queue, CONTRACT).handle(asked({"inputs": "x"}), writer)
        assert running is not None
        running.cancel()
        later = asyncio.Event()
        # The loop calls its timers in the order of their times.
        asyncio.get_running_loop().call_later(2 * SOON, later.set)
        await later.wait()
        assert not writer.finished
        assert engine.statistics.deadlines == {"partial": 0, "nothing": 0}
