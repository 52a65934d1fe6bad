"""The health of a model whose handler loads the engine with one of its calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engines.interface import EngineHealth, EngineStartError
from engines.statistics import StartupTimes
from handlers import entry_point
from handlers.entry_point import Limits, Service, _EngineBehindHandler
from tests.unit.handlers.custom.harness import MODELS, settings_for

pytestmark = pytest.mark.asyncio


@pytest.fixture
def model() -> _EngineBehindHandler:
    settings = settings_for(MODELS / "before_engine", entry_point="x", async_mode=True)
    settings = replace(settings, handler_before_engine=settings.handler)
    both = _EngineBehindHandler(settings, Limits(10, 503, 503), StartupTimes())
    handler: Any = Mock(health=Mock(return_value=EngineHealth(True)), stop=AsyncMock())
    both.custom = handler
    return both


async def test_an_engine_that_cannot_be_loaded_is_the_models_failure(
    model: _EngineBehindHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_point, "load_service", AsyncMock(side_effect=EngineStartError("no memory")))
    assert model.health().alive, "no call has needed it"
    with pytest.raises(EngineStartError):
        await model._invocations()
    assert model.health() == EngineHealth(False, "the engine that the handler calls cannot be loaded: no memory")
    await model.stop()


async def test_an_engine_that_a_call_has_loaded_is_the_services(
    model: _EngineBehindHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(model.handler_settings, Mock(), model, custom=model.custom)
    assert service.running_engine is None
    loaded: Any = Mock(stop=AsyncMock())
    loaded.runtime.health.return_value = EngineHealth(False, "it has died")
    monkeypatch.setattr(entry_point, "load_service", AsyncMock(return_value=loaded))
    await model._invocations()
    assert service.running_engine is loaded.engine
    assert model.health().reason == "it has died"
    await model.stop()
    assert loaded.stop.await_count == 1
