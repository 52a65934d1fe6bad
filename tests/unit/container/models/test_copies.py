"""Copies of a model that die while others serve. They are restarted, and calls continue."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio

from container import server
from container.models import engine_restart, life_cycle
from container.models.life_cycle import Lifecycle, State
from container.models.registry import EngineRestart, Model
from container.observability import logs
from container.observability.error_rates import ErrorRates
from container.ping import ping
from container.settings.server import ServerConfig
from container.settings.settings import Settings, Startup
from engines.errors import NotReady
from engines.interface import CopyState, EngineStartError
from handlers.loaded_service import Service
from handlers.model_config import ModelConfig
from tests.stand_ins.copied_engine import CopiedEngine
from tests.waiting import until

RESTARTS = 3


def service_of(engine: Any) -> Service:
    return Service(ModelConfig(name="m", model_dir=Path(), model_id="m"), Mock(), engine, engine=engine)


class Watched:
    """A server with one model, which runs on copies."""

    def __init__(self, engine: CopiedEngine, **settings: Any) -> None:
        self.engine = engine
        self.server_config = ServerConfig(
            **{"engine_restart": RESTARTS, "drain_timeout": 60.0, "blackbox_dir": "", **settings}
        )
        config = ModelConfig(name="m", model_dir=Path(), model_id="m", rolling_batch="vllm", max_copies=None)
        config = replace(config, min_copies=engine.least)
        self.life = Lifecycle(Settings(server_config=self.server_config, config=config))
        self.life._serve(service_of(engine))
        self.life.stage = State.READY
        self.model = Model(self.life, "m")
        self.server = server.ModelServer(Startup(self.server_config, ()))
        self.server.models.add(self.model)

    @property
    def idle(self) -> bool:
        """True if no restart is running, and none is needed."""
        return not self.server.registrar.loading and not self.server.registrar.engine_restarts.fault(self.model)

    def ping(self) -> tuple[int, bytes]:
        reply = ping(self.server.models, self.server_config, ErrorRates({}, frozenset()))
        return reply.status, reply.body


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, engine: CopiedEngine, *, may_start: bool = True, **settings: Any
) -> AsyncIterator[Watched]:
    """Watch a server. Its engine restarts copies at once. Without `may_start`, it waits for the test's permission."""
    monkeypatch.setattr(server, "_ENGINE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(engine_restart, "LONGEST_PAUSE_SECONDS", 0.01)
    if may_start:
        engine.may_start.set()
    found = Watched(engine, **settings)
    watching = asyncio.create_task(found.server.watch())
    try:
        yield found
    finally:
        watching.cancel()
        await found.server.stop()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_dead_copy_is_started_again_while_the_model_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """This holds even if the settings do not let calls wait for an engine that has died."""
    engine = CopiedEngine(waits=waits)
    async with watched(monkeypatch, engine, may_start=False) as one:
        engine.die(2)
        await engine.restarting.wait()
        assert (one.life.state, one.model.service().engine, one.life.stage) == (State.READY, engine, State.READY)
        assert one.ping() == (
            200,
            b'{\n  "m": {\n    "status": "Unhealthy",\n    "reason": "copies [2] have died"\n  }\n}\n',
        )
        engine.may_start.set()
        await until(lambda: one.idle)
        assert engine.attempts == [{2}]
        assert (one.life.stage, engine.stopped, engine.given_up) == (State.READY, None, set())
        assert one.ping() == (200, b'{\n  "m": {\n    "status": "Healthy"\n  }\n}\n')
        assert len(one.model.restarts) == 1
    assert re.search(r"model m: copies \[2\] .*0\.01 s \(1 of 3", caplog.text)


async def test_a_request_that_kills_copy_after_copy_does_not_use_up_the_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CopiedEngine(3)
    async with watched(monkeypatch, engine) as one:
        for copies in ((1,), (2,), (3,), (1, 2, 3), (1,)):
            engine.die(*copies)
            await until(lambda: one.idle)
        assert engine.attempts == [{1}, {2}, {3}, {1, 2, 3}, {1}]
        assert one.ping()[0] == 200
        assert engine.health().ready_copies == 3


async def test_a_copy_that_cannot_be_started_is_given_up_and_the_others_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, shown = CopiedEngine(3), Mock()
    engine.broken = {2}
    monkeypatch.setattr(logs, "show_held", shown)
    async with watched(monkeypatch, engine) as one:
        engine.die(2)
        await until(lambda: engine.given_up)
        assert engine.attempts == [{2}] * RESTARTS
        # Called at each death, at each failed restart, when the copy is given up, and when /ping begins to answer 500.
        assert shown.call_count == 2 * RESTARTS + 2
        assert one.ping() == (
            500,
            b'{\n  "m": {\n    "status": "Unhealthy",\n    "reason": "2 of 3 copies serve"\n  }\n}\n',
        )
        assert (one.life.state, one.model.service().engine, engine.stopped) == (State.READY, engine, None)
        assert (one.life.view().state, one.life.view().reason) == ("ready", "2 of 3 copies serve")
        await until(lambda: "2 of 3 copies serve; /ping now answers 500" in caplog.text)
        engine.die(3)
        await until(lambda: one.idle)
        assert engine.attempts[RESTARTS:] == [{3}], "another copy has restarts of its own"
    assert "copies [2] have no memory" in caplog.text
    assert re.search(r"model m: copies \[2\] .*3 times", caplog.text)
    assert caplog.text.count("/ping now answers 500") == 1


async def test_restarts_of_long_ago_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CopiedEngine()
    async with watched(monkeypatch, engine, engine_restart=1) as one:
        long_ago = time.monotonic() - engine_restart.WINDOW_SECONDS - 1
        one.model.restarts += [EngineRestart(long_ago, frozenset({1}))] * 3
        engine.die(1)
        await until(lambda: one.idle)
        assert engine.attempts == [{1}]
    assert "(1 of 1 within 10 minutes)" in caplog.text


async def test_with_enough_copies_left_the_model_stays_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(3, least=2)
    async with watched(monkeypatch, engine, engine_restart=0) as one:
        engine.die(1)
        await until(lambda: engine.given_up)
        assert one.ping() == (200, b'{\n  "m": {\n    "status": "Healthy"\n  }\n}\n')
        assert engine.attempts == []


async def test_without_restarts_a_stalled_engine_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stalled, give_up = CopiedEngine(1), Mock(return_value="the engine is stalled"), Mock()
    monkeypatch.setattr(Lifecycle, "stalled", property(stalled))
    monkeypatch.setattr(engine, "give_up", give_up)
    async with watched(monkeypatch, engine, engine_restart=0, engine_restart_when_stalled=True):
        await until(lambda: stalled.call_count > 50)  # Several looks.
    assert (engine.attempts, give_up.called) == ([], False)


async def test_a_stall_is_charged_to_the_stalled_copy_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CopiedEngine(2)
    async with watched(monkeypatch, engine, engine_restart=1, engine_restart_when_stalled=True) as one:
        engine.stalled = {1}
        await until(lambda: engine.attempts and one.idle)
        engine.die(2)
        await until(lambda: len(engine.attempts) == 2 and one.idle)
        assert engine.attempts == [{1}, {2}], "copy 2 still had its restart"
        engine.stalled = {1}
        await asyncio.sleep(0.1)  # some looks
        assert (engine.attempts, one.ping()[0]) == ([{1}, {2}], 500)
    assert re.search(r"copy \[1\] is stalled: .*; the other copies serve; it is started again .*\(1 of 1", caplog.text)


async def test_a_copy_that_was_given_up_does_not_pay_for_a_stalled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(3)
    engine.broken = {2}
    async with watched(monkeypatch, engine, engine_restart=1, engine_restart_when_stalled=True) as one:
        engine.die(2)
        await until(lambda: engine.given_up)
        engine.stalled = {1}
        await until(lambda: len(engine.attempts) == 2 and one.idle)
        assert engine.attempts == [{2}, {1}]


async def test_a_stalled_copy_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if calls do not wait for an engine, nor if the restart waits for another load."""
    engine = CopiedEngine(2, waits=False)
    async with watched(monkeypatch, engine, engine_restart_when_stalled=True) as one:
        one.life.config = replace(one.life.config, predict_timeout=0.05)
        async with one.server.registrar.engine_restarts._loads.one_at_a_time():
            engine.stalled = {2}
            await asyncio.sleep(0.3)
            assert one.life.state is State.READY
        await until(lambda: engine.attempts and one.idle)
        assert (engine.attempts, engine.stopped, one.life.state) == ([{2}], None, State.READY)


async def test_the_death_of_an_engine_that_is_not_restarted_shows_what_was_held_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, shown = CopiedEngine(1), Mock()
    monkeypatch.setattr(logs, "show_held", shown)
    async with watched(monkeypatch, engine, engine_restart=0):
        engine.die(1)
        await until(lambda: "the engine has died; /ping now answers 500" in caplog.text)
    assert shown.call_count == 1


async def test_a_server_that_fails_fast_ends_if_it_has_lost_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ENGINE_CHECK_SECONDS", 0.01)
    one = Watched(CopiedEngine(2), engine_restart=0, fail_fast=True)
    one.engine.die(1)
    await asyncio.wait_for(one.server.watch(), 60)


@pytest.mark.parametrize("waits", [True, False])
async def test_if_all_copies_die_calls_wait_for_them_or_get_an_error(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    engine = CopiedEngine(3, waits=waits)
    async with watched(monkeypatch, engine, may_start=False) as one:
        engine.die(1, 2, 3)
        if not waits:
            await until(lambda: one.life.reason == "the engine has died; it is started again")
            assert one.ping()[0] == 500
            return
        await engine.restarting.wait()
        assert one.life.state is State.RESTARTING
        engine.may_start.set()
        await until(lambda: one.idle)
        assert (engine.attempts, one.life.state) == ([{1, 2, 3}], State.READY)


async def test_a_copy_that_dies_during_a_restart_is_started_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(3)
    async with watched(monkeypatch, engine, may_start=False) as one:
        engine.die(1)
        await engine.restarting.wait()
        engine.die(2)
        engine.may_start.set()
        await until(lambda: one.idle)
        assert engine.attempts == [{1}, {2}]


async def test_if_the_last_restart_of_a_copy_fails_and_the_others_have_died_meanwhile_calls_wait_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CopiedEngine(2)
    engine.broken = {1}
    async with watched(monkeypatch, engine, engine_restart=1, may_start=False) as one:
        engine.die(1)
        await engine.restarting.wait()
        engine.die(2)
        engine.may_start.set()
        await until(lambda: len(engine.attempts) == 2 and one.idle)
        assert engine.attempts == [{1}, {1, 2}], "copy 2 had a restart left, and no model was loaded anew"
        assert (engine.given_up, engine.waits, engine.stopped) == ({1}, True, None)
        assert one.life.state is State.READY


async def test_if_all_copies_are_given_up_the_model_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = CopiedEngine(2), CopiedEngine(2)
    old.broken = {1, 2}
    loaded: list[ModelConfig] = []

    async def load(config: ModelConfig, *_: object) -> Service:
        loaded.append(config)
        return service_of(new)

    async def warmed_up(*_: object) -> None: ...

    monkeypatch.setattr(life_cycle, "load_service", load)
    monkeypatch.setattr(life_cycle, "_warm_up", warmed_up)
    async with watched(monkeypatch, old, engine_restart=2) as one:
        one.life.scale(1, 2)
        old.die(1, 2)
        await until(lambda: one.life.service is not None and one.life.service.engine is new)
        assert (len(old.attempts), old.waits, old.stopped) == (2, False, "the engine has died")
        assert one.life.state is State.READY
        assert [(config.min_copies, config.max_copies) for config in loaded] == [(1, 2)], "as it was scaled"


async def test_a_copy_that_dies_while_the_model_drains_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(2)
    async with watched(monkeypatch, engine) as one:
        one.life.open_calls = 1
        draining = asyncio.create_task(one.server.drain())
        await until(lambda: one.life.stage is State.DRAINING)
        engine.die(1)
        await asyncio.sleep(0.1)
        assert engine.attempts == []
        engine.die(2)  # Now calls wait.
        await until(lambda: engine.attempts)
        assert engine.attempts == [{1, 2}]
        one.life.open_calls -= 1
        await draining


async def test_a_restart_that_has_not_begun_when_the_model_drains_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CopiedEngine(2)
    async with watched(monkeypatch, engine) as one:
        lock = one.server.registrar.engine_restarts._loads.one_at_a_time()
        async with lock:
            engine.die(1)
            await until(lambda: one.server.registrar.loading)
            one.life.open_calls = 1
            draining = asyncio.create_task(one.server.drain())
            await until(lambda: one.life.stage is State.DRAINING)
        await until(lambda: not one.server.registrar.loading)
        one.life.open_calls -= 1
        await draining
        assert engine.attempts == []


async def test_a_copy_that_was_removed_meanwhile_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(3)
    async with watched(monkeypatch, engine) as one:
        async with one.server.registrar.engine_restarts._loads.one_at_a_time():
            engine.die(3)
            await until(lambda: one.server.registrar.loading)
            one.server.registrar.scale(one.model, 1, 1)
        await until(lambda: one.idle)
        assert (engine.attempts, one.model.restarts) == ([], [])
        assert one.ping()[0] == 200


async def test_a_restart_that_waits_for_another_load_fails_the_model_only_if_no_copy_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CopiedEngine(2)
    async with watched(monkeypatch, engine) as one:
        one.life.config = replace(one.life.config, predict_timeout=0.05)
        async with one.server.registrar.engine_restarts._loads.one_at_a_time():
            engine.die(1)
            await asyncio.sleep(0.3)
            assert one.life.state is State.READY
            engine.die(2)
            await until(lambda: one.life.stage is State.FAILED)
        await until(lambda: one.idle)
        assert (engine.attempts, one.life.state) == ([{1, 2}], State.READY)


async def test_a_model_is_unregistered_while_a_copy_of_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CopiedEngine(2)
    async with watched(monkeypatch, engine, may_start=False) as one:
        engine.die(1)
        await engine.restarting.wait()
        await asyncio.wait_for(one.server.registrar.unregister(one.model), 60)
        assert engine.stopped == "model m was unregistered"
        assert not one.server.registrar.loading
        assert not one.server.models.leaving


async def test_a_stalled_copy_that_cannot_be_started_again_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has stopped the stalled copy in order to restart it."""
    engine = CopiedEngine(2)
    one = Watched(engine)
    engine.broken = {2}
    engine.may_start.set()
    engine.die(2)
    with pytest.raises(EngineStartError):
        await one.life.restart(lambda config: config, last=lambda: True)
    assert (engine.stopped, one.life.state, engine.states[1]) == (None, State.READY, CopyState.READY)


# An engine that dies while its model drains. Calls that are running at this moment get a new engine. These calls may
# use the time of the drain.


@pytest_asyncio.fixture
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """A server with one model, whose engine serves one call. The test lets the engine's next process start."""
    async with watched(monkeypatch, CopiedEngine(1), may_start=False) as one:
        one.life.open_calls = 1
        yield one


async def drained(one: Watched, *, unregister: bool = False) -> asyncio.Task[None]:
    """Start a drain, wait until the model is draining, and return the drain's task."""
    drain = one.server.registrar.unregister(one.model) if unregister else one.server.drain()
    draining = asyncio.create_task(drain)
    await until(lambda: one.life.stage is State.DRAINING)
    return draining


@pytest.mark.parametrize("unregister", [False, True], ids=["server", "model"])
@pytest.mark.parametrize("before", [False, True], ids=["while it drains", "before"])
async def test_calls_of_a_drain_end_on_the_next_engine(serving: Watched, unregister: bool, before: bool) -> None:
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


async def test_a_model_is_not_unregistered_while_its_server_drains(serving: Watched) -> None:
    """The model would get a new drain, and the server would not stop in time."""
    draining = await drained(serving)
    with pytest.raises(NotReady, match="the server is stopping"):
        await asyncio.wait_for(serving.server.registrar.unregister(serving.model), 1)
    serving.life.open_calls = 0
    await draining


@pytest.mark.parametrize(
    ("earlier", "waits", "restarts"),
    [(0, True, RESTARTS), (RESTARTS, True, RESTARTS), (0, False, 0)],
    ids=["it cannot be started", "it may not be started again", "no call waits for it"],
)
async def test_calls_of_a_drain_get_an_error_if_there_is_no_next_engine(
    serving: Watched, earlier: int, waits: bool, restarts: int
) -> None:
    engine = serving.engine
    engine.broken, engine.waits = {1}, waits
    engine.may_start.set()
    serving.model.restarts += [EngineRestart(time.monotonic(), frozenset({1}))] * earlier
    draining = await drained(serving)
    engine.die(1)
    await until(lambda: not engine.waits)
    await asyncio.sleep(0.1)  # some looks
    assert not serving.server.registrar.loading
    serving.life.open_calls = 0
    await draining
    assert (len(serving.model.restarts), len(engine.attempts)) == (restarts, restarts - earlier)
    assert engine.stopped is None, "it is not loaded anew"


async def test_a_drain_without_calls_waits_for_no_engine(serving: Watched) -> None:
    serving.engine.die(1)
    await serving.engine.restarting.wait()
    serving.life.open_calls = 0
    await asyncio.wait_for(serving.server.drain(), 30)
