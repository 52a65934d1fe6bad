"""From a model's settings to what serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from handlers.contracts.lmi import LmiContract
from handlers.contracts.protocol import Contract
from handlers.engines.protocol import Engine
from handlers.model_settings import ModelSettings
from handlers.rolling_batch import RollingBatchHandler

EngineFactory = Callable[[ModelSettings], Engine]


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded model with its engine, its handler and the contracts that it speaks."""

    settings: ModelSettings
    engine: Engine
    handler: RollingBatchHandler
    lmi: Contract


async def load_service(settings: ModelSettings, queue_size: int, overload_status: int) -> Service:
    """Choose the engine and handler that the settings ask for, and load the model.

    `queue_size`: how many prompts may wait beyond those that the engine runs; `overload_status`: what LMI clients get
    beyond that.

    Raises:
        EngineStartError: the model cannot be loaded.
    """
    make_engine = await asyncio.to_thread(_engine_factory, settings)
    engine = make_engine(settings)
    await engine.start()
    handler = RollingBatchHandler(engine, settings.max_rolling_batch_size + queue_size)
    return Service(settings, engine, handler, LmiContract(settings, overload_status))


def _engine_factory(settings: ModelSettings) -> EngineFactory:
    # Importing vLLM takes seconds; by now /ping is being answered.
    from handlers.engines.vllm import VllmEngine

    return VllmEngine
