"""An engine that is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from container.models import engine_restart
from container.models.engine_restart import EngineRestarts
from container.models.life_cycle import State
from container.models.load_queue import Loads
from container.models.registration import Registrar
from container.models.registry import EngineRestart, Model, Models
from container.observability import logs
from container.settings.server import ServerConfig
from engines.interface import EngineStartError
from handlers.model_config import ModelConfig
from tests.waiting import until


class Failed:
    """The life cycle of a model with a dead engine, which starts again at the second attempt."""

    state, reason = State.FAILED, "the engine has died"
    missing = stalled = ""
    died_while_draining = False
    copies = ()

    def __init__(self) -> None:
        self.config = ModelConfig(name="m", model_dir=Path(), model_id="m")
        self.reasons: list[str] = []
        self.attempts = 0
        self.gave_up = False
        self.waits = False

    def calls_can_wait(self) -> bool:
        return self.waits

    def give_up(self) -> None:
        self.gave_up = True

    def fail(self, reason: str) -> None:
        self.reasons.append(reason)

    async def restart(self, place: Any, *, last: Callable[[], bool]) -> None:
        self.attempts += 1
        self.last = last()
        if self.attempts == 1:
            raise EngineStartError("no memory")


async def test_an_engine_is_started_again_as_often_as_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_restart, "LONGEST_PAUSE_SECONDS", 0.01)
    shown: list[int] = []
    monkeypatch.setattr(logs, "show_held", lambda: shown.append(life.attempts))
    life: Any = Failed()
    model = Model(life, "m")
    models = Models([model])
    registrar = Registrar(models, ServerConfig(engine_restart=2), Mock())
    for attempt in (1, 2):
        assert registrar.engine_restarts.begin(model, "the engine has died")
        assert registrar.loading
        assert registrar.engine_restarts.begin(model, "the engine has died"), "one at a time"
        await until(lambda: not registrar.loading)
        assert (life.attempts, life.last) == (attempt, attempt == 2)
    assert shown == [0, 1, 1], "the log has what was held at each death and at each restart that fails"
    assert not life.gave_up
    assert not registrar.engine_restarts.begin(model, "the engine has died")
    assert life.gave_up, "no call waits for an engine that is not started again"
    assert life.reasons == ["the engine has died; it is started again"] * 2
    assert "no memory" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_model_whose_calls_wait_has_not_failed_and_old_restarts_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_restart, "LONGEST_PAUSE_SECONDS", 0.01)
    life: Any = Failed()
    life.waits = True
    old = EngineRestart(time.monotonic() - engine_restart.WINDOW_SECONDS - 1, frozenset({1}))
    model = Model(life, "m", restarts=[old] * 3)
    registrar = Registrar(Models([model]), ServerConfig(engine_restart=1), Mock())
    assert registrar.engine_restarts.begin(model, "the engine has died")
    await until(lambda: not registrar.loading)
    assert life.reasons == []
    assert "0.01 s (1 of 1 within 10 minutes)" in caplog.text
    assert not registrar.engine_restarts.begin(model, "the engine has died")


async def test_a_model_whose_restart_waits_for_another_load_longer_than_its_calls_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_restart, "LONGEST_PAUSE_SECONDS", 0.01)
    life: Any = Failed()
    life.waits, life.attempts = True, 1
    life.config = replace(life.config, predict_timeout=0.05)
    model = Model(life, "m")
    models = Models([model])
    loads = Loads(models, lambda: ())
    restarts = EngineRestarts(models, ServerConfig(engine_restart=2), loads)
    async with loads.one_at_a_time():
        assert restarts.begin(model, "the engine has died")
        await until(lambda: bool(life.reasons))
        assert life.attempts == 1
    await until(lambda: not loads.running)
    assert life.reasons == ["the engine has died; it is started again when another model is loaded"]
    assert life.attempts == 2
    async with loads.one_at_a_time():
        pass  # Another model can be loaded.


async def test_a_server_that_stops_starts_no_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    life: Any = Failed()
    model = Model(life, "m")
    models = Models([model])
    registrar = Registrar(models, ServerConfig(engine_restart=2), Mock())
    assert registrar.engine_restarts.begin(model, "the engine has died")
    models.draining = True
    await registrar.stop()
    assert not registrar.loading
    assert not registrar.engine_restarts.begin(model, "the engine has died")
    assert life.attempts == 0


@pytest.mark.parametrize(
    "settings", [{"engine_restart": 0}, {"engine_restart": 0, "engine_restart_when_stalled": True}]
)
async def test_without_the_setting_no_engine_is_started_again(settings: dict[str, Any]) -> None:
    life: Any = Failed()
    model = Model(life, "m")
    registrar = Registrar(Models([model]), ServerConfig(**settings), Mock())
    assert not registrar.engine_restarts.begin(model, "the engine has died")
    assert life.reasons == []
