"""An ASGI application with one route, which answers with a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from container.http.request_head import RequestHead
from container.http.route import AppState, HttpRoute
from container.http.router import Router
from container.models.life_cycle import State
from container.models.registry import Model
from engines.errors import RequestError
from handlers.contract import Call, Reply, ReplyWriter, Running
from handlers.loaded_service import Service
from handlers.route_declarations import ContractRoutes

Answering = Callable[[Call, ReplyWriter], Awaitable[Running | None]]


class _Route(HttpRoute):
    model: Model
    answering: Answering

    def find(self, head: RequestHead) -> Model:
        return self.model

    def answer(self, call: Call, reply: ReplyWriter, service: Service | None) -> Awaitable[Running | None]:
        return self.answering(call, reply)


def model_with(service: Any) -> Model:
    """Return a model that is ready, with a stand-in of its service."""
    life: Any = SimpleNamespace(
        service=service, state=State.READY, stage=State.READY, open_calls=0, end_call=lambda: None
    )
    return Model(life, "m")


def answering_route(
    state: AppState,
    answering: Answering,
    *,
    status: Callable[[RequestError], int] = lambda _: 424,
    model: Model | None = None,
    queued: bool = False,
) -> Router:
    """Return an application that answers calls with `answering`. A refusal has `status` and the message."""

    def refuse(error: RequestError) -> Reply:
        return Reply(status(error), "text/plain", error.message.encode())

    route = _Route(state, contract_with(refuse), "/x")
    route.queued, route.model, route.answering = queued, model or model_with(object()), answering
    return Router(route)


def contract_with(refuse: Callable[[RequestError], Reply]) -> ContractRoutes:
    """Return a contract without routes that refuses requests with these replies."""
    return ContractRoutes(name="x", routes=(), refuse=refuse, error={}, wrong_method=lambda _: Reply(405, "", b""))
