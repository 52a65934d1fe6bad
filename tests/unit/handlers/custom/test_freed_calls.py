"""Calls of a custom handler leave no reference cycles.

The cycles would hold bodies, and the garbage collector runs too rarely to free these in time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import GenerationFailed
from handlers.contract import ContractError
from handlers.formatter_thread import FormatterThread
from tests.freed import bytes_in_cycles
from tests.unit.handlers.custom.harness import Client, Recorder, serving
from tests.waiting import pass_time, until

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_collection_by_itself")]

Call = Callable[[Client, Path], Awaitable[None]]

BODY = b"x" * (1 << 20)
CALLS = 4


def asking(status: int, body: bytes = BODY, **query: str) -> Call:
    """Return a call that is answered with this status."""

    async def ask(client: Client, _: Path) -> None:
        assert (await client.ask(body, query=query)).status == status

    return ask


def ordering(**order: Any) -> Call:
    """Return a call with a body of JSON."""

    async def ask(client: Client, _: Path) -> None:
        body = json.dumps({"pad": BODY.decode(), **order})
        assert (await client.ask(body, content_type="application/json")).finished.is_set()

    return ask


async def together(client: Client, _: Path) -> None:
    await asyncio.gather(*(client.ask(BODY + str(number).encode()) for number in range(3)))


async def leave(client: Client, directory: Path) -> None:
    writer, running = await client.send(BODY, query={"endless": "1000", "journal": str(directory / "journal")})
    await writer.progress.wait()
    running.cancel()
    await until(lambda: not client.handler.pool.busy)


async def leave_queue(client: Client, _: Path) -> None:
    _, first = await client.send(BODY, query={"sleep": "0.1"})
    _, second = await client.send(BODY)
    second.cancel()
    first.cancel()
    await until(lambda: not client.handler.pool.busy)


async def read_slowly(client: Client, _: Path) -> None:
    writer = Recorder()
    writer.taking.clear()
    writer, running = await client.send(BODY * 8, writer=writer)
    running.cancel()
    await until(lambda: not client.handler.pool.busy)


async def be_refused(client: Client, _: Path) -> None:
    client.handler.adapters = frozenset()
    with pytest.raises(ContractError) as refused:
        await client.send(BODY, query={"adapter": "unknown"})
    del refused  # pytest's object and this frame form a reference cycle.
    client.handler.adapters = None


async def be_overdue(client: Client, _: Path) -> None:
    writer, _ = await client.send(BODY, query={"sleep": "3600"})
    await pass_time(61)
    assert (await writer.done()).status == 503


ONE_BY_ONE = {
    "whole": asking(200),
    "stream": asking(200, stream="1"),
    "failed": asking(424, exception="no"),
    "failed stream": asking(200, failing_stream="2"),
    "unreadable status": asking(424, code="7"),
    "left": leave,
    "left in the queue": leave_queue,
    "left before the answer": read_slowly,
    "refused": be_refused,
}
ASYNC = {
    "whole": ordering(do="echo", text="a"),
    "stream": ordering(do="stream"),
    "failed": ordering(do="fail", after=2),
}
ROLLING = {"whole": ordering(text="a", tokens=3), "failed": ordering(text="a", **{"raise": True})}


@pytest.mark.parametrize(
    ("model", "settings", "calls"),
    [
        ("echo", {}, ONE_BY_ONE),
        ("echo", {}, {"worker that ends": asking(503, abort="1")}),
        ("echo", {"predict_timeout": 60.0}, {"overdue": be_overdue}),
        ("batch_echo", {"batch_size": 3, "max_batch_delay": 60.0}, {"batch": together}),
        ("async_echo", {"async_mode": True}, ASYNC),
        ("rolling", {"rolling_batch": True}, ROLLING),
    ],
)
async def test_a_call_leaves_no_cycle_with_its_body(
    model: str, settings: dict[str, Any], calls: dict[str, Call], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    async with serving(model, **settings) as client:
        for name, call in calls.items():
            with subtests.test(name):
                await call(client, tmp_path)
                await until(lambda: client.handler.pool.ready > 0 and not client.handler.pool.busy)
                bytes_in_cycles()
                for _ in range(CALLS):
                    await call(client, tmp_path)
                    await until(lambda: client.handler.pool.ready > 0 and not client.handler.pool.busy)
                assert bytes_in_cycles() < len(BODY)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
async def test_a_formatter_that_fails_leaves_no_cycle_with_its_input(error: type[BaseException]) -> None:
    thread = FormatterThread(30)

    def work(body: bytes) -> None:
        raise error(f"no {len(body)}")

    async def call() -> None:
        body = bytes(BODY)
        with pytest.raises((ValueError, GenerationFailed)) as failed:
            await thread.run(lambda body=body + b"y": work(body))
        del failed

    await call()
    bytes_in_cycles()
    for _ in range(CALLS):
        await call()
    thread.stop()
    assert bytes_in_cycles() < len(BODY)
