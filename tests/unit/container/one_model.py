"""The application of a server with one model, without an engine, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import httpx

from container.app import Applications, create_app
from container.http.router import Mount
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import EngineRestart, Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.loaded_service import Service
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL
from tests.stand_ins.scripted_engine import ScriptedEngine


def served(
    state: State = State.READY,
    *,
    settings: Settings | None = None,
    mounts: Sequence[Mount] = (),
    restarts: Sequence[EngineRestart] = (),
    **server: Any,
) -> tuple[Lifecycle, Applications]:
    settings = settings or Settings(server_config=ServerConfig(**server), config=MODEL)
    lifecycle = Lifecycle(settings)
    lifecycle.stage = state
    models = Models([Model(lifecycle, str(lifecycle.config.model_dir), restarts=list(restarts))])
    registrar = Registrar(models, settings.server_config, Mock())
    return lifecycle, create_app(models, settings.server_config, registrar, mounts)


def make(
    state: State = State.READY, *, mounts: Sequence[Mount] = (), **server: Any
) -> tuple[Lifecycle, httpx.AsyncClient]:
    lifecycle, applications = served(state, mounts=mounts, **server)
    return lifecycle, client_of(applications.main)


def client_of(application: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://server")


@asynccontextmanager
async def ready(**server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a server whose model is loaded."""
    lifecycle, client = make(**server)
    with_engine(lifecycle)
    async with client:
        yield client


def with_engine(lifecycle: Lifecycle, engine: ScriptedEngine | None = None) -> ScriptedEngine:
    engine = engine or ScriptedEngine()
    queue = EngineQueue(engine, 4)
    handler = EngineHandler(queue, LmiRollingContract(MODEL), refuse_unread=overloaded)
    lifecycle.service = Service(MODEL, handler, engine, engine=engine, queue=queue)
    return engine
