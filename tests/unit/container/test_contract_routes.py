"""Routes that generate nothing. Long bodies are answered in threads, a few at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from container.contract_routes import add_contracts
from container.http.route import AppState, HttpCounts, HttpRoute
from container.http.router import Router
from container.models.life_cycle import Lifecycle
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from handlers.contract import Call, Reply
from handlers.model_config import ModelConfig
from handlers.route_declarations import InfoRoute, ModelView
from tests.stand_ins.answering_route import contract_with
from tests.unit.container.one_model import client_of


class Text:
    """A slow route. It records the threads of its answers, and the maximum number of concurrent answers."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def answer(self, call: Call, view: ModelView) -> Reply:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.threads.append(threading.current_thread())
        time.sleep(0.02)
        with self._lock:
            self.at_once -= 1
        return Reply(200, "", b"")

    async def ask(self, *lengths: int) -> None:
        route = InfoRoute(path="/t", answer=self.answer, methods=("POST",))
        contract = replace(contract_with(lambda _: Reply(500, "", b"")), routes=(route,))
        model = SimpleNamespace(lifecycle=SimpleNamespace(view=lambda: None))
        models: Any = SimpleNamespace(only=model, called=lambda *_: model, open_calls={}, reading=set())
        state = AppState(models, ServerConfig(), HttpCounts())
        router = Router(HttpRoute(state, contract, "unknown"))
        add_contracts(router, state, [contract])
        async with client_of(router) as client:
            await asyncio.gather(*(client.post("/t", content=b"x" * length) for length in lengths))


async def test_however_many_long_bodies_come_two_are_answered_at_a_time() -> None:
    text = Text()
    await text.ask(*[5000] * 12)
    assert len(text.threads) == 12
    assert text.most_at_once == 2
    assert threading.current_thread() not in text.threads


async def test_a_short_body_is_answered_at_once() -> None:
    text = Text()
    await text.ask(100)
    assert text.threads == [threading.current_thread()]


async def test_of_two_versions_the_one_with_the_adapter_answers_for_it() -> None:
    def version(number: str, *adapters: str) -> Model:
        config = ModelConfig(name="m", model_dir=Path(), model_id="m")
        life: Any = Lifecycle(Settings(server_config=ServerConfig(), config=config))
        life.service = SimpleNamespace(adapters=set(adapters))
        return Model(life, "m", number, at_startup=False)

    models = Models([version("1"), version("2", "poet")])
    assert {models.called({}, "poet").version for _ in range(4)} == {"2"}
    assert {models.called({}, "m").version for _ in range(4)} == {"1", "2"}
