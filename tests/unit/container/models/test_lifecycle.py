"""What is told of a model whose load fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from container.error_rates import ErrorRates
from container.health import ping
from container.models import lifecycle
from container.models.lifecycle import Lifecycle, State
from container.models.registry import Model, Models
from container.settings.settings import ServerSettings, Settings
from handlers.engines.protocol import EngineStartError
from handlers.entry_point import Service
from handlers.model_settings import ModelSettings


class SlowToEnd:
    """A service that generates nothing, and takes its time to end."""

    engine: Any = object()

    def __init__(self) -> None:
        self.ending, self.may_end = asyncio.Event(), asyncio.Event()

    async def stop(self) -> None:
        self.ending.set()
        await self.may_end.wait()


@pytest.mark.asyncio
async def test_a_later_model_that_loads_and_generates_nothing_is_never_a_failure_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = SlowToEnd()

    async def loaded(*_: object) -> Service:
        found: Any = service
        return found

    async def nothing(_: object) -> None:
        raise EngineStartError("the engine started but generated nothing")

    monkeypatch.setattr(lifecycle, "load_service", loaded)
    monkeypatch.setattr(lifecycle, "_warm_up", nothing)
    settings = ServerSettings()
    life = Lifecycle(Settings(settings, ModelSettings(name="m", model_dir=Path(), model_id="m")))
    models = Models([Model(life, "m", at_startup=False)])
    start = asyncio.create_task(life.start())
    await service.ending.wait()
    reply = ping(models, settings, ErrorRates({}, frozenset()))
    assert (reply.status, life.state) == (200, State.STARTING)
    service.may_end.set()
    with pytest.raises(EngineStartError, match="generated nothing"):
        await start
    assert (life.state, life.reason) == (State.FAILED, "the engine started but generated nothing")
