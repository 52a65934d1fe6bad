"""Settings that are read before a model is loaded, and models and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from transformers import BartConfig, BertConfig, LlamaConfig

from engines.interface import EngineStartError
from engines.transformers.model import (
    check_kind,
    check_quantization,
    check_weights,
    loading_arguments,
    max_model_len,
    model_arguments,
    pad_token_id,
)
from handlers.model_config import ModelConfig


def settings(engine_arguments: dict[str, str] | None = None, **fields: Any) -> ModelConfig:
    return ModelConfig(name="m", model_dir=Path("/m"), model_id="/m", engine_arguments=engine_arguments or {}, **fields)


def yarn(length: int) -> dict[str, Any]:
    """Return a configuration with this length. YaRN multiplies the original 32768 tokens by four."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    return {"max_position_embeddings": length, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("given", "config", "length"),
    [
        ({}, {"max_position_embeddings": 2048}, 2048),
        ({}, {"n_positions": 1024}, 1024),
        ({}, {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, 8192),
        ({}, yarn(32768), 131072),
        ({}, yarn(131072), 131072),
        ({"max_model_len": " 7 "}, {"n_positions": 64}, 7),
        ({"max_model_len": "4096"}, {}, 4096),
    ],
)
def test_the_context_is_that_of_the_option_or_of_the_model(
    given: dict[str, str], config: dict[str, Any], length: int
) -> None:
    assert max_model_len(settings(given), SimpleNamespace(**config)) == length


@pytest.mark.parametrize("given", ["0", "x", "4.5", "4096", None])
def test_a_context_that_cannot_be_is_refused_by_name(given: str | None) -> None:
    arguments = {} if given is None else {"max_model_len": given}
    with pytest.raises(EngineStartError, match=r"option\.max_model_len"):
        max_model_len(settings(arguments), SimpleNamespace(max_position_embeddings=2048 if given else None))


def test_a_switch_is_true_or_false_or_refused() -> None:
    read = [loading_arguments(settings({"load_in_8bit": text})).load_in_8bit for text in ("True", "0", "")]
    assert read == [True, False, False]
    with pytest.raises(EngineStartError, match=r"option\.load_in_8bit"):
        loading_arguments(settings({"load_in_8bit": "maybe"}))


def test_loading_arguments_become_those_of_from_pretrained() -> None:
    given = {"device_map": '{"": "cpu"}', "attn_implementation": "eager"}
    arguments = model_arguments(settings(given, dtype="bfloat16", revision="r", tensor_parallel_degree=2))
    assert arguments == {
        "revision": "r",
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "device_map": {"": "cpu"},
        "attn_implementation": "eager",
    }


def test_tensor_parallelism_is_refused_unless_a_device_map_serves_it() -> None:
    with pytest.raises(EngineStartError, match="tensor_parallel_degree"):
        model_arguments(settings(tensor_parallel_degree=2))


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_a_quantization_that_the_weights_do_not_have_is_refused(method: str) -> None:
    plain, quantized = SimpleNamespace(), SimpleNamespace(quantization_config={"quant_method": "awq"})
    with pytest.raises(EngineStartError, match=rf"option\.quantization: {method!r}"):
        check_quantization(settings({"quantization": method}), plain)
    check_quantization(settings({"quantization": method}), quantized)
    check_quantization(settings({"quantization": "bitsandbytes"}), plain)


@pytest.mark.parametrize(
    ("pad", "eos", "expected"), [(5, 2, 5), (100, 2, 2), (None, 2, 2), (None, 100, 0), (-1, None, 0)]
)
def test_padding_is_a_token_that_the_model_can_embed(pad: int | None, eos: int | None, expected: int) -> None:
    assert pad_token_id(SimpleNamespace(pad_token_id=pad, eos_token_id=eos), 100) == expected


@pytest.mark.parametrize(("config", "message"), [(BartConfig(), "encoder-decoder model"), (BertConfig(), "an encoder")])
def test_what_is_no_causal_language_model_is_refused(config: Any, message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        check_kind(settings(), config)
    check_kind(settings(), BertConfig(is_decoder=True))
    check_kind(settings(), LlamaConfig())


def test_a_checkpoint_without_all_weights_is_refused_by_their_names() -> None:
    check_weights(settings(), {"missing_keys": set(), "mismatched_keys": set()})
    with pytest.raises(EngineStartError, match=r"lacks weights: a, b, c and 2 more"):
        check_weights(settings(), {"missing_keys": set("edcba")})
    with pytest.raises(EngineStartError, match=r"wrong shape: head"):
        check_weights(settings(), {"missing_keys": set(), "mismatched_keys": {("head", (2, 3), (3, 2))}})
