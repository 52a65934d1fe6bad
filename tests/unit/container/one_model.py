"""The application of a server with one model, without an engine, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import httpx

from container.app import create_app
from container.http.router import Mount
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.loaded_service import Service
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL
from tests.stand_ins.scripted_engine import ScriptedEngine


def make(
    state: State = State.READY, *, mounts: Sequence[Mount] = (), **server: Any
) -> tuple[Lifecycle, httpx.AsyncClient]:
    server_config = ServerConfig(**server)
    lifecycle = Lifecycle(Settings(server_config=server_config, config=MODEL))
    lifecycle.stage = state
    models = Models([Model(lifecycle, str(lifecycle.config.model_dir))])
    transport = httpx.ASGITransport(
        create_app(models, server_config, Registrar(models, server_config, Mock()), mounts).main
    )
    return lifecycle, httpx.AsyncClient(transport=transport, base_url="http://server")


def with_engine(lifecycle: Lifecycle, engine: ScriptedEngine | None = None) -> ScriptedEngine:
    engine = engine or ScriptedEngine()
    queue = EngineQueue(engine, 4)
    handler = EngineHandler(queue, LmiRollingContract(MODEL), refuse_unread=overloaded)
    lifecycle.service = Service(MODEL, handler, engine, engine=engine, queue=queue)
    return engine
