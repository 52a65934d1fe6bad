"""Settings of the transformers engines that are read before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from handlers.engines.protocol import EngineStartError
from handlers.engines.transformers_cache import batching_config
from handlers.engines.transformers_model import (
    TransformersModel,
    _check_quantization,
    _longest_context,
    _max_model_len,
    _model_arguments,
    boolean_argument,
    integer_argument,
)
from handlers.model_settings import ModelSettings


def settings(engine_arguments: dict[str, str] | None = None, **fields: Any) -> ModelSettings:
    return ModelSettings(
        name="m", model_dir=Path("/m"), model_id="/m", engine_arguments=engine_arguments or {}, **fields
    )


def model(max_model_len: int = 1000) -> TransformersModel:
    """10 layers of 2 key-value heads of size 8, in float32: 1280 bytes of KV cache a token."""
    config = SimpleNamespace(num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    weights = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config), dtype=torch.float32)
    empty: frozenset[int] = frozenset()
    return TransformersModel(weights, None, torch.device("cpu"), max_model_len, 100, empty, empty, 0)


@pytest.mark.parametrize(("text", "value"), [("7", 7), (" 7 ", 7)])
def test_an_integer_is_read_with_blanks_around_it(text: str, value: int) -> None:
    assert integer_argument(settings({"block_size": text}), "block_size", 4) == value


@pytest.mark.parametrize("text", ["3", "x", "", "4.0"])
def test_what_is_no_integer_of_that_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(EngineStartError, match=r"option\.block_size"):
        integer_argument(settings({"block_size": text}), "block_size", 4)


def test_a_switch_is_true_or_false_or_refused() -> None:
    read = [boolean_argument(settings({"load_in_8bit": text}), "load_in_8bit") for text in ("True", "off")]
    assert read == [True, False]
    with pytest.raises(EngineStartError, match=r"option\.load_in_8bit"):
        boolean_argument(settings({"load_in_8bit": "maybe"}), "load_in_8bit")


def test_loading_arguments_become_those_of_from_pretrained() -> None:
    given = {"device_map": '{"": "cpu"}', "attn_implementation": "eager"}
    arguments = _model_arguments(settings(given, dtype="bfloat16", revision="r", tensor_parallel_degree=2))
    assert arguments == {
        "revision": "r",
        "trust_remote_code": False,
        "dtype": torch.bfloat16,
        "device_map": {"": "cpu"},
        "attn_implementation": "eager",
    }


def test_tensor_parallelism_is_refused_unless_a_device_map_serves_it() -> None:
    with pytest.raises(EngineStartError, match="tensor_parallel_degree"):
        _model_arguments(settings(tensor_parallel_degree=2))


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"option\.dtype: 'int9'"):
        _model_arguments(settings(dtype="int9"))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        ({}, None),
    ],
)
def test_the_longest_context_is_the_models_own(config: dict[str, Any], length: int | None) -> None:
    assert _longest_context(SimpleNamespace(**config)) == length


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(EngineStartError, match="4096 is more than the model's context of 2048"):
        _max_model_len(settings({"max_model_len": "4096"}), SimpleNamespace(max_position_embeddings=2048))
    with pytest.raises(EngineStartError, match=r"set option\.max_model_len"):
        _max_model_len(settings(), SimpleNamespace())
    assert _max_model_len(settings({"max_model_len": "4096"}), SimpleNamespace()) == 4096


def test_the_cache_is_sized_by_hand_where_that_is_asked_for() -> None:
    config = batching_config(settings({"kv_cache_memory_bytes": str(1280 * 640), "block_size": "64"}), model())
    assert (config.page_size, config.num_blocks) == (64, 10)


def test_on_a_cpu_the_cache_is_no_larger_than_all_requests_together_need() -> None:
    config = batching_config(settings(max_rolling_batch_size=2), model(max_model_len=1024))
    assert config.num_blocks == 2 * 1024 // config.page_size


def test_a_step_has_room_for_a_token_of_each_request() -> None:
    config = batching_config(settings({"max_num_batched_tokens": "16"}, max_rolling_batch_size=100), model())
    assert (config.max_batch_tokens, config.max_requests_per_batch) == (100, 100)


def test_what_rules_out_our_way_of_sampling_is_off() -> None:
    config = batching_config(settings({"enable_prefix_caching": "false"}), model())
    assert (config.use_async_batching, config.use_cuda_graph, config.auto_switch_to_flash) == (False, False, False)
    assert config.allow_block_sharing is False


def test_the_share_of_gpu_memory_is_between_0_and_1() -> None:
    gpu = TransformersModel(model().model, None, torch.device("cuda"), 1000, 100, frozenset(), frozenset(), 0)
    config = batching_config(settings({"gpu_memory_utilization": "0.5"}), gpu)
    assert (config.max_memory_percent, config.num_blocks) == (0.5, None)
    with pytest.raises(EngineStartError, match=r"option\.gpu_memory_utilization"):
        batching_config(settings({"gpu_memory_utilization": "90"}), gpu)


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_a_quantization_that_the_weights_do_not_have_is_refused(method: str) -> None:
    plain, quantized = SimpleNamespace(), SimpleNamespace(quantization_config={"quant_method": "awq"})
    with pytest.raises(EngineStartError, match=rf"option\.quantization: {method!r}"):
        _check_quantization(settings({"quantization": method}), plain)
    _check_quantization(settings({"quantization": method}), quantized)
    _check_quantization(settings({"quantization": "bitsandbytes"}), plain)
