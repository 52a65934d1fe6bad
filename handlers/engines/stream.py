"""Pulling from an engine that pushes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from handlers.engines.protocol import Engine
from handlers.errors import RequestError
from handlers.request import GenerationRequest, TokenDelta


class _Queue:
    """Keeps what the engine pushes until the consumer comes; bounded by the request's own limit on new tokens."""

    def __init__(self) -> None:
        self._deltas: asyncio.Queue[TokenDelta | RequestError] = asyncio.Queue()

    def on_delta(self, delta: TokenDelta) -> None:
        self._deltas.put_nowait(delta)

    def on_error(self, error: RequestError) -> None:
        self._deltas.put_nowait(error)

    async def get(self) -> TokenDelta:
        item = await self._deltas.get()
        if isinstance(item, RequestError):
            raise item
        return item


async def generate(engine: Engine, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
    """Yield the answer's deltas; closing the iterator cancels the request.

    Raises:
        RequestError: the request was refused or has failed.
    """
    queue = _Queue()
    generation = await engine.submit(request, queue)
    try:
        while True:
            delta = await queue.get()
            yield delta
            if delta.last:
                return
    finally:
        generation.cancel()
