"""Variables of TGI, AWS's vLLM image and LMI's entry point, and the settings that they give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from container.api_keys import ApiKeys
from container.models.placement import GpuPlan
from container.settings import server
from container.settings.environment import ALIASES, IGNORED_VARIABLES, KEY_VARIABLES, read_environment
from container.settings.report import render_text, startup_json
from container.settings.settings import Startup, StartupModel
from engines.vllm.arguments.table import WITHOUT_EFFECT
from tests.settings import load_settings


def test_the_environment_of_a_tgi_deployment_is_explained(model_dir: Path) -> None:
    environ = {"HF_MODEL_ID": "org/name", "SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "10", "MAX_TOTAL_TOKENS": "20"}
    environ |= {"MAX_CONCURRENT_REQUESTS": "7", "HUGGING_FACE_HUB_TOKEN": "hf_x"}
    settings = load_settings(model_dir, environ)
    assert settings.server_config.job_queue_size == 7
    assert read_environment(environ).exports == {"HF_TOKEN": "hf_x"}
    text = render_text(settings)
    assert "alias: MAX_INPUT_LENGTH (TGI) stands for OPTION_MAX_PROMPT_TOKENS" in text
    assert "environment: MAX_INPUT_LENGTH" in text
    assert "hf_x" not in text
    names = [entry.name for entry in settings.entries]
    assert len(names) == len(set(names))
    assert {"variable": "SM_NUM_GPUS", "of": "LMI, TGI", "setting": "TENSOR_PARALLEL_DEGREE"} in json.loads(
        startup_json(Startup(settings.server_config, (StartupModel(settings, ""),)), GpuPlan(()))
    )["aliases"]


# The variables that the launcher of TGI 3.3.7 and the router of TEI 1.8 read.
LAUNCHER = """
MODEL_ID REVISION VALIDATION_WORKERS SHARDED NUM_SHARD QUANTIZE SPECULATE DTYPE KV_CACHE_DTYPE TRUST_REMOTE_CODE
MAX_CONCURRENT_REQUESTS MAX_BEST_OF MAX_STOP_SEQUENCES MAX_TOP_N_TOKENS MAX_INPUT_TOKENS MAX_INPUT_LENGTH
MAX_TOTAL_TOKENS WAITING_SERVED_RATIO MAX_BATCH_PREFILL_TOKENS MAX_BATCH_TOTAL_TOKENS MAX_WAITING_TOKENS MAX_BATCH_SIZE
CUDA_GRAPHS PORT PROMETHEUS_PORT SHARD_UDS_PATH MASTER_ADDR MASTER_PORT WEIGHTS_CACHE_OVERRIDE DISABLE_CUSTOM_KERNELS
CUDA_MEMORY_FRACTION ROPE_SCALING ROPE_FACTOR JSON_OUTPUT OTLP_ENDPOINT OTLP_SERVICE_NAME CORS_ALLOW_ORIGIN API_KEY
WATERMARK_GAMMA WATERMARK_DELTA NGROK NGROK_AUTHTOKEN NGROK_EDGE TOKENIZER_CONFIG_PATH DISABLE_GRAMMAR_SUPPORT
MAX_CLIENT_BATCH_SIZE LORA_ADAPTERS USAGE_STATS PAYLOAD_LIMIT ENABLE_PREFILL_LOGPROBS GRACEFUL_TERMINATION_TIMEOUT
"""
ROUTER = """
MODEL_ID REVISION TOKENIZATION_WORKERS DTYPE SERVED_MODEL_NAME POOLING MAX_CONCURRENT_REQUESTS MAX_BATCH_TOKENS
MAX_BATCH_REQUESTS MAX_CLIENT_BATCH_SIZE AUTO_TRUNCATE DEFAULT_PROMPT_NAME DEFAULT_PROMPT DENSE_PATH HF_API_TOKEN
PORT UDS_PATH PAYLOAD_LIMIT API_KEY JSON_OUTPUT DISABLE_SPANS OTLP_ENDPOINT OTLP_SERVICE_NAME PROMETHEUS_PORT
CORS_ALLOW_ORIGIN
"""
# Every container has HOSTNAME, and the hub's own library reads HUGGINGFACE_HUB_CACHE.
TOOLKITS = """
SAGEMAKER_BASE_DIR SAGEMAKER_CONTAINER_LOG_LEVEL SAGEMAKER_MODEL_SERVER_WORKERS SAGEMAKER_MODEL_SERVER_TIMEOUT
SAGEMAKER_MODEL_SERVER_VMARGS SAGEMAKER_SAFE_PORT_RANGE SAGEMAKER_TS_BATCH_SIZE SAGEMAKER_TS_MAX_BATCH_DELAY
SAGEMAKER_TS_MIN_WORKERS SAGEMAKER_TS_MAX_WORKERS SAGEMAKER_TS_RESPONSE_TIMEOUT
"""


def test_a_setting_without_its_prefix_gets_the_name_with_it() -> None:
    (warning,) = read_environment({"MAX_MODEL_LEN": "10"}).warnings
    assert "MAX_MODEL_LEN" in warning
    assert "OPTION_MAX_MODEL_LEN" in warning
    others = {"TENSOR_PARALLEL_DEGREE": "1", "SEED": "1", "TASK": "x", "max_model_len": "1", "MAX_NUM_SEQS": ""}
    assert read_environment(others).warnings == ()


@pytest.mark.parametrize("name", sorted({*LAUNCHER.split(), *ROUTER.split(), *TOOLKITS.split()}))
def test_each_variable_of_another_container_is_read_or_ignored_with_a_reason(name: str) -> None:
    aliases = [alias for alias in ALIASES if alias.variable == name]
    environment = read_environment({name: "1"})
    if name in IGNORED_VARIABLES:
        assert not aliases
        assert environment.warnings == (f"{name} (environment: {name}) is ignored: {IGNORED_VARIABLES[name]}",)
    else:
        assert [alias.target in environment.variables for alias in aliases] == [True]
        assert environment.warnings == ()
    assert read_environment({name: ""}).warnings == ()


@pytest.mark.parametrize(("name", "reason"), WITHOUT_EFFECT.items())
def test_an_argument_of_vllm_without_effect_is_a_warning(model_dir: Path, name: str, reason: str) -> None:
    variables = [f"OPTION_{name.upper()}", f"SM_VLLM_{name.upper()}"]
    for variable in variables[:1] if name in ("host", "port") else variables:  # SM_VLLM_HOST sets SERVING_HOST.
        settings = load_settings(model_dir, {variable: "/x"})
        assert settings.warnings == (f"option.{name} (environment: {variable}) is ignored: {reason}",)
        assert settings.config.engine_arguments == {}


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        ({}, None),
        ({"SERVING_API_KEYS": "sk-a, sk-b"}, ("sk-a", "sk-b")),
        ({"API_KEY": "sk,a"}, ("sk,a",)),
        ({"VLLM_API_KEY": "sk-a"}, ("sk-a",)),
        ({"SM_VLLM_API_KEY": "sk,a"}, ("sk,a",)),
        ({"API_KEY": "", "VLLM_API_KEY": ""}, None),
    ],
)
def test_keys_of_all_containers_are_asked_for(
    model_dir: Path, environ: dict[str, str], keys: tuple[str, ...] | None
) -> None:
    settings = load_settings(model_dir, environ)
    assert settings.server_config.api_keys == (None if keys is None else ApiKeys.of(keys))
    assert settings.warnings == ()
    assert environ.keys() <= KEY_VARIABLES
    assert "sk" not in repr(settings.server_config) + repr(settings.entries)


def test_the_report_says_where_keys_come_from_and_has_none(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-file\n")
    environ = {"VLLM_API_KEY": "sk-variable", "API_KEY": "sk-variable", "SERVING_API_KEYS_FILE": str(file)}
    settings = load_settings(model_dir, environ)
    assert settings.server_config.api_keys == ApiKeys.of(("sk-variable", "sk-file"))
    startup = Startup(settings.server_config, (StartupModel(settings, ""),))
    for text in (render_text(settings), startup_json(startup, GpuPlan(()))):
        assert "environment: API_KEY" in text
        assert str(file) in text
        assert "sk-" not in text
    assert "alias: API_KEY (TGI) stands for SERVING_API_KEYS" in render_text(settings)


def test_on_sagemaker_iam_decides_and_keys_are_not_asked_for(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SAGEMAKER_METADATA", model_dir)
    settings = load_settings(model_dir, {"API_KEY": "a key of the handler", "SERVING_API_KEYS_FILE": "/no/such"})
    assert settings.server_config.api_keys is None
    of_variable, of_file = settings.warnings
    assert of_variable == (
        "api_keys (environment: API_KEY) is ignored: SageMaker passes no key on to the container; "
        "IAM decides who may call the endpoint"
    )
    assert "api_keys_file (environment: SERVING_API_KEYS_FILE)" in of_file


def test_no_variable_is_an_alias_twice() -> None:
    assert len({alias.variable for alias in ALIASES}) == len(ALIASES)


def test_a_variable_that_is_no_text_is_a_problem_only_if_it_matters() -> None:
    environment = read_environment({"OPTION_DTYPE": "\udcff", "OTHER": "\udcff"})
    assert dict(environment.variables) == {}
    assert list(environment.problems) == ["environment: OPTION_DTYPE is not UTF-8 text"]
