"""A loaded model: the engine or the handler that runs it, and the handlers that answer its calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.adapters import AdapterDownloads, AdapterRegistry
from engines.interface import Engine, EngineHealth, EngineStartError
from engines.pooling import PoolingModel
from handlers.contract import Handler
from handlers.custom.custom_handler import CustomHandler
from handlers.model_config import ModelConfig
from handlers.openai.handler import OpenAIHandler
from handlers.queue import EngineQueue


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's settings that apply to every model."""

    queue_size: int  # The number of requests that may wait, in addition to running requests.
    overload_status: int  # The status of a reply if the queue is full.
    unavailable_status: int  # The status of a reply if no worker of a custom handler is alive.
    model_aliases: tuple[str, ...] = ()  # Further names of the model on OpenAI's routes.
    # Returns the reasons why adapters must not be loaded from a directory. May block. None allows any directory.
    adapter_faults: Callable[[Path], Sequence[str]] | None = None
    adapter_downloads: AdapterDownloads | None = None  # Downloads adapters. None refuses remote adapters.


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model."""

    config: ModelConfig
    invocations: Handler  # Answers `/invocations` and `/predictions`.
    runtime: Engine | CustomHandler | EngineBehindHandler  # Runs the model.
    # The handler of each `GenerationRoute`, keyed by the route's path. Empty if a custom handler generates.
    generation: Mapping[str, Handler] = field(default_factory=dict)
    openai: OpenAIHandler | None = None  # Answers OpenAI's routes. None if the engine is not vLLM.
    queue: EngineQueue | None = None
    engine: Engine | None = None  # None if a custom handler generates.
    custom: CustomHandler | None = None
    adapters: AdapterRegistry | None = None  # None if `option.enable_lora` is off.
    held: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)  # Frees the model's resources.

    @property
    def pooling(self) -> PoolingModel | None:
        """The description of a model that makes vectors or scores. None for other models and for a custom handler."""
        return self.engine.pooling if self.engine is not None else None

    @property
    def running_engine(self) -> Engine | None:
        """The engine, including one that was loaded when a custom handler first called it."""
        behind = self.runtime.service if isinstance(self.runtime, EngineBehindHandler) else None
        return behind.engine if behind is not None else self.engine

    async def stop(self, why: str = "the server is stopping") -> None:
        """Stop the engine or the workers. Requests that still run on the engine end with an error that has `why`."""
        if self.adapters is not None:
            await self.adapters.stop()
        if self.engine is not None:
            await self.engine.stop(why)
        await self.held.aclose()

    def refuse_if_full(self) -> None:
        """Refuse a call if a queue is full. A refusal by the engine's queue counts as a failed call.

        Raises:
            Overloaded: The queue of the engine is full.
            ContractError: The queue of the custom handler is full, or the handler has no worker.
        """
        if self.custom is not None:
            self.custom.pool.refuse_if_full()
        elif self.queue is not None:
            self.queue.refuse_if_full()

    def abort(self, request_id: str) -> None:
        """End OpenAI's calls with this id, and the latest other call with this id.

        The clients get the answer so far, marked as aborted.
        """
        if self.queue is not None:
            self.queue.abort(request_id)
        if self.openai is not None:
            self.openai.abort(request_id)


class EngineBehindHandler:
    """A customer's handler, and the engine that it calls.

    The engine is loaded when the handler first calls it. An earlier load could fail: the handler may have loaded its
    own model, and the memory may be too small for both models.
    """

    def __init__(
        self,
        make_handler: Callable[[Callable[[], Awaitable[Handler]]], CustomHandler],
        load: Callable[[], Awaitable[Service]],
    ) -> None:
        """Create the handler.

        Args:
            make_handler: Creates the handler. Its argument is a function that loads the engine and returns the
                engine's handler.
            load: Loads the engine.
        """
        self._load = load
        self._loading: asyncio.Future[Service] | None = None
        self.custom = make_handler(self._invocations)

    async def start(self) -> Service | None:
        """Start the handler.

        Returns:
            The engine's service, if the handler has already called the engine.

        Raises:
            EngineStartError: The handler or the engine cannot be loaded.
        """
        try:
            await self.custom.start()
        except EngineStartError:
            if self._loading is not None and self._loading.done():
                await self._loading  # Raises the engine's error, which says more.
            raise
        return self.service

    @property
    def service(self) -> Service | None:
        """The engine's service, or None if the engine is not loaded."""
        loading = self._loading
        if loading is None or not loading.done() or loading.cancelled() or loading.exception() is not None:
            return None
        return loading.result()

    async def _invocations(self) -> Handler:
        """Load the engine if needed, and return its handler of `/invocations`. A failed load is not retried."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
        return (await asyncio.shield(self._loading)).invocations

    def health(self) -> EngineHealth:
        """Return the handler's health, or the engine's if the handler is alive and the engine's load has ended."""
        health = self.custom.health()
        if not health.alive:
            return health
        if self.service is not None:
            return self.service.runtime.health()
        loading = self._loading
        if loading is not None and loading.done() and not loading.cancelled():
            return EngineHealth(False, f"the engine that the handler calls cannot be loaded: {loading.exception()}")
        return health

    async def stop(self) -> None:
        """Stop the handler, and the engine if it is loaded or being loaded."""
        await self.custom.stop()
        if self._loading is None:
            return
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if self.service is not None:
            await self.service.stop()
