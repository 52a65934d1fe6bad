"""An engine that dies while its model drains: running calls have the time of the drain, and a new engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from container.models.life_cycle import State
from container.models.registry import EngineRestart
from tests.stand_ins.copied_engine import CopiedEngine
from tests.unit.container.models.test_copies import RESTARTS, Watched, watched
from tests.waiting import until


@pytest_asyncio.fixture
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """A server with one model, whose engine serves one call. Its next process starts when the test says so."""
    async with watched(monkeypatch, CopiedEngine(1), may_start=False) as one:
        one.life.open_calls = 1
        yield one


async def drained(one: Watched, *, unregister: bool = False) -> asyncio.Task[None]:
    """Return the drain when it has begun."""
    drain = one.server.registrar.unregister(one.model) if unregister else one.server.drain()
    draining = asyncio.create_task(drain)
    await until(lambda: one.life.stage is State.DRAINING)
    return draining


@pytest.mark.parametrize("unregister", [False, True], ids=["server", "model"])
@pytest.mark.parametrize("before", [False, True], ids=["while it drains", "before"])
async def test_its_calls_end_on_the_next_engine(serving: Watched, unregister: bool, before: bool) -> None:
    engine = serving.engine
    if before:
        engine.die(1)
        await engine.restarting.wait()
    draining = await drained(serving, unregister=unregister)
    engine.die(1)
    await engine.restarting.wait()
    engine.may_start.set()
    await until(lambda: engine.health().alive)
    serving.life.open_calls = 0
    await draining
    assert engine.waits, "no call got an error"
    if unregister:
        assert engine.stopped == "model m was unregistered"


@pytest.mark.parametrize("earlier", [0, RESTARTS], ids=["it cannot be started", "it may not be started again"])
async def test_they_get_an_error_if_there_is_no_next_engine(serving: Watched, earlier: int) -> None:
    engine = serving.engine
    engine.broken = {1}
    engine.may_start.set()
    serving.model.restarts += [EngineRestart(time.monotonic(), frozenset({1}))] * earlier
    draining = await drained(serving)
    engine.die(1)
    await until(lambda: not engine.waits)
    serving.life.open_calls = 0
    await draining
    assert len(engine.attempts) == RESTARTS - earlier
    assert engine.stopped is None, "it is not loaded anew"


async def test_a_drain_without_calls_waits_for_no_engine(serving: Watched) -> None:
    serving.engine.die(1)
    await serving.engine.restarting.wait()
    serving.life.open_calls = 0
    await asyncio.wait_for(serving.server.drain(), 30)
