"""Dynamic batches of a custom handler."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.handlers.custom.harness import Client, Recorder, serving
from tests.waiting import pass_time, until


async def together(client: Client, *texts: str) -> list[Recorder]:
    return await asyncio.gather(*(client.ask(text, headers={"X-Name": "!"}) for text in texts))


async def test_calls_that_come_together_run_as_one_batch() -> None:
    async with serving("batch_echo", batch_size=3, max_batch_delay=3600.0) as client:
        answers = await together(client, "a", "b", "c")
    assert [answer.body for answer in answers] == [b"a! of 3", b"b! of 3", b"c! of 3"]
    assert [answer.headers for answer in answers] == [{"X-Batch": "3"}] * 3


async def test_a_batch_that_is_not_full_runs_after_the_delay() -> None:
    async with serving("batch_echo", batch_size=8, max_batch_delay=60.0) as client:
        answers = asyncio.create_task(together(client, "a", "b"))
        await until(lambda: client.handler.pool.queue_length == 2)
        await pass_time(61)
        assert [answer.body for answer in await answers] == [b"a! of 2", b"b! of 2"]


async def test_a_single_call_is_no_batch() -> None:
    async with serving("batch_echo", batch_size=2, max_batch_delay=0.05) as client:
        assert (await client.ask("a")).body == b"a alone"


async def test_more_calls_than_one_batch_holds_run_as_several() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=60.0, min_workers=2, max_workers=2) as client:
        answers = await together(client, *(f"t{i}" for i in range(20)))
    assert [answer.body.partition(b"!")[0].decode() for answer in answers] == [f"t{i}" for i in range(20)]
    assert all(answer.body.endswith(b" of 4") for answer in answers)


async def test_what_the_handler_does_with_a_batch_concerns_all_its_calls(subtests: pytest.Subtests) -> None:
    rows = [
        ("raise", 424, "the batch broke"),
        ("error", 418, "teapot"),
        ("nothing", 204, ""),
        ("accepted", 202, "accepted! of 2"),
        ("short", 400, "Batch output size mismatch, expected: 2, actual: 1"),
        ("twice", 400, "Unexpected batch output key: batch_0.data"),
        ("stream", 400, "a batch of requests cannot be answered with a stream"),
    ]
    async with serving("batch_echo", batch_size=2, max_batch_delay=60.0) as client:
        for word, status, text in rows:
            with subtests.test(word):
                answers = await together(client, word, word)
                assert [answer.status for answer in answers] == [status] * 2
                assert all(text in answer.body.decode() for answer in answers)
                assert (await together(client, "a", "b"))[0].body == b"a! of 2"


async def test_a_client_that_leaves_is_not_part_of_the_batch() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=60.0) as client:
        gone, running = await client.send("gone")
        rest = asyncio.create_task(together(client, "a", "b"))
        await until(lambda: client.handler.pool.queue_length == 3)
        running.cancel()
        await pass_time(61)
        assert [answer.body for answer in await rest] == [b"a! of 2", b"b! of 2"]
    assert gone.status == 0


async def test_a_batch_that_hangs_fails_and_the_next_runs() -> None:
    async with serving("batch_echo", batch_size=2, max_batch_delay=60.0, predict_timeout=60.0) as client:
        hanging = asyncio.create_task(together(client, "hang", "b"))
        await until(lambda: client.handler.pool.busy)
        await pass_time(61)
        assert [answer.status for answer in await hanging] == [503, 503]
        assert [answer.status for answer in await together(client, "a", "b")] == [200, 200]


async def test_calls_that_are_being_gathered_are_answered_at_stop() -> None:
    async with serving("batch_echo", batch_size=4, max_batch_delay=60) as client:
        gathered, _ = await client.send(b"waits")
        await client.handler.stop()
        assert (await gathered.done()).status == 503
