"""The health of a model whose handler loads the engine during a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engines.interface import EngineHealth, EngineStartError
from handlers.contract import Handler
from handlers.loaded_service import EngineBehindHandler, Service
from handlers.model_config import ModelConfig


class Model:
    """A model whose handler may call an engine. `load` loads the engine."""

    def __init__(self, load: AsyncMock) -> None:
        self.handler: Any = Mock(health=Mock(return_value=EngineHealth(True)), stop=AsyncMock())
        self.call_engine: Callable[[], Awaitable[Handler]] | None = None
        self.both = EngineBehindHandler(self._made, load)

    def _made(self, engine: Callable[[], Awaitable[Handler]]) -> Any:
        self.call_engine = engine
        return self.handler


async def test_an_engine_that_cannot_be_loaded_is_the_models_failure() -> None:
    model = Model(AsyncMock(side_effect=EngineStartError("no memory")))
    assert model.both.health().alive, "no call has needed it"
    assert model.call_engine is not None
    with pytest.raises(EngineStartError):
        await model.call_engine()
    assert (model.both.health().alive, "no memory" in model.both.health().reason) == (False, True)
    await model.both.stop()


async def test_an_engine_that_a_call_has_loaded_is_the_services() -> None:
    loaded: Any = Mock(stop=AsyncMock())
    loaded.runtime.health.return_value = EngineHealth(False, "it has died")
    model = Model(AsyncMock(return_value=loaded))
    config = ModelConfig(name="m", model_dir=Path(), model_id="m")
    service = Service(config, Mock(), model.both, custom=model.handler)
    assert service.running_engine is None
    assert model.call_engine is not None
    await model.call_engine()
    assert service.running_engine is loaded.engine
    assert model.both.health().reason == "it has died"
    await model.both.stop()
    assert loaded.stop.await_count == 1
