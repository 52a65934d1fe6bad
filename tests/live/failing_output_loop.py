"""A program in which the loop that handles vLLM's messages fails once while two copies answer.

Its order is the model's directory. Its result is the outcome of the calls (`tests.live.preloaded.result_of`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from engines.engine_choice import begin_import, engine_factory
from engines.interface import Engine
from engines.request import GenerationRequest, SamplingParameters
from handlers.model_config import ModelConfig
from tests.generation import generate
from tests.live.preloaded import answer_order, result_of
from tests.waiting import until

TOKENS, CALLS = 100, 4
_FAILS_AT = 20  # Messages.


def outcome(model: Path) -> dict[str, Any]:
    """Return the outcome of the calls, which a new process makes."""
    found: dict[str, Any] = result_of(__name__, str(model))
    return found


async def _text(engine: Engine, number: int) -> str:
    sampling = SamplingParameters(max_tokens=TOKENS, ignore_eos=True)
    request = GenerationRequest(request_id=str(number), prompt="Once upon", sampling=sampling, stream=True)
    return "".join([delta.text async for delta in generate(engine, request)])


async def _main(model: Path) -> dict[str, Any]:
    arguments = {"max_model_len": "1024", "kv_cache_memory_bytes": str(64 << 20)}
    config = ModelConfig(
        name="m",
        model_dir=model,
        model_id=str(model),
        rolling_batch="vllm",
        dtype="float32",
        max_copies=2,
        continue_calls=1,
        engine_arguments=arguments,
    )
    begin_import(config)
    engine = engine_factory(config)(config)
    await engine.start()
    from engines.vllm.output_processor import LeanOutputProcessor

    right = await _text(engine, 0)
    process, messages = LeanOutputProcessor.process_outputs, 0

    def failing(*given: Any, **named: Any) -> Any:
        nonlocal messages
        messages += 1
        if messages == _FAILS_AT:
            raise RuntimeError("a fault")
        return process(*given, **named)

    LeanOutputProcessor.process_outputs = failing  # type: ignore[method-assign]
    running = [asyncio.create_task(_text(engine, number)) for number in range(1, CALLS + 1)]
    await until(lambda: not engine.health().alive)
    await engine.restart()
    equal = sum(text == right for text in await asyncio.gather(*running))
    states = [copy.state.value for copy in engine.copies]
    await engine.stop()
    return {"equal": equal, "copies": states, "continued": engine.statistics.continued_requests}


if __name__ == "__main__":
    answer_order(lambda model: asyncio.run(_main(Path(model))))
