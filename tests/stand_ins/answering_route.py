"""An ASGI application with one route, which answers with a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from container.http.route import AppState, HttpRoute
from container.http.router import Router
from container.models.life_cycle import State
from container.models.registry import Model
from engines.errors import RequestError
from handlers.contract import Call, Reply, ReplyWriter, Running

Answering = Callable[[Call, ReplyWriter], Awaitable[Running | None]]


class _Handler:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        return await self._answering(call, writer)


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
    """Return an application that answers calls with `answering`, and refuses them with `status` and the message."""

    def refuse(error: RequestError) -> Reply:
        return Reply(status(error), "text/plain", error.message.encode())

    found, handler = model or model_with(object()), _Handler(answering)
    return Router(HttpRoute(state, "/x", refuse, find=lambda _: found, handler_of=lambda _: handler, queued=queued))
