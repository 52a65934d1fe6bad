"""Variables of TGI, of AWS's vLLM image and of LMI's entry point, and what they come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from container.settings.aliases import ALIASES
from container.settings.load import load_settings
from container.settings.report import render_json, render_text
from container.settings.settings import Settings


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"MODEL_ID": "org/name"}, "model_id", "org/name"),
        ({"MODEL_ID": "org/name", "REVISION": "v2"}, "revision", "v2"),
        ({"HF_MODEL_ID": "org/name", "HF_MODEL_REVISION": "v2"}, "revision", "v2"),
        ({"NUM_SHARD": "4"}, "tensor_parallel_degree", 4),
        ({"SM_NUM_GPUS": "2", "NUM_SHARD": "2"}, "tensor_parallel_degree", 2),
        ({"MAX_INPUT_LENGTH": "100"}, "max_prompt_tokens", 100),
        ({"MAX_INPUT_TOKENS": "100"}, "max_prompt_tokens", 100),
        ({"MAX_TOTAL_TOKENS": "200"}, "engine_arguments", {"max_model_len": "200"}),
        ({"MAX_BATCH_PREFILL_TOKENS": "64"}, "engine_arguments", {"max_num_batched_tokens": "64"}),
        ({"MAX_STOP_SEQUENCES": "9"}, "max_stop_sequences", 9),
        ({"MAX_BEST_OF": "5"}, "max_best_of", 5),
        ({"MESSAGES_API_ENABLED": "true"}, "chat_format", "openai"),
        ({"MESSAGES_API_ENABLED": "false"}, "chat_format", "lmi"),
        ({"QUANTIZE": "bitsandbytes-nf4"}, "engine_arguments", {"quantization": "bitsandbytes"}),
        ({"HF_MODEL_QUANTIZE": "bitsandbytes-fp4"}, "engine_arguments", {"quantization": "bitsandbytes"}),
        ({"DTYPE": "bfloat16"}, "dtype", "bfloat16"),
        ({"TRUST_REMOTE_CODE": "1"}, "trust_remote_code", True),
        ({"SM_VLLM_MODEL": "org/name"}, "model_id", "org/name"),
        ({"SM_VLLM_MAX_MODEL_LEN": "300"}, "engine_arguments", {"max_model_len": "300"}),
        ({"SM_VLLM_ENFORCE_EAGER": ""}, "engine_arguments", {"enforce_eager": "true"}),
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "8"}, "tensor_parallel_degree", 8),
        ({"SM_VLLM_SERVED_MODEL_NAME": "x"}, "served_model_names", ("x",)),
        ({"STANDARD_AUTO_INSTALL_REQ": "false"}, "install_requirements", False),
        ({"STANDARD_PIP_ARGS": "-r 'my file.txt'"}, "pip_arguments", ("-r", "my file.txt")),
    ],
)
def test_a_variable_of_another_container_sets_what_it_means(
    model_dir: Path, environ: dict[str, str], field: str, value: Any
) -> None:
    settings = load_settings(model_dir, environ)
    assert getattr(settings.model, field) == value
    assert settings.warnings == ()


def test_the_environment_of_a_tgi_deployment_is_explained(model_dir: Path) -> None:
    environ = {"HF_MODEL_ID": "org/name", "SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "10", "MAX_TOTAL_TOKENS": "20"}
    settings = load_settings(model_dir, environ | {"MAX_CONCURRENT_REQUESTS": "7", "HUGGING_FACE_HUB_TOKEN": "hf_x"})
    assert settings.server.job_queue_size == 7
    assert settings.exports == {"HF_TOKEN": "hf_x"}
    text = render_text(settings)
    assert "alias: MAX_INPUT_LENGTH (TGI) is option.max_prompt_tokens" in text
    assert "environment: MAX_INPUT_LENGTH" in text
    assert "hf_x" not in text
    names = [entry.name for entry in settings.entries]
    assert len(names) == len(set(names))
    assert {"variable": "SM_NUM_GPUS", "of": "LMI, TGI", "setting": "option.tensor_parallel_degree"} in json.loads(
        render_json(settings)
    )["aliases"]


def warning(settings: Settings) -> str:
    (only,) = settings.warnings
    return only


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TENSOR_PARALLEL_DEGREE": "2", "SM_NUM_GPUS": "4"}, "SM_NUM_GPUS (environment: SM_NUM_GPUS) is ignored"),
        ({"SM_NUM_GPUS": "2", "NUM_SHARD": "4"}, "it stands for TENSOR_PARALLEL_DEGREE, which SM_NUM_GPUS sets"),
        ({"OPTION_TENSOR_PARALLEL_DEGREE": "2", "NUM_SHARD": "4"}, "is set by environment: OPTION_TENSOR"),
        ({"OPTION_DTYPE": "fp16", "SM_VLLM_DTYPE": "fp32"}, "SM_VLLM_DTYPE"),
        ({"MAX_INPUT_TOKENS": "1", "MAX_INPUT_LENGTH": "2"}, "MAX_INPUT_LENGTH"),
        ({"ROPE_FACTOR": "2", "MAX_WAITING_TOKENS": "20"}, "MAX_WAITING_TOKENS, ROPE_FACTOR (environment, of TGI)"),
        ({"API_KEY": "hidden"}, "API_KEY (environment, of TGI) has no effect: requests are served without a key"),
        (
            {"LORA_ADAPTERS": "org/a,org/b"},
            "LORA_ADAPTERS (environment, of TGI) has no effect: give OPTION_ENABLE_LORA",
        ),
        ({"OPTION_MAX_MODEL_LENGHT": "9"}, "did you mean option.max_model_len?"),
        ({"OPTION_Max_Model_LEN": "9"}, "did you mean option.max_model_len?"),
        ({"OPTION_ENABLE_REASONING": "true"}, "`option.reasoning_parser` alone switches it on"),
        ({"OPTION_GPU_MEMORY_UTILISATION": "0.5"}, "did you mean option.gpu_memory_utilization?"),
        ({"SERVING_JOB_QUE_SIZE": "9"}, "did you mean SERVING_JOB_QUEUE_SIZE?"),
        ({"MAX_INPUT_LENGHT": "9"}, "did you mean MAX_INPUT_LENGTH?"),
        ({"TENSOR_PARALEL_DEGREE": "9"}, "did you mean TENSOR_PARALLEL_DEGREE?"),
    ],
)
def test_what_does_nothing_is_warned_of(model_dir: Path, environ: dict[str, str], words: str) -> None:
    assert words in warning(load_settings(model_dir, environ))


@pytest.mark.parametrize(
    "name", ["HOSTNAME", "PORT", "HF_HOME", "SM_NUM_CPUS", "SAGEMAKER_REGION", "SAGEMAKER_MODEL_SERVER_WORKERS"]
)
def test_variables_of_other_software_are_not_warned_of(model_dir: Path, name: str) -> None:
    assert load_settings(model_dir, {name: "x"}).warnings == ()


@pytest.mark.parametrize(
    "name", ["data_parallel_size", "device_ids", "ubatch_size", "max_num_active_seqs", "disable_custom_all_reduce"]
)
def test_an_option_of_the_engine_is_not_taken_for_a_misspelt_one(model_dir: Path, name: str) -> None:
    assert load_settings(model_dir, {f"OPTION_{name.upper()}": "1"}).warnings == ()


def test_offline_for_lmi_is_offline_for_the_hub(model_dir: Path) -> None:
    assert load_settings(model_dir, {"DJL_OFFLINE": "true"}).exports == {"HF_HUB_OFFLINE": "1"}


def test_no_variable_is_an_alias_twice() -> None:
    assert len({alias.variable for alias in ALIASES}) == len(ALIASES)
