"""A handler in async mode: many calls at once in one worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from handlers.contract import ContractError, Running
from handlers.custom.batching import dynamic
from tests.unit.handlers.custom.harness import Client, Recorder, serving
from tests.waiting import pass_time, until


async def send(client: Client, writer: Recorder | None = None, **order: Any) -> tuple[Recorder, Running]:
    return await client.send(json.dumps(order), content_type="application/json", writer=writer)


async def ask(client: Client, **order: Any) -> Recorder:
    return await (await send(client, **order))[0].done()


async def test_one_part_that_is_the_last_is_a_whole_answer() -> None:
    async with serving("async_echo", async_mode=True) as client:
        answer = await ask(client, do="echo", text="grüß")
    assert not answer.streamed
    assert (answer.status, answer.content_type, answer.body.decode()) == (200, "application/jsonlines", "grüß")


async def test_parts_of_an_async_generator_are_streamed_in_order() -> None:
    async with serving("async_echo", async_mode=True) as client:
        answer = await ask(client, do="stream", count=1000)
    assert answer.streamed
    assert answer.body.decode().splitlines() == [f"t-{i}" for i in range(1000)]


async def test_calls_run_at_the_same_time_and_each_gets_its_own_answer() -> None:
    async with serving("async_echo", async_mode=True, min_workers=2, max_workers=2, queue_size=1000) as client:
        # Each worker answers its hundred calls when it has all of them.
        answers = await asyncio.gather(*(ask(client, do="meet", text=f"{i}", calls=100) for i in range(200)))
        streams = await asyncio.gather(*(ask(client, do="stream", text=f"s{i}", delay=0.001) for i in range(100)))
    assert [answer.body for answer in answers] == [b"%d" % i for i in range(200)]
    assert [s.body.decode() for s in streams] == ["".join(f"s{i}-{j}\n" for j in range(5)) for i in range(100)]


async def test_what_the_handler_yields_decides_status_and_body(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], int, bytes]] = [
        ({"do": "code", "code": 422}, 422, b'{"error":"not \\u003callowed\\u003e","code":422}'),
        ({"do": "code", "code": 7}, 424, b'{"error":"not \\u003callowed\\u003e","code":424}'),
        ({"do": "nothing"}, 204, b""),
        ({"do": "plain"}, 201, b"plain"),
        ({"do": "fail", "after": 2}, 200, b't-0\nt-1\n{"error":"the stream broke","code":424}'),
    ]
    async with serving("async_echo", async_mode=True) as client:
        for order, status, body in rows:
            with subtests.test(order=order):
                answer = await ask(client, **order)
                assert (answer.status, answer.body) == (status, body)


async def test_a_failure_before_the_first_part_is_424(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"do": "raise"}, "refused"),
        ({"do": "fail", "after": 0}, "the stream broke"),
        ({"do": "wrong_type"}, "Invalid output type: <class 'int'>"),
        (
            {"do": "sync_stream"},
            "async mode does not read stream content: return an async generator of Outputs instead",
        ),
    ]
    async with serving("async_echo", async_mode=True) as client:
        for order, text in rows:
            with subtests.test(order=order):
                answer = await ask(client, **order)
                assert (answer.status, answer.content_type) == (424, "application/json")
                assert json.loads(answer.body) == {"code": 424, "message": "invoke handler failure", "error": text}


async def test_a_slow_client_holds_up_neither_others_nor_memory() -> None:
    slow = Recorder()
    slow.taking.clear()
    async with serving("async_echo", async_mode=True) as client:
        await send(client, slow, do="stream", count=1_000_000, text="slow" * 1000)
        await until(lambda: len(slow.body) > 100_000)
        quick = await asyncio.gather(*(ask(client, do="stream", text=f"q{i}") for i in range(20)))
        assert all(len(answer.body.splitlines()) == 5 for answer in quick)
        held = 0
        async with asyncio.timeout(60):
            while len(slow.body) > held:  # Data that was already sent arrives. Then nothing more follows.
                held = len(slow.body)
                await asyncio.sleep(0.3)
        assert held < 600_000
        slow.taking.set()
        await until(lambda: len(slow.body) > 2 * held)
        assert not slow.finished.is_set()


async def test_a_call_is_cancelled_when_its_client_goes_away() -> None:
    async with serving("async_echo", async_mode=True) as client:
        writers = [await send(client, do="stream", count=1000, delay=0.01, text=f"c{i}") for i in range(100)]
        for writer, running in writers:
            await writer.progress.wait()
            running.cancel()
        await until(lambda: client.handler.pool.busy == 0)
        state = (await ask(client, do="state")).body.decode()
    assert state.startswith("0 ")
    assert state.count("c") == 100


async def test_a_call_that_takes_too_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "CANCEL_PATIENCE", 120.0)
    async with serving("async_echo", async_mode=True, predict_timeout=60.0) as client:
        pids = client.pids
        late, _ = await send(client, do="sleep", seconds=3600)
        stream, reading = await send(client, do="stream", count=1_000_000, delay=0.01)
        for _ in range(2):
            received = len(stream.parts)
            await until(lambda received=received: len(stream.parts) > received)
            assert not late.status
            await pass_time(40)
        await late.done()
        assert late.status == 503
        assert not stream.finished.is_set()
        reading.cancel()
        assert b"predict_timeout" in late.body
        assert (await ask(client, do="echo", text="x")).body == b"x"
        assert (client.pids, client.handler.pool.failures) == (pids, 0)


async def test_a_crash_fails_all_calls_that_the_worker_had() -> None:
    async with serving("async_echo", async_mode=True) as client:
        stream, _ = await send(client, do="stream", count=1000, delay=0.01)
        sleeping, _ = await send(client, do="sleep", seconds=60)
        await stream.progress.wait()
        os.kill(client.pids[0], signal.SIGKILL)
        await stream.done()
        await sleeping.done()
        assert stream.status == 200
        assert json.loads(stream.body.splitlines()[-1])["code"] == 503
        assert sleeping.status == 503
        assert (await ask(client, do="echo", text="again")).body == b"again"


async def test_more_calls_than_the_queue_holds_are_refused() -> None:
    async with serving("async_echo", async_mode=True, queue_size=2, grace=0.2) as client:
        for _ in range(4):
            await send(client, do="sleep", seconds=600)
        with pytest.raises(ContractError) as refused:
            await send(client, do="echo", text="x")
    assert refused.value.reply.status == 529


async def test_a_worker_beyond_a_lower_number_gets_no_more_calls_and_ends_after_its_last() -> None:
    async with serving("async_echo", async_mode=True, min_workers=2, max_workers=2, grace=0.2) as client:
        pool = client.handler.pool
        _, first = await send(client, do="sleep", seconds=600)
        _, last = await send(client, do="sleep", seconds=600)
        assert pool.busy == 2
        pool.scale(1, 1)
        for _ in range(3):
            await send(client, do="sleep", seconds=600)
        assert [worker.calls for worker in pool.workers] == [4, 1]
        first.cancel()
        last.cancel()
        await until(lambda: [worker.id for worker in pool.workers] == [1])
        assert (await ask(client, do="echo", text="on")).body == b"on"
        assert pool.failures == 0


async def test_stopping_lets_running_calls_finish() -> None:
    async with serving("async_echo", async_mode=True, grace=60.0) as client:
        writer, _ = await send(client, do="stream", delay=0.1)
        await writer.progress.wait()
        await client.handler.stop()
        assert len(writer.body.splitlines()) == 5


async def test_calls_cancelled_before_they_begin_leave_nothing_behind() -> None:
    async with serving("async_echo", async_mode=True, predict_timeout=60.0) as client:
        blocking = asyncio.ensure_future(ask(client, do="block", seconds=0.5))
        await until(lambda: client.handler.pool.busy)
        for _ in range(20):
            _, running = await client.send(json.dumps({"do": "echo", "text": "x"}))
            running.cancel()
        assert (await blocking).body == b"blocked"
        await until(lambda: not client.handler.pool.busy)
        await pass_time(61)
        assert (await ask(client, do="echo", text="on")).body == b"on"
        assert client.handler.pool.failures == 0


@pytest.mark.parametrize("do", ["exit", "exit_later", "background_exit"])
async def test_a_handler_that_exits_loses_its_calls_and_says_so(do: str) -> None:
    async with serving("async_echo", async_mode=True) as client:
        innocent, _ = await client.send(json.dumps({"do": "sleep", "seconds": 600}))
        answer = await ask(client, do=do)
        assert b"exited with code 3" in answer.body
        assert (answer.status, answer.body.startswith(b"t-0\n")) == (
            (200, True) if do == "exit_later" else (503, False)
        )
        assert (await innocent.done()).status == 503
        assert (await ask(client, do="echo", text="on")).body == b"on"
