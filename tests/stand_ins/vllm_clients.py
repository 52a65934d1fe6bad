"""Stand-ins for the clients of engine processes, which the client of all copies uses, and requests for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest


def engine_request(request_id: str, **given: Any) -> Any:
    """Return a sequence, as vLLM's front end sends it to the engine."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    empty = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    prompt = {"prompt_token_ids": [1, 2, 3], "sampling_params": SamplingParams(), "arrival_time": 0.0}
    return EngineCoreRequest(request_id=request_id, **empty | prompt | {"external_req_id": request_id} | given)


def late_interaction(request_id: str, mode: str, query: str = "q") -> Any:
    """Return the query of a late interaction, or one of its documents."""
    from vllm.pooling_params import LateInteractionParams, PoolingParams

    late = LateInteractionParams(mode=mode, query_key=query)
    pooling = PoolingParams(task="token_embed", late_interaction_params=late)
    return engine_request(request_id, sampling_params=None, pooling_params=pooling)


class Client:
    """The parts of `AsyncMPClient` that `CopiesClient` uses. A call of a method hangs until `answers` is set."""

    def __init__(self) -> None:
        self.queue: Any = None  # The messages and the errors of the process are put here.
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self.resources = SimpleNamespace(engine_dead=False)
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None  # Of a call.
        cache = SimpleNamespace(num_gpu_blocks=1000, block_size=16)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    @property
    def added_ids(self) -> list[str]:
        return [request.request_id for request in self.added]

    def ensure_alive(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.resources.engine_dead:
            raise EngineDeadError

    async def add_request_async(self, request: Any) -> None:
        self.ensure_alive()
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        self.ensure_alive()
        self.calls.append((method, *args))
        result = self.utility_results[len(self.calls)] = asyncio.get_running_loop().create_future()
        if self.answers.is_set() and not result.done():
            result.set_result(self)
        if self.error is not None:
            raise self.error
        return [await result]


class Started:
    """The client of all copies, with stand-ins for the clients of the copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copies: int, holds: bool = True) -> None:
        from engines.vllm.copies import core_client
        from engines.vllm.copies.client import CopiesClient, Copy

        monkeypatch.setattr(core_client, "read_messages", lambda client, queue: setattr(client, "queue", queue))
        self.siblings: dict[str, list[str]] = {}
        self.client = CopiesClient(lambda request_id: self.siblings.get(request_id, ()), lambda: holds)
        self.dead: list[Copy] = []
        self.copies = [self.start(number) for number in range(1, copies + 1)]
        for copy in self.copies:
            self.client.open(copy)

    def start(self, number: int) -> Any:
        """Start a copy. It takes no requests yet."""
        from engines.vllm.copies.client import Copy

        copy = Copy(number)
        copy.client = Client()
        self.client.add(copy, self.dead.append)
        return copy

    def kill(self, copy: Any) -> list[str]:
        """Let a copy die. Return the ids of its requests."""
        from engines.interface import CopyState

        copy.client.resources.engine_dead = True
        copy.state = CopyState.DEAD
        lost: list[str] = self.client.remove(copy)
        return lost

    @asynccontextmanager
    async def reading(self, handle: Callable[[Any], Any] = lambda message: None) -> AsyncIterator[None]:
        """Handle the messages, as vLLM's output loop does."""

        async def read() -> None:
            while True:
                handled = handle(await self.client.get_output_async())
                if handled is not None:
                    await handled

        loop = asyncio.create_task(read())
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.wait([loop])
