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
from tests.waiting import until

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
    _, first = await client.send(BODY, query={"sleep": "0.2"})
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


PATHS: dict[str, tuple[str, dict[str, Any], Call]] = {
    "whole": ("echo", {}, asking(200)),
    "stream": ("echo", {}, asking(200, stream="1")),
    "failed": ("echo", {}, asking(424, exception="no")),
    "failed stream": ("echo", {}, asking(200, failing_stream="2")),
    "unreadable status": ("echo", {}, asking(424, code="7")),
    "left": ("echo", {}, leave),
    "left in the queue": ("echo", {}, leave_queue),
    "left before the answer": ("echo", {}, read_slowly),
    "refused": ("echo", {}, be_refused),
    "worker that ends": ("echo", {}, asking(503, abort="1")),
    "overdue": ("echo", {"predict_timeout": 0.3}, asking(503, sleep="30")),
    "batch": ("batch_echo", {"batch_size": 3, "max_batch_delay": 60.0}, together),
    "async": ("async_echo", {"async_mode": True}, ordering(do="echo", text="a")),
    "async stream": ("async_echo", {"async_mode": True}, ordering(do="stream")),
    "async, failed": ("async_echo", {"async_mode": True}, ordering(do="fail", after=2)),
    "rolling": ("rolling", {"rolling_batch": True}, ordering(text="a", tokens=3)),
    "rolling, failed": ("rolling", {"rolling_batch": True}, ordering(text="a", **{"raise": True})),
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_call_leaves_no_cycle_with_its_body(path: str, tmp_path: Path) -> None:
    model, settings, call = PATHS[path]
    async with serving(model, **settings) as client:
        await call(client, tmp_path)
        await until(lambda: client.handler.pool.ready > 0)
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
