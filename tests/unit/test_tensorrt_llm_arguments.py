"""LMI's TensorRT-LLM options as arguments of its LLM API: contracts/lmi.md section 2.14."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from handlers.engines.protocol import EngineStartError
from handlers.engines.tensorrt_llm_arguments import Arguments, engine_arguments
from handlers.model_settings import ModelSettings
from tests.unit import fake_tensorrt_llm as fake


def translate(
    options: dict[str, str] | None = None, gpus: int = 1, context: int | None = 4096, **fields: Any
) -> Arguments:
    options = options or {}
    settings = ModelSettings(
        name="m",
        model_dir=Path("/m"),
        model_id="/m",
        engine_arguments=options,
        engine_argument_sources={name: f"serving.properties: option.{name}" for name in options},
        **fields,
    )
    return engine_arguments(settings, fake, gpus, context)


def test_the_defaults_are_the_models_context_and_lmis_batch() -> None:
    arguments = translate()
    assert (arguments.max_model_len, arguments.max_input_len, arguments.max_batch_size) == (4096, None, 256)
    assert dict(arguments.llm) == {
        "model": "/m",
        "revision": None,
        "trust_remote_code": False,
        "dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": 256,
        "max_seq_len": 4096,
        "max_input_len": 4096,
        "max_num_tokens": 16384,
        "kv_cache_config": fake.KvCacheConfig(),
    }


@pytest.mark.parametrize(
    ("option", "text", "argument", "value"),
    [
        ("max_output_len", "512", "max_seq_len", 512),
        ("max_model_len", "512", "max_seq_len", 512),
        ("max_seq_len", "512", "max_seq_len", 512),
        ("max_input_len", "100", "max_input_len", 100),
        ("max_num_tokens", "2048", "max_num_tokens", 2048),
        ("max_num_batched_tokens", "2048", "max_num_tokens", 2048),
        ("max_num_sequences", "7", "max_batch_size", 7),
        ("enable_chunked_prefill", "True", "enable_chunked_prefill", True),
        ("sampler_type", "TorchSampler", "sampler_type", "TorchSampler"),
        ("cuda_graph_config", '{"enable_padding": true}', "cuda_graph_config", {"enable_padding": True}),
        ("batch_scheduler_policy", "max_utilization", "scheduler_config", "MAX_UTILIZATION"),
        ("batch_scheduler_policy", "guaranteed_no_evict", "scheduler_config", "GUARANTEED_NO_EVICT"),
    ],
)
def test_options_become_arguments_that_the_package_takes(option: str, text: str, argument: str, value: Any) -> None:
    llm = translate({option: text}).llm
    given = llm[argument]
    assert (given.capacity_scheduler_policy.name if argument == "scheduler_config" else given) == value
    fake.TorchLlmArgs(**llm)


@pytest.mark.parametrize(
    ("option", "text", "field", "value"),
    [
        ("kv_cache_free_gpu_mem_fraction", "0.8", "free_gpu_memory_fraction", 0.8),
        ("free_gpu_memory_fraction", "0.8", "free_gpu_memory_fraction", 0.8),
        ("enable_kv_cache_reuse", "false", "enable_block_reuse", False),
        ("tokens_per_block", "64", "tokens_per_block", 64),
        ("kv_cache_dtype", "fp8", "dtype", "fp8"),
        ("host_cache_size", "1000", "host_cache_size", 1000),
    ],
)
def test_options_of_the_kv_cache_become_its_configuration(option: str, text: str, field: str, value: Any) -> None:
    assert getattr(translate({option: text}).llm["kv_cache_config"], field) == value


@pytest.mark.parametrize(
    ("fields", "gpus", "degree"),
    [
        ({}, 4, 1),
        ({"tensor_parallel_degree": 2}, 4, 2),
        ({"tensor_parallel_max": True}, 4, 4),
        ({"tensor_parallel_max": True, "pipeline_parallel_degree": 2}, 4, 2),
    ],
)
def test_parallel_degrees_are_passed_on(fields: dict[str, Any], gpus: int, degree: int) -> None:
    llm = translate(gpus=gpus, **fields).llm
    assert llm["tensor_parallel_size"] == degree
    assert llm["pipeline_parallel_size"] == fields.get("pipeline_parallel_degree", 1)


def test_what_the_engine_needs_to_know_itself_is_not_passed_on() -> None:
    arguments = translate({"max_logprobs": "5", "backend": "pytorch", "max_input_len": "10"})
    assert (arguments.max_logprobs, arguments.max_input_len, arguments.sampler) == (5, 10, "auto")
    assert not {"max_logprobs", "backend"} & arguments.llm.keys()


def test_options_without_a_counterpart_get_one_warning_that_names_them(caplog: pytest.LogCaptureFixture) -> None:
    options = {"quantization": "awq", "rotary_base": "1", "max_beam_width": "4", "num_postprocess_workers": "2"}
    with caplog.at_level(logging.WARNING):
        llm = translate(options).llm
    [record] = caplog.records
    assert all(f"serving.properties: option.{name}" in record.getMessage() for name in options)
    assert "a quantized checkpoint is recognized without it" in record.getMessage()
    assert not options.keys() & llm.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": "many"}, "option.max_seq_len: 'many' is not an integer of at least 1"),
        ({"max_output_len": "0"}, "option.max_output_len: 0 is not an integer of at least 1"),
        ({"max_num_sequences": "true"}, "option.max_num_sequences: True is not an integer of at least 1"),
        ({"max_logprobs": "-1"}, "option.max_logprobs: -1 is not an integer of at least 1"),
        ({"kv_cache_free_gpu_mem_fraction": "1.5"}, "option.kv_cache_free_gpu_mem_fraction: TensorRT-LLM refuses"),
        ({"batch_scheduler_policy": "static"}, "'static' is none of max_utilization, guaranteed_no_evict"),
        ({"backend": "tensorrt"}, "option.backend: 'tensorrt' is not served"),
        ({"max_output_len": "8", "max_model_len": "9"}, "are the same option with different values"),
    ],
)
def test_a_value_that_cannot_be_is_refused_naming_its_source(options: dict[str, str], message: str) -> None:
    with pytest.raises(EngineStartError) as refused:
        translate(options)
    assert message in str(refused.value)


def test_two_names_of_an_option_may_agree() -> None:
    assert translate({"max_output_len": "8", "max_model_len": "8"}).max_model_len == 8


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(EngineStartError, match=r"is more than this machine's GPUs \(2\)"):
        translate(gpus=2, tensor_parallel_degree=2, pipeline_parallel_degree=2)


def test_a_model_that_does_not_say_its_context_needs_the_option() -> None:
    with pytest.raises(EngineStartError, match=r"set option\.max_model_len"):
        translate(context=None)
    assert translate({"max_model_len": "9"}, context=None).max_model_len == 9
