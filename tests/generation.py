"""Iterates over the deltas of an engine's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engines.errors import RequestError
from engines.interface import Engine
from engines.request import GenerationRequest, TokenDelta


class _Deltas(asyncio.Queue[TokenDelta | RequestError]):
    def on_delta(self, delta: TokenDelta) -> None:
        self.put_nowait(delta)

    def on_error(self, error: RequestError) -> None:
        self.put_nowait(error)


async def generate(engine: Engine, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
    """Yield the deltas. Closing the iterator cancels the request. Raises RequestError."""
    deltas = _Deltas()
    generation = await engine.submit(request, deltas)
    last = False
    try:
        while not last:
            delta = await deltas.get()
            if isinstance(delta, RequestError):
                raise delta
            last = delta.last
            yield delta
    finally:
        generation.cancel()
