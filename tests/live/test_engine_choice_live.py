"""`option.rolling_batch=auto`: vLLM where it can run the model, else transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from handlers.engine_choice import chosen
from handlers.model_settings import ModelSettings
from tests.live.server import serving


@pytest.fixture(scope="module")
def codegen(tmp_path_factory: pytest.TempPathFactory, sample_model: Path) -> Path:
    """A small random model of a kind that vLLM does not have."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, CodeGenConfig

    directory = tmp_path_factory.mktemp("codegen")
    tokenizer = AutoTokenizer.from_pretrained(sample_model)
    torch.manual_seed(0)
    config = CodeGenConfig(
        vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=256, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def settings(model: Path) -> ModelSettings:
    return ModelSettings(name="m", model_dir=model, model_id=str(model))


def test_vllm_is_chosen_where_it_can_run_the_model(sample_model: Path) -> None:
    assert chosen(settings(sample_model)).rolling_batch == "vllm"


def test_a_model_that_vllm_does_not_have_is_served_by_transformers(tmp_path: Path, codegen: Path) -> None:
    assert chosen(settings(codegen)).rolling_batch == "scheduler"
    model = tmp_path / "codegen"
    shutil.copytree(codegen, model)
    with serving(tmp_path, model_id=model, dtype="fp32") as server:
        answer = server.invoke("Hello", max_new_tokens=5, details=True).json()
        assert answer["details"]["generated_tokens"] == 5
        assert "CodeGenForCausalLM" in server.log_text()
        assert "transformers' continuous batching runs the model" in server.log_text()


def test_what_is_wrong_otherwise_is_left_to_the_engine_to_say(tmp_path: Path) -> None:
    assert chosen(settings(tmp_path / "nothing")).rolling_batch == "vllm"
