"""The management API of a server without its process, for tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx

from container.app import Applications, create_app
from container.models.life_cycle import Lifecycle
from container.models.registration import Registrar
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from container.settings.values import Value
from tests.settings import further_settings

HANDLERS = Path(__file__).parents[2] / "fixtures" / "handlers"
ECHO = str(HANDLERS / "echo")
PLENTY = 1 << 40


class Api:
    """A server without its process: its applications, and clients of them."""

    def __init__(
        self, environ: dict[str, str], memory: tuple[int, ...], startup: tuple[str, ...], **server: Any
    ) -> None:
        server_config = ServerConfig(**server)

        def read(url: Value, name: str, arguments: Mapping[str, Value]) -> Settings:
            return further_settings(url, name, environ, arguments)

        models = [Model(Lifecycle(read(Value(ECHO, "startup"), name, {})), ECHO) for name in startup]
        self.models = Models(models)
        self.free_memory = Mock(return_value=memory)
        self.registrar = Registrar(self.models, server_config, read, free=self.free_memory)
        self.applications: Applications = create_app(self.models, server_config, self.registrar)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.applications.main), base_url="http://server", timeout=60
        )

    async def register(self, name: str, directory: str = ECHO, **parameters: str) -> httpx.Response:
        return await self.client.post("/models", params={"url": directory, "model_name": name, **parameters})

    async def names(self) -> list[str]:
        return [model["modelName"] for model in (await self.client.get("/models")).json()["models"]]


@asynccontextmanager
async def serving(
    *startup: str,
    environ: dict[str, str] | None = None,
    free: int = PLENTY,
    gpus: tuple[int, ...] = (),
    **server: Any,
) -> AsyncIterator[Api]:
    api = Api(environ or {}, (*gpus, free), startup, **server)
    try:
        await api.registrar.start()
        async with api.client:
            yield api
    finally:
        await api.registrar.stop()
        await api.models.stop()


def error(response: httpx.Response) -> tuple[int, str, str]:
    document = response.json()
    assert document["code"] == response.status_code
    assert response.text == json.dumps(document, indent=2).replace("'", "\\u0027") + "\n"
    return document["code"], document["type"], document["message"]
