"""`option.rolling_batch=auto`: vLLM where it can run the model, else transformers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from handlers.engine_choice import chosen, engine_factory
from handlers.engines.protocol import EngineStartError
from handlers.engines.stream import generate
from handlers.model_settings import ModelSettings
from handlers.request import GenerationRequest, SamplingParameters
from tests.live.server import serving

Make = Callable[[Any, Any], Path]


@pytest.fixture
def make(tmp_path: Path, sample_model: Path) -> Make:
    """Saves a small random model with the sample model's tokenizer."""
    import torch
    from transformers import AutoTokenizer

    def make(kind: Any, config: Any) -> Path:
        directory = tmp_path / "made"
        tokenizer = AutoTokenizer.from_pretrained(sample_model)
        torch.manual_seed(0)
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def codegen(make: Make) -> Path:
    """A model of a kind that vLLM does not have, with attention of its own."""
    from transformers import AutoModelForCausalLM, CodeGenConfig

    config = CodeGenConfig(
        vocab_size=49152, n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=256, eos_token_id=0
    )
    return make(AutoModelForCausalLM, config)


def settings(model: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(name="m", model_dir=model, model_id=str(model), **fields)


def test_vllm_is_chosen_where_it_can_run_the_model(sample_model: Path) -> None:
    assert chosen(settings(sample_model)).rolling_batch == "vllm"


def test_without_vllm_a_model_is_served_by_transformers(
    tmp_path: Path, sample_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_vllm:
        without_vllm.setattr("importlib.util.find_spec", lambda _: None)
        assert chosen(settings(sample_model)).rolling_batch == "scheduler"
    model = tmp_path / "model"
    shutil.copytree(sample_model, model)
    with serving(tmp_path, model_id=model, dtype="fp32", rolling_batch="scheduler", max_model_len=256) as server:
        answer = server.invoke("Hello", max_new_tokens=5, details=True).json()
        assert answer["details"]["generated_tokens"] == 5


@pytest.mark.asyncio
async def test_a_model_that_no_rolling_batch_can_run_is_refused_and_what_runs_it_is_named(
    codegen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        automatic = chosen(settings(codegen, dtype="fp32"))
    assert automatic.rolling_batch == "scheduler"
    assert "CodeGenForCausalLM" in caplog.text
    with pytest.raises(EngineStartError, match=r"CodeGenForCausalLM.*option\.rolling_batch=disable runs it"):
        await engine_factory(automatic)(automatic).start()
    batches = replace(automatic, rolling_batch="disable")
    engine = engine_factory(batches)(batches)
    await engine.start()
    request = GenerationRequest(request_id="r", prompt="Hello", sampling=SamplingParameters(max_tokens=3))
    assert [delta.last async for delta in generate(engine, request)] == [True]
    await engine.stop()


def test_what_is_wrong_otherwise_is_left_to_the_engine_to_say(tmp_path: Path) -> None:
    assert chosen(settings(tmp_path / "nothing")).rolling_batch == "vllm"


@pytest.mark.asyncio
async def test_a_quantization_that_vllm_does_not_have_is_refused_with_those_that_it_has(sample_model: Path) -> None:
    model = settings(sample_model, rolling_batch="vllm", engine_arguments={"quantization": "eetq"})
    with pytest.raises(EngineStartError) as caught:
        await engine_factory(model)(model).start()
    refusal = f"vLLM cannot load {sample_model}: Unknown quantization method: eetq. Must be one of ['awq', "
    assert str(caught.value).startswith(refusal)
    assert str(caught.value).endswith("'].")


def test_an_encoder_decoder_model_is_none_that_vllm_generates_text_with(make: Make) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    from handlers.engines.vllm_models import unsupported

    config = BartConfig(
        vocab_size=49152,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=64,
    )
    reason = unsupported(settings(make(BartForConditionalGeneration, config)))
    assert reason is not None
    assert "encoder-decoder" in reason


def test_an_encoder_is_none_that_vllm_generates_text_with(make: Make) -> None:
    from transformers import BertConfig, BertForMaskedLM

    from handlers.engines.vllm_models import unsupported

    config = BertConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    reason = unsupported(settings(make(BertForMaskedLM, config)))
    assert reason is not None
    assert "does not generate text" in reason


def test_a_model_that_vllm_fails_to_inspect_is_left_to_vllm_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from handlers.engines.vllm_models import unsupported

    def fail(_: object) -> None:
        raise ValueError("Model architectures ['XForCausalLM'] failed to be inspected. Please check the logs.")

    monkeypatch.setattr(AsyncEngineArgs, "create_model_config", fail)
    assert unsupported(settings(Path("/m"))) is None
