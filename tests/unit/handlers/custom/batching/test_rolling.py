"""Rolling batches of a custom handler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.handlers.custom.harness import Client, Recorder, serving
from tests.waiting import pass_time, until


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
    async with rolling(predict_timeout=60.0) as client:
        hanging = asyncio.create_task(roll(client, text="x", hang=True))
        await until(lambda: client.handler.pool.busy)
        await pass_time(61)
        hung = await hanging
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


async def test_a_surplus_worker_of_a_rolling_batch_ends_when_it_is_idle() -> None:
    async with serving(
        "rolling", rolling_batch=True, min_workers=1, max_workers=2, max_idle_time=0.3, max_rolling_batch_size=1
    ) as client:
        calls = [await client.send(json.dumps({"text": "a", "tokens": 1_000_000})) for _ in range(6)]
        await until(lambda: client.handler.pool.ready == 2)
        for _, running in calls:
            running.cancel()
        await until(lambda: client.handler.pool.ready == 1)
