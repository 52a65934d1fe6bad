"""The vLLM engine's answers to constraints. Some of them would harm the engine, so it runs in its own program."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from engines.engine_choice import begin_import, engine_factory
from engines.errors import RequestError
from engines.request import BeamSearch, Constraint, GenerationRequest, SamplingParameters
from handlers.model_config import ModelConfig
from tests.generation import generate
from tests.live.preloaded import answer_order, result_of

PROMPT = "The answer is"
PAUSE = 0.05


def constrained_answers(model: Path, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the answers to the cases, by name, from a new process.

    "others": the results of requests that run meanwhile.
    """
    answers: dict[str, dict[str, Any]] = result_of(__name__, [str(model), cases])
    return answers


def settings_for(directory: str) -> ModelConfig:
    arguments = {"max_model_len": "1024", "kv_cache_memory_bytes": str(128 << 20)}
    return ModelConfig(
        name="m",
        model_dir=Path(directory),
        model_id=directory,
        dtype="float32",
        rolling_batch="vllm",
        max_rolling_batch_size=16,
        engine_arguments=arguments,
    )


def request_for(case: dict[str, Any]) -> GenerationRequest:
    constraint = Constraint(
        parameter="guide", **{k: tuple(v) if k == "choice" else v for k, v in case["constraint"].items()}
    )
    sampling = {"max_tokens": 64, "temperature": 1.0, "seed": 1} | case.get("sampling", {})
    request = dict(case.get("request", {}))
    if "beam_search" in request:
        request["beam_search"] = BeamSearch(width=request["beam_search"])
    return GenerationRequest(
        request_id="r",
        prompt=PROMPT,
        sampling=SamplingParameters(**sampling, constraint=constraint),
        **{"stream": True, "want_tokens": True} | request,
    )


async def answer(engine: Any, case: dict[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    try:
        async for delta in generate(engine, request_for(case)):
            texts[delta.sequence] = texts.get(delta.sequence, "") + delta.text
            if delta.finish_reason is not None:
                reasons[delta.sequence] = delta.finish_reason.value
    except RequestError as error:
        return {"error": type(error).__name__, "message": error.message, "seconds": time.monotonic() - begun}
    return {"texts": list(texts.values()), "reasons": list(reasons.values())}


async def longest_wait(engine: Any, stop: asyncio.Event) -> float:
    """Answer requests without a constraint, and return the longest time between two of their tokens.

    In the pauses, the trials get the processors, as they would with a slower model.
    """
    longest = 0.0
    while not stop.is_set():
        last = time.monotonic()
        sampling = SamplingParameters(max_tokens=16, ignore_eos=True)
        async for _ in generate(engine, GenerationRequest(request_id="x", prompt="x", sampling=sampling, stream=True)):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        await asyncio.sleep(PAUSE)
    return longest


async def answers_of(directory: str, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    config = settings_for(directory)
    begin_import(config)
    engine = engine_factory(config)(config)
    await engine.start()
    try:
        stop = asyncio.Event()
        other = asyncio.create_task(longest_wait(engine, stop))
        results = {name: await answer(engine, case) for name, case in cases.items()}
        stop.set()
        results["others"] = {"longest_wait": await other, "alive": engine.health().alive}
    finally:
        await engine.stop()
    return results


if __name__ == "__main__":
    answer_order(lambda order: asyncio.run(answers_of(*order)))
