"""vLLM with transformers' code for a model: if a setting requests it, or if vLLM does not implement the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.server import Server, hosted, write_model

pytestmark = pytest.mark.slow

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaModel):
    config_class = OwnConfig
    _supports_attention_backend = True


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
"""
AUTO_MAP = {
    "AutoConfig": "own_code.OwnConfig",
    "AutoModel": "own_code.OwnModel",
    "AutoModelForCausalLM": "own_code.OwnForCausalLM",
}


def own_model(directory: Path, sample_model: Path) -> Path:
    """Make a small random model with the sample model's tokenizer.

    Only code in the model's directory knows its architecture.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(sample_model).save_pretrained(directory)
    (directory / "own_code.py").write_text(OWN_CODE)
    file = directory / "config.json"
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return directory


def test_the_scheduler_runs_on_vllm_with_transformers_code_and_its_own_parameters(
    host: Server, tmp_path: Path, engine_options: dict[str, object]
) -> None:
    model = write_model(tmp_path / "model", **engine_options | {"rolling_batch": "scheduler"})
    with hosted(host, model) as server:
        greedy = server.invoke("The capital of France is", max_new_tokens=4, details=True).json()
        assert greedy["generated_text"] == " Paris.\n\n"
        sampled = {"do_sample": True, "typical_p": 0.001, "seed": 3, "temperature": 2.0, "max_new_tokens": 12}
        texts = {server.invoke("Once upon a time", **sampled | {"typical_p": mass}).text for mass in (0.001, 1.0)}
        assert len(texts) == 2, "typical_p has its effect"
        server.wait_for_log("option.rolling_batch=scheduler: ")
        log = server.log_text()
    assert log.count("option.rolling_batch=scheduler: vLLM runs the model with model_impl=transformers") == 1
    assert "TransformersForCausalLM" in log, "vLLM says so too"


def test_a_model_for_which_vllm_has_no_code_runs_with_its_own(host: Server, tmp_path: Path, sample_model: Path) -> None:
    weights = own_model(tmp_path / "own", sample_model)
    options = {"model_id": weights, "trust_remote_code": "true", "dtype": "fp32", "kv_cache_memory_bytes": 64 << 20}
    with hosted(host, write_model(tmp_path / "model", rolling_batch="auto", **options)) as server:
        answer = server.invoke("Hello", max_new_tokens=5, ignore_eos_token=True, details=True).json()
        assert answer["details"]["generated_tokens"] == 5
