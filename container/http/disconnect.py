"""Notices that a client has left, and cancels its call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from container.http.body_limits import Receive
from handlers.contract import Running


class ClientGone(Exception):
    """The client left before its call reached the engine. The call was cancelled."""


@dataclass(slots=True)
class DisconnectWatch:
    """Waits for the client of one call to leave.

    While the call is on its way to the engine, a task listens for a disconnect. The task starts only if the call has to
    wait, for example while a long prompt is tokenized. Most calls reach the engine without this task.
    """

    _receive: Receive
    _answering: asyncio.Task[None] | None = None  # Cancelled if the client leaves.
    _listener: asyncio.Task[None] | None = None

    async def unless_gone(self, answer: Awaitable[Running | None]) -> Running | None:
        """Await an answer, and cancel it if the client leaves.

        Raises:
            ClientGone: The client left first.
        """
        self._answering = task = asyncio.current_task()
        assert task is not None
        listen = asyncio.get_running_loop().call_soon(self._listen)
        running: Running | None = None
        try:
            running = await answer
        except asyncio.CancelledError:
            if self._listener is not None and self._listener.done() and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            self._answering = None
            listen.cancel()
            if self._listener is not None and running is None:
                self._listener.cancel()
        return running

    def _listen(self) -> None:
        self._listener = asyncio.create_task(disconnected(self._receive))
        self._listener.add_done_callback(self._gone)

    def _gone(self, _: object) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def closed_or_complete(self) -> Awaitable[None]:
        """Wait until the reply is complete or the client has left."""
        return self._listener or disconnected(self._receive)


async def disconnected(receive: Receive) -> None:
    """Wait until the reply is complete or the client has left. ASGI reports both as a disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
