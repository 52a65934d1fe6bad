"""A model that fails to load, or whose health cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from container.models import life_cycle
from container.models.life_cycle import Lifecycle, State
from container.models.registry import Model, Models
from container.observability.error_rates import ErrorRates
from container.ping import ping
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from engines.adapters import Adapter, AdapterOrder
from engines.errors import EngineDead
from engines.interface import EngineHealth, EngineStartError
from handlers.model_config import ModelConfig


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lifecycle]:
    """Return a function that makes a life cycle. Each load returns the next of the given services."""

    def make(*services: Any, **config: Any) -> Lifecycle:
        monkeypatch.setattr(life_cycle, "load_service", AsyncMock(side_effect=services))
        model = ModelConfig(name="m", model_dir=Path(), model_id="m", **config)
        return Lifecycle(Settings(server_config=ServerConfig(), config=model))

    return make


def ping_of(model: Model) -> int:
    return ping(Models([model]), ServerConfig(), ErrorRates({}, frozenset())).status


class SlowToEnd:
    """A service that generates nothing. It ends when the test allows it."""

    engine: Any = object()

    def __init__(self) -> None:
        self.ending, self.may_end = asyncio.Event(), asyncio.Event()

    async def stop(self) -> None:
        self.ending.set()
        await self.may_end.wait()


class DeadEngine:
    """An engine that ends with its first request."""

    pooling = None

    async def submit(self, *_: object) -> Any:
        raise EngineDead()


class DyingEngine:
    """An engine that dies at its first request, and keeps the request for the next engine."""

    pooling = None
    alive = True

    async def submit(self, *_: object) -> Any:
        self.alive = False
        return SimpleNamespace(cancel=lambda: None)

    def health(self) -> EngineHealth:
        return EngineHealth(self.alive, "" if self.alive else "the engine has died")


@pytest.mark.parametrize("engine", [DeadEngine(), DyingEngine()])
async def test_an_engine_that_dies_of_its_first_request_names_the_options_that_were_given(
    loaded: Callable[..., Lifecycle], engine: Any
) -> None:
    service = SlowToEnd()
    service.engine = engine
    service.may_end.set()
    with pytest.raises(EngineStartError) as failure:
        await loaded(service, engine_arguments={"mamba_cache_mode": "align"}).start(lambda given: given)
    assert str(failure.value) == (
        "the engine started with option.mamba_cache_mode but failed at its first request; the log has its error: "
        "the engine has died; the request was not completed"
    )


async def test_a_later_model_that_loads_and_generates_nothing_is_never_a_failure_of_the_server(
    loaded: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = AsyncMock(side_effect=EngineStartError("the engine started but generated nothing"))
    monkeypatch.setattr(life_cycle, "_warm_up", nothing)
    service = SlowToEnd()
    life = loaded(service)
    start = asyncio.create_task(life.start(lambda given: given))
    await service.ending.wait()
    assert (ping_of(Model(life, "m", at_startup=False)), life.state) == (200, State.STARTING)
    service.may_end.set()
    with pytest.raises(EngineStartError):
        await start
    assert (life.state, bool(life.reason)) == (State.FAILED, True)


class Unknowable:
    """A service with an engine that cannot report its state."""

    custom = engine = running_engine = None
    runtime: Any

    def __init__(self) -> None:
        self.runtime = self

    def health(self) -> EngineHealth:
        raise RuntimeError("no such process")


async def test_a_model_whose_health_cannot_be_told_is_unhealthy_and_the_log_says_so_once(
    loaded: Callable[..., Lifecycle], caplog: pytest.LogCaptureFixture
) -> None:
    life = loaded(Unknowable())
    await life.start(lambda given: given)
    assert life.stalled == ""
    assert (ping_of(Model(life, "m")), life.state) == (500, State.FAILED)
    assert life.reason == "the engine's health cannot be read: RuntimeError('no such process')"
    await life.drain(0.0)
    assert life.died_while_draining
    assert life.died_while_draining
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.message.startswith("model m: ")
    assert record.exc_info is not None


class SlowAdapters:
    """The adapters of a loaded model. One of them is registered when the test allows it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.registering, self.may_register = asyncio.Event(), asyncio.Event()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def all(self) -> tuple[Adapter, ...]:
        return tuple(Adapter(name=name, src="", path=Path(), id=1) for name in self.names)

    async def register(self, order: AdapterOrder) -> str:
        self.registering.set()
        await self.may_register.wait()
        self.names.append(order.name)
        return ""


class WithAdapters:
    """A service that generates nothing, and has adapters."""

    custom = engine = running_engine = None

    def __init__(self) -> None:
        self.runtime: Any = self
        self.adapters = SlowAdapters()
        self.stopped = False

    def health(self) -> EngineHealth:
        return EngineHealth(alive=not self.stopped, reason="the engine has died")

    async def stop(self, why: str = "") -> None:
        self.stopped = True


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_model_that_is_loaded_again_serves_when_its_adapters_are_registered(
    loaded: Callable[..., Lifecycle], cancelled: bool
) -> None:
    old, new = WithAdapters(), WithAdapters()
    life = loaded(old, new)
    await life.start(lambda given: given)
    old.adapters.names.append("a")
    life.fail("the engine has died; it is started again")
    restart = asyncio.create_task(life.restart(lambda given: given, last=lambda: True))
    await new.adapters.registering.wait()
    serving: Any = Model(life, "m").service()
    assert serving is old, "calls get the error of the stopped service"
    if cancelled:
        restart.cancel()
        await asyncio.wait([restart])
        assert (new.stopped, life.state) == (True, State.FAILED)
        return
    new.adapters.may_register.set()
    await restart
    assert (Model(life, "m").service(), life.state) == (new, State.READY)
    assert new.adapters.names == ["a"]
