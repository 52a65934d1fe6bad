"""The refusals of vLLM when it loads a model, and Slipway's messages for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.engine_choice import choose_engine, engine_factory
from engines.interface import EngineStartError
from handlers.model_config import ModelConfig


def settings(model: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(name="m", model_dir=model, model_id=str(model), **fields)


async def refusal(model: ModelConfig) -> str:
    with pytest.raises(EngineStartError) as caught:
        await engine_factory(model)(model).start()
    return str(caught.value)


@pytest.mark.asyncio
async def test_a_quantization_that_vllm_does_not_have_is_refused_with_those_that_it_has(sample_model: Path) -> None:
    model = settings(sample_model, rolling_batch="vllm", engine_arguments={"quantization": "eetq"})
    message = await refusal(model)
    start = f"vLLM cannot load {sample_model} with option.quantization: Unknown quantization method: eetq."
    assert message.startswith(f"{start} Must be one of ['awq', ")
    assert message.endswith("'].")


@pytest.mark.asyncio
async def test_a_model_that_is_not_there_is_refused_by_vllm(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in await refusal(choose_engine(settings(tmp_path / "nothing")))
