"""A route of the container that answers with a function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from container.http.reply import HttpReply
from container.http.request_head import RequestHead
from container.http.route import AppState, HttpRoute
from container.models.registry import Model
from engines.errors import RequestError
from handlers.contract import Call, Reply, Running

Answering = Callable[[Call, HttpReply, Model | None], Awaitable[Running | None]]


class AnsweringRoute(HttpRoute):
    """Answers calls with `answering`, and refuses them with `status` and the error's message."""

    def __init__(
        self,
        state: AppState,
        answering: Answering,
        *,
        status: Callable[[RequestError], int] = lambda _: 424,
        model: Model | None = None,
        queued: bool = False,
    ) -> None:
        super().__init__(state, "/x", queued=queued)
        self._answering, self._status, self._model = answering, status, model

    def refuse(self, error: RequestError) -> Reply:
        return Reply(self._status(error), "text/plain", error.message.encode())

    def find(self, head: RequestHead) -> Model | None:
        return self._model

    async def answer(self, call: Call, reply: HttpReply, model: Model | None) -> Running | None:
        return await self._answering(call, reply, model)
