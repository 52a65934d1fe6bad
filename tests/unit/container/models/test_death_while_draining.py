"""An engine that dies while its model drains: running calls have the time of the drain, and a new engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from container import server
from container.models import engine_restart
from container.models.life_cycle import Lifecycle, State
from container.models.registry import EngineRestart, Model
from container.settings.server import ServerConfig
from container.settings.settings import Settings, Startup
from engines.interface import EngineHealth, EngineStartError
from handlers.model_config import ModelConfig
from tests.waiting import until


class Engine:
    """A dead engine, and its service. The next process starts when the test says so."""

    custom = queue = adapters = None
    waits = True
    alive = True
    copies = ()
    why: str | None = None  # Why it was stopped. None if it was not.

    def __init__(self) -> None:
        self.engine = self.running_engine = self.runtime = self
        self.restarting, self.may_start = asyncio.Event(), asyncio.Event()
        self.failure: EngineStartError | None = None

    def health(self) -> EngineHealth:
        return EngineHealth(self.alive, "" if self.alive else "the engine has died")

    async def restart(self) -> None:
        self.restarting.set()
        await self.may_start.wait()
        if self.failure is not None:
            raise self.failure
        self.alive = True

    def give_up(self) -> None:
        self.waits = False

    async def stop(self, why: str) -> None:
        self.why = why


SERVER_CONFIG = ServerConfig(engine_restart=3, drain_timeout=60.0, blackbox_dir="")


class Watched:
    """A server with one model, whose engine serves one call."""

    def __init__(self) -> None:
        self.engine = Engine()
        config = ModelConfig(name="m", model_dir=Path(), model_id="m", rolling_batch="vllm")
        self.life = Lifecycle(Settings(server_config=SERVER_CONFIG, config=config))
        service: Any = self.engine
        self.life.service, self.life.stage, self.life.open_calls = service, State.READY, 1
        self.model = Model(self.life, "m")
        self.server = server.ModelServer(Startup(SERVER_CONFIG, ()))
        self.server.models.add(self.model)

    async def drain(self, *, unregister: bool) -> None:
        await (self.server.registrar.unregister(self.model) if unregister else self.server.drain())


@pytest_asyncio.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(server, "_ENGINE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(engine_restart, "LONGEST_PAUSE_SECONDS", 0.01)
    watched = Watched()
    watching = asyncio.create_task(watched.server.watch())
    yield watched
    watching.cancel()
    await watched.server.stop()


@pytest.mark.parametrize("unregister", [False, True], ids=["server", "model"])
@pytest.mark.parametrize("before", [False, True], ids=["while it drains", "before"])
async def test_its_calls_end_on_the_next_engine(watched: Watched, unregister: bool, before: bool) -> None:
    engine = watched.engine
    engine.alive = not before
    if before:
        await engine.restarting.wait()
    draining = asyncio.create_task(watched.drain(unregister=unregister))
    await until(lambda: watched.life.stage is State.DRAINING)
    engine.alive = False
    await engine.restarting.wait()
    engine.may_start.set()
    await until(lambda: engine.alive)
    watched.life.open_calls -= 1
    await draining
    assert engine.waits, "no call got an error"
    if unregister:
        assert engine.why == "model m was unregistered"


async def test_they_get_an_error_at_once_if_it_cannot_be_started(watched: Watched) -> None:
    engine = watched.engine
    engine.failure = EngineStartError("no memory")
    engine.may_start.set()
    draining = asyncio.create_task(watched.server.drain())
    await until(lambda: watched.life.stage is State.DRAINING)
    engine.alive = False
    await until(lambda: not engine.waits)
    watched.life.open_calls -= 1
    await draining
    assert engine.why is None, "it is not loaded anew"


async def test_they_get_an_error_at_once_if_it_may_not_be_started_again(watched: Watched) -> None:
    watched.model.restarts += [EngineRestart(time.monotonic(), frozenset({1}))] * 3
    draining = asyncio.create_task(watched.server.drain())
    await until(lambda: watched.life.stage is State.DRAINING)
    watched.engine.alive = False
    await until(lambda: not watched.engine.waits)
    watched.life.open_calls -= 1
    await draining
    assert not watched.engine.restarting.is_set()


async def test_a_drain_without_calls_waits_for_no_engine(watched: Watched) -> None:
    watched.engine.alive = False
    await watched.engine.restarting.wait()
    watched.life.open_calls -= 1
    await asyncio.wait_for(watched.server.drain(), 30)
