"""The engine's handler loads the images of a call before it calls the engine. It frees them as soon as possible."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import InvalidRequest, Overloaded, RequestError, UnusableImage
from engines.interface import Generation, Sink
from engines.request import GenerationRequest
from handlers.contract import Call, ContractError, Exchange
from handlers.engine_handler import EngineHandler
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.queue import EngineQueue
from tests.contracts.exchange import MODEL, call
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.scripted_engine import ScriptedEngine

URLS = ("data:image/png;base64,aGk=", "https://host/a.png")


class Pictured(LmiRollingContract):
    """A contract whose calls all have two images."""

    def parse(self, call: Call) -> Exchange:
        return replace(super().parse(call), images=URLS)


class Seeing(ScriptedEngine):
    """An engine that notes the images that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Any]] = []

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        self.seen.append(list(request.images))
        return await super().submit(request, sink)


class Loader:
    """A loader that returns the URLs themselves in place of the images."""

    def __init__(self, error: RequestError | None = None, forever: bool = False) -> None:
        self._error, self._forever = error, forever
        self.open = 0

    @contextlib.asynccontextmanager
    async def load(self, urls: Sequence[str]) -> AsyncIterator[Sequence[Any]]:
        self.open += 1
        images = list(urls)
        try:
            if self._forever:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
            yield images
        finally:
            images.clear()
            self.open -= 1


async def test_every_prompt_of_a_call_gets_its_images_which_are_dropped_then() -> None:
    engine, loader = Seeing(), Loader()
    handler = EngineHandler(EngineQueue(engine, 4), Pictured(MODEL), images=loader)
    await handler.handle(call({"inputs": ["a", "b"]}), CollectedReply())
    assert engine.seen == [[*URLS], [*URLS]]
    assert [list(running.request.images) for running in engine.running] == [[], []]
    assert loader.open == 0


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UnusableImage("content", "is no image"), 424, "an image is no image"),
        (InvalidRequest("At most 3 image(s)"), 424, "At most 3 image(s)"),
        (Overloaded("the media of other requests fill the memory"), 503, "fill the memory"),
    ],
)
async def test_a_call_whose_images_cannot_be_loaded_is_refused(error: RequestError, status: int, message: str) -> None:
    engine, loader = Seeing(), Loader(error)
    queue = EngineQueue(engine, 4)
    with pytest.raises(ContractError) as refused:
        await EngineHandler(queue, Pictured(MODEL), images=loader).handle(call({"inputs": "a"}), CollectedReply())
    assert refused.value.reply.status == status
    assert message in refused.value.reason
    assert (engine.seen, queue.open_sequences, loader.open) == ([], 0, 0)


async def test_a_client_that_leaves_ends_the_loading() -> None:
    engine, loader = Seeing(), Loader(forever=True)
    handler = EngineHandler(EngineQueue(engine, 4), Pictured(MODEL), images=loader)
    task = asyncio.create_task(handler.handle(call({"inputs": "a"}), CollectedReply()))
    while not loader.open:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.seen, loader.open) == ([], 0)
