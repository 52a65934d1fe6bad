"""Dynamic batches and custom rolling batches."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.unit.handlers.custom.harness import Client, Recorder, serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio


async def together(client: Client, *texts: str) -> list[Recorder]:
    return await asyncio.gather(*(client.ask(text, headers={"X-Name": "!"}) for text in texts))


async def test_calls_that_come_together_run_as_one_batch() -> None:
    async with serving("batch_echo", batch_size=3, max_batch_delay=60.0) as client:
        begun = time.monotonic()
        answers = await together(client, "a", "b", "c")
    assert time.monotonic() - begun < 50  # full before its time
    assert [answer.body for answer in answers] == [b"a! of 3", b"b! of 3", b"c! of 3"]
    assert [answer.headers for answer in answers] == [{"X-Batch": "3"}] * 3


async def test_a_batch_that_is_not_full_runs_after_the_delay() -> None:
    async with serving("batch_echo", batch_size=8, max_batch_delay=0.2) as client:
        assert [answer.body for answer in await together(client, "a", "b")] == [b"a! of 2", b"b! of 2"]


async def test_a_single_call_is_no_batch() -> None:
    async with serving("batch_echo", batch_size=2, max_batch_delay=0.05) as client:
        assert (await client.ask("a")).body == b"a alone"


async def test_more_calls_than_one_batch_holds_run_as_several() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=60.0, min_workers=2, max_workers=2) as client:
        answers = await together(client, *(f"t{i}" for i in range(20)))
    assert [answer.body.partition(b"!")[0].decode() for answer in answers] == [f"t{i}" for i in range(20)]
    assert all(answer.body.endswith(b" of 4") for answer in answers)


@pytest.mark.parametrize(
    ("word", "status", "text"),
    [
        ("raise", 424, "the batch broke"),
        ("error", 418, "teapot"),
        ("nothing", 204, ""),
        ("accepted", 202, "accepted! of 2"),
        ("short", 400, "Batch output size mismatch, expected: 2, actual: 1"),
        ("twice", 400, "Unexpected batch output key: batch_0.data"),
        ("stream", 400, "a batch of requests cannot be answered with a stream"),
    ],
)
async def test_what_the_handler_does_with_a_batch_concerns_all_its_calls(word: str, status: int, text: str) -> None:
    async with serving("batch_echo", batch_size=2, max_batch_delay=5.0) as client:
        answers = await together(client, word, word)
        assert [answer.status for answer in answers] == [status] * 2
        assert all(text in answer.body.decode() for answer in answers)
        assert (await together(client, "a", "b"))[0].body == b"a! of 2"


async def test_a_client_that_leaves_is_not_part_of_the_batch() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=2.0) as client:
        gone, running = await client.send("gone")
        rest = asyncio.create_task(together(client, "a", "b"))
        await asyncio.sleep(0.05)
        running.cancel()
        assert [answer.body for answer in await rest] == [b"a! of 2", b"b! of 2"]
    assert gone.status == 0


async def test_a_batch_that_hangs_fails_and_the_next_runs() -> None:
    async with serving("batch_echo", batch_size=2, max_batch_delay=60.0, predict_timeout=2.0) as client:
        assert [answer.status for answer in await together(client, "hang", "b")] == [503, 503]
        assert [answer.status for answer in await together(client, "a", "b")] == [200, 200]


async def roll(client: Client, **order: Any) -> Recorder:
    return await client.ask(json.dumps(order))


def rolling(**more: Any) -> Any:
    return serving("rolling", rolling_batch=True, **more)


async def test_rolling_requests_join_and_leave_the_batch_independently() -> None:
    async with rolling() as client:
        answers = await asyncio.gather(
            *(roll(client, text=f"{name}", tokens=count) for name, count in (("a", 1), ("b", 5), ("c", 3)))
        )
    assert [answer.body.decode() for answer in answers] == [
        "a1s/0 ",
        "".join(f"b{i}s/0 " for i in range(1, 6)),
        "".join(f"c{i}s/0 " for i in range(1, 4)),
    ]
    assert [(answer.status, answer.content_type) for answer in answers] == [(200, "application/jsonlines")] * 3
    assert [answer.streamed for answer in answers] == [False, True, True]


async def test_more_rolling_requests_than_places_wait_for_one() -> None:
    async with rolling(max_rolling_batch_size=3) as client:
        answers = await asyncio.gather(*(roll(client, text=f"r{i}_", tokens=i % 4 + 1) for i in range(20)))
    assert [answer.body.decode().count(f"r{i}_") for i, answer in enumerate(answers)] == [i % 4 + 1 for i in range(20)]


async def test_one_rolling_request_can_fail_alone() -> None:
    async with rolling() as client:
        bad, good = await asyncio.gather(roll(client, text="bad", code=400), roll(client, text="g", tokens=2))
    assert (bad.status, bad.content_type, bad.body) == (
        400,
        "application/json",
        b'{"error":"bad parameter","code":400}',
    )
    assert good.body == b"g1s/0 g2s/0 "


@pytest.mark.parametrize("failure", ["raise", "short"])
async def test_a_failed_step_fails_the_whole_batch_and_starts_anew(failure: str) -> None:
    async with rolling() as client:
        failed = await roll(client, text="x", **{failure: True})
        assert failed.status == 424
        assert json.loads(failed.body) == {
            "code": 424,
            "message": "Batch inference failed",
            "properties": {},
            "content": {"keys": [], "values": []},
            "cancelled": False,
        }
        assert (await roll(client, text="y", tokens=1)).body == b"y1s/1 "


async def test_a_rolling_step_that_hangs_or_crashes_fails_its_requests_and_others_are_served() -> None:
    async with rolling(predict_timeout=2.0) as client:
        hung = await roll(client, text="x", hang=True)
        assert hung.status == 424
        assert b"predict_timeout" in hung.body
        crashed = await roll(client, text="x", exit=True)
        assert (crashed.status, b"exited with code 9" in crashed.body) == (503, True)
        assert (await roll(client, text="y", tokens=1)).body == b"y1s/0 "


async def test_a_rolling_batch_that_nobody_waits_for_is_dropped() -> None:
    async with rolling() as client:
        writer, running = await client.send(json.dumps({"text": "x", "tokens": 1_000_000}))
        await writer.progress.wait()
        running.cancel()
        await until(lambda: client.handler.pool.busy == 0)
        assert (await roll(client, text="y", tokens=1)).body == b"y1s/1 "


async def test_a_rolling_client_that_leaves_does_not_disturb_others() -> None:
    async with rolling() as client:
        other = asyncio.create_task(roll(client, text="y", tokens=30))
        writer, running = await client.send(json.dumps({"text": "x", "tokens": 10}))
        await writer.progress.wait()
        running.cancel()
        assert (await other).body.decode().count("y") == 30


async def test_calls_that_are_being_gathered_are_answered_at_stop() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=60) as client:
        gathered, _ = await client.send(b"waits")
        await client.handler.stop()
        assert (await gathered.done()).status == 503


async def test_a_surplus_worker_of_a_rolling_batch_ends_when_it_is_idle() -> None:
    async with serving(
        "rolling", rolling_batch=True, min_workers=1, max_workers=2, max_idle_time=0.3, max_rolling_batch_size=1
    ) as client:
        calls = [await client.send(json.dumps({"text": "a", "tokens": 20})) for _ in range(6)]
        await until(lambda: client.handler.pool.ready == 2)
        for writer, _ in calls:
            assert (await writer.done()).status == 200
        await until(lambda: client.handler.pool.ready == 1)
