"""Variables of TGI, AWS's vLLM image and LMI's entry point, and the settings that they give."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.api_keys import ApiKeys
from container.settings import server
from container.settings.environment import (
    ALIASES,
    IGNORED_VARIABLES,
    KEY_VARIABLES,
    option_layer,
    read_environment,
    sagemaker_model_layer,
    sagemaker_server_layer,
    serving_layer,
)
from container.settings.report import render_text, startup_json
from container.settings.settings import Settings, SettingsError, Startup, StartupModel
from container.settings.values import Value
from engines.vllm.arguments.table import WITHOUT_EFFECT
from tests.settings import load_settings


def read_variables(environ: dict[str, str], problems: list[str]) -> dict[str, Value]:
    environment = read_environment(environ)
    problems += environment.problems
    return dict(environment.variables)


def texts(layer: dict[str, Value]) -> dict[str, str]:
    return {key: value.text for key, value in layer.items()}


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"MODEL_ID": "org/name"}, "model_id", "org/name"),
        ({"MODEL_ID": "org/name", "REVISION": "v2"}, "revision", "v2"),
        ({"HF_MODEL_ID": "org/name", "HF_MODEL_REVISION": "v2"}, "revision", "v2"),
        ({"NUM_SHARD": "4"}, "tensor_parallel_degree", 4),
        ({"SHARDED": "false"}, "tensor_parallel_degree", 1),
        ({"SHARDED": "true"}, "tensor_parallel_max", True),
        ({"SM_NUM_GPUS": "2", "NUM_SHARD": "2"}, "tensor_parallel_degree", 2),
        ({"MAX_INPUT_LENGTH": "100"}, "max_prompt_tokens", 100),
        ({"MAX_INPUT_TOKENS": "100"}, "max_prompt_tokens", 100),
        ({"MAX_TOTAL_TOKENS": "200"}, "engine_arguments", {"max_model_len": "200"}),
        ({"MAX_BATCH_PREFILL_TOKENS": "64"}, "engine_arguments", {"max_num_batched_tokens": "64"}),
        ({"MAX_STOP_SEQUENCES": "9"}, "tgi.max_stop_sequences", 9),
        ({"MAX_BEST_OF": "5"}, "tgi.max_best_of", 5),
        ({"MESSAGES_API_ENABLED": "true"}, "lmi.chat_format", "openai"),
        ({"MESSAGES_API_ENABLED": "false"}, "lmi.chat_format", "lmi"),
        ({"QUANTIZE": "bitsandbytes-nf4"}, "engine_arguments", {"quantization": "bitsandbytes"}),
        ({"HF_MODEL_QUANTIZE": "bitsandbytes-fp4"}, "engine_arguments", {"quantization": "bitsandbytes"}),
        ({"DTYPE": "bfloat16"}, "dtype", "bfloat16"),
        ({"KV_CACHE_DTYPE": "fp8_e4m3fn"}, "engine_arguments", {"kv_cache_dtype": "fp8_e4m3"}),
        ({"KV_CACHE_DTYPE": "fp8_e5m2"}, "engine_arguments", {"kv_cache_dtype": "fp8_e5m2"}),
        ({"TRUST_REMOTE_CODE": "1"}, "trust_remote_code", True),
        ({"SM_VLLM_MODEL": "org/name"}, "model_id", "org/name"),
        ({"SM_VLLM_MAX_MODEL_LEN": "300"}, "engine_arguments", {"max_model_len": "300"}),
        ({"SM_VLLM_ENFORCE_EAGER": ""}, "engine_arguments", {"enforce_eager": "true"}),
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "8"}, "tensor_parallel_degree", 8),
        ({"SM_VLLM_SERVED_MODEL_NAME": "x"}, "served_model_names", ("x",)),
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "true"}, "engine_arguments", {"enable_prefix_caching": "false"}),
        ({"SM_VLLM_NO_ENABLE_CHUNKED_PREFILL": ""}, "engine_arguments", {"enable_chunked_prefill": "false"}),
        ({"SM_VLLM_NO_ENABLE_PREFIX_CACHING": "False"}, "engine_arguments", {"enable_prefix_caching": "true"}),
        ({"SM_VLLM_NO_TRUST_REMOTE_CODE": "1"}, "trust_remote_code", False),
        ({"SM_VLLM_NO_ENABLE_LORA": "false"}, "enable_lora", True),
        ({"SM_VLLM_NODE_RANK": "1"}, "engine_arguments", {"node_rank": "1"}),
        ({"PREFIX_CACHING": "0"}, "engine_arguments", {"enable_prefix_caching": "0"}),
        ({"OTLP_ENDPOINT": "http://c:4317"}, "engine_arguments", {"otlp_traces_endpoint": "http://c:4317"}),
        ({"SERVED_MODEL_NAME": "x"}, "served_model_names", ("x",)),
        ({"MAX_BATCH_REQUESTS": "7"}, "max_rolling_batch_size", 7),
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT": "3600"}, "predict_timeout", 3600.0),
        ({"SAGEMAKER_TS_RESPONSE_TIMEOUT": "5"}, "predict_timeout", 5.0),
        ({"STANDARD_AUTO_INSTALL_REQ": "false"}, "packages.install_requirements", False),
        ({"STANDARD_PIP_ARGS": "-r 'my file.txt'"}, "packages.pip_arguments", ("-r", "my file.txt")),
    ],
)
def test_a_variable_of_another_container_sets_what_it_means(
    model_dir: Path, environ: dict[str, str], field: str, value: Any
) -> None:
    settings = load_settings(model_dir, environ)
    assert attrgetter(field)(settings.model) == value
    assert settings.warnings == ()


def test_the_environment_of_a_tgi_deployment_is_explained(model_dir: Path) -> None:
    environ = {"HF_MODEL_ID": "org/name", "SM_NUM_GPUS": "1", "MAX_INPUT_LENGTH": "10", "MAX_TOTAL_TOKENS": "20"}
    environ |= {"MAX_CONCURRENT_REQUESTS": "7", "HUGGING_FACE_HUB_TOKEN": "hf_x"}
    settings = load_settings(model_dir, environ)
    assert settings.server.job_queue_size == 7
    assert settings.exports == {"HF_TOKEN": "hf_x"}
    text = render_text(settings)
    assert "alias: MAX_INPUT_LENGTH (TGI) stands for OPTION_MAX_PROMPT_TOKENS" in text
    assert "environment: MAX_INPUT_LENGTH" in text
    assert "hf_x" not in text
    names = [entry.name for entry in settings.entries]
    assert len(names) == len(set(names))
    assert {"variable": "SM_NUM_GPUS", "of": "LMI, TGI", "setting": "TENSOR_PARALLEL_DEGREE"} in json.loads(
        startup_json(Startup(settings.server, (StartupModel(settings, ""),)))
    )["aliases"]


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"JSON_OUTPUT": "true"}, "log_format", "json"),
        ({"JSON_OUTPUT": "false"}, "log_format", "plain"),
        ({"GRACEFUL_TERMINATION_TIMEOUT": "90"}, "drain_timeout", 90.0),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "20"}, "log_level", "info"),
        ({"SAGEMAKER_CONTAINER_LOG_LEVEL": "10"}, "log_level", "debug"),
    ],
)
def test_a_variable_of_another_container_sets_what_it_means_for_the_server(
    model_dir: Path, environ: dict[str, str], field: str, value: Any
) -> None:
    settings = load_settings(model_dir, environ)
    assert attrgetter(field)(settings.server) == value
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("environ", "workers", "warnings"),
    [
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "3"}, (3, 3), 0),
        ({"SAGEMAKER_NUM_MODEL_WORKERS": "2", "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}, (2, 2), 0),
        ({"SAGEMAKER_NUM_MODEL_WORKERS": "2", "SAGEMAKER_MODEL_SERVER_WORKERS": "3"}, (2, 2), 1),
        ({"SAGEMAKER_TS_MIN_WORKERS": "2", "SAGEMAKER_TS_MAX_WORKERS": "4"}, (2, 4), 0),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "3", "SAGEMAKER_TS_MAX_WORKERS": "4"}, (3, 3), 0),
    ],
)
def test_a_script_has_as_many_workers_as_the_variables_of_sagemakers_images_say(
    model_dir: Path, environ: dict[str, str], workers: tuple[int, int], warnings: int
) -> None:
    (model_dir / "config.json").unlink()
    (model_dir / "code").mkdir()
    (model_dir / "code" / "inference.py").write_text("def model_fn(model_dir): ...\n")
    settings = load_settings(model_dir, environ | {"SAGEMAKER_MODEL_SERVER_TIMEOUT": "7"})
    assert settings.model.handler is not None
    assert (settings.model.handler.min_workers, settings.model.handler.max_workers) == workers
    assert settings.model.predict_timeout == 7.0
    assert len(settings.warnings) == warnings


def test_the_timeout_in_seconds_counts_before_the_other_one(model_dir: Path) -> None:
    environ = {"SAGEMAKER_MODEL_SERVER_TIMEOUT": "7", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "8"}
    settings = load_settings(model_dir, environ)
    assert settings.model.predict_timeout == 8.0
    assert "SAGEMAKER_MODEL_SERVER_TIMEOUT " in warning(settings)


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


A, B = {"name": "a", "path": "one"}, {"name": "b", "path": "two"}


@pytest.mark.parametrize(
    ("environ", "adapters"),
    [
        ({"SM_VLLM_LORA_MODULES": '["a=one"]'}, {"a": "one"}),
        ({"SM_VLLM_LORA_MODULES": '["a=one", "b=two"]'}, {"a": "one", "b": "two"}),
        ({"SM_VLLM_LORA_MODULES": "a=one b=two"}, {"a": "one", "b": "two"}),
        ({"SM_VLLM_LORA_MODULES": json.dumps(A)}, {"a": "one"}),
        (
            {"SM_VLLM_LORA_MODULES": f"{json.dumps(A)} {json.dumps(B | {'base_model_name': 'm'})}"},
            {"a": "one", "b": "two"},
        ),
        ({"SM_VLLM_LORA_MODULES": f"{json.dumps(A)} b=two"}, {"a": "one", "b": "two"}),
        ({"SM_VLLM_LORA_MODULES": json.dumps([A, B])}, {"a": "one", "b": "two"}),
        ({"SM_VLLM_LORA_MODULES": json.dumps([json.dumps(A), "b=two"])}, {"a": "one", "b": "two"}),
        ({"OPTION_LORA_MODULES": "a=one", "OPTION_ENABLE_LORA": "true"}, {"a": "one"}),
        ({"SM_VLLM_LORA_MODULES": "a=org/adapter"}, {"a": "hf://org/adapter"}),
        ({"SM_VLLM_LORA_MODULES": "a=s3://bucket/a"}, {"a": "s3://bucket/a"}),
        ({"LORA_ADAPTERS": "a=one,b=two"}, {"a": "one", "b": "two"}),
        ({"LORA_ADAPTERS": "one, b=two"}, {"one": "one", "b": "two"}),
        ({"LORA_ADAPTERS": "org/x,org/y@v2"}, {"org/x": "hf://org/x", "org/y": "hf://org/y@v2"}),
        ({"LORA_ADAPTERS": "y=org/y@v2"}, {"y": "hf://org/y@v2"}),
    ],
)
def test_adapters_of_other_containers_are_those_of_the_start(
    model_dir: Path, environ: dict[str, str], adapters: dict[str, str]
) -> None:
    for name in ("one", "two"):
        (model_dir / name).mkdir()
        (model_dir / name / "adapter_config.json").write_text("{}")
    settings = load_settings(model_dir, environ)
    here = {name: str(model_dir / place) if place in ("one", "two") else place for name, place in adapters.items()}
    assert settings.model.adapters == here
    assert settings.model.enable_lora
    assert settings.model.engine_arguments == {}
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"LORA_ADAPTERS": "a=/nowhere"}, r"environment: LORA_ADAPTERS\): there is no directory .*/nowhere"),
        ({"LORA_ADAPTERS": "a=b=c"}, "there is no directory"),
        ({"LORA_ADAPTERS": "a=/"}, r"is no adapter: its adapter_config\.json cannot be read"),
        ({"LORA_ADAPTERS": "alone"}, "there is no directory"),
        ({"SM_VLLM_LORA_MODULES": "alone"}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": '["a=s3://b/a", "a=s3://b/b"]'}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": '{"name": "a"}'}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": '{"name": "a", "path": "s3://b/a", "rank": 4}'}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": '{"name": "a", "name": "b", "path": "s3://b/a"}'}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": "[" * 100_000}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": '{"a":' * 100_000}, "allowed: name=path"),
        ({"SM_VLLM_LORA_MODULES": "[1]"}, "allowed: name=path"),
        ({"LORA_ADAPTERS": "a=org/a", "OPTION_ENABLE_LORA": "false"}, "LORA_ADAPTERS names adapters"),
    ],
)
def test_adapters_that_cannot_be_used_are_a_problem(model_dir: Path, environ: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load_settings(model_dir, environ)


@pytest.mark.parametrize(("name", "reason"), WITHOUT_EFFECT.items())
def test_an_argument_of_vllm_without_effect_is_a_warning(model_dir: Path, name: str, reason: str) -> None:
    variables = [f"OPTION_{name.upper()}", f"SM_VLLM_{name.upper()}"]
    for variable in variables[:1] if name in ("host", "port") else variables:  # SM_VLLM_HOST sets SERVING_HOST.
        settings = load_settings(model_dir, {variable: "/x"})
        assert warning(settings) == f"option.{name} (environment: {variable}) is ignored: {reason}"
        assert settings.model.engine_arguments == {}


def warning(settings: Settings) -> str:
    (only,) = settings.warnings
    return only


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TENSOR_PARALLEL_DEGREE": "2", "SM_NUM_GPUS": "4"}, "SM_NUM_GPUS (environment: SM_NUM_GPUS) is ignored"),
        ({"SM_NUM_GPUS": "2", "NUM_SHARD": "4"}, "it stands for TENSOR_PARALLEL_DEGREE, which SM_NUM_GPUS sets"),
        ({"OPTION_DTYPE": "fp16", "SM_VLLM_DTYPE": "fp32"}, "SM_VLLM_DTYPE"),
        ({"MAX_INPUT_TOKENS": "1", "MAX_INPUT_LENGTH": "2"}, "MAX_INPUT_LENGTH"),
        ({"OPTION_ENABLE_REASONING": "true"}, "`option.reasoning_parser` alone switches it on"),
        ({"SERVING_QUEUE": "9"}, "SERVING_QUEUE (environment: SERVING_QUEUE) is ignored"),
    ],
)
def test_what_does_nothing_is_warned_of(model_dir: Path, environ: dict[str, str], words: str) -> None:
    assert words in warning(load_settings(model_dir, environ))


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
    assert settings.server.api_keys == (None if keys is None else ApiKeys.of(keys))
    assert settings.warnings == ()
    assert environ.keys() <= KEY_VARIABLES
    assert "sk" not in repr(settings.server) + repr(settings.entries)


def test_the_report_says_where_keys_come_from_and_has_none(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-file\n")
    environ = {"VLLM_API_KEY": "sk-variable", "API_KEY": "sk-variable", "SERVING_API_KEYS_FILE": str(file)}
    settings = load_settings(model_dir, environ)
    assert settings.server.api_keys == ApiKeys.of(("sk-variable", "sk-file"))
    startup = Startup(settings.server, (StartupModel(settings, ""),))
    for text in (render_text(settings), startup_json(startup)):
        assert "environment: API_KEY" in text
        assert str(file) in text
        assert "sk-" not in text
    assert "alias: API_KEY (TGI) stands for SERVING_API_KEYS" in render_text(settings)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SERVING_API_KEYS": ""}, "SERVING_API_KEYS is empty; expected API keys"),
        ({"SERVING_API_KEYS_FILE": ""}, "SERVING_API_KEYS_FILE is empty; expected API keys"),
        ({"SM_VLLM_API_KEY": ""}, "SM_VLLM_API_KEY is empty; expected API keys"),
        (
            {"SERVING_API_KEYS": ","},
            'api_keys is "***" (environment: SERVING_API_KEYS); allowed: keys of visible ASCII',
        ),
        ({"API_KEY": "sk hidden"}, 'api_keys is "***" (environment: API_KEY); allowed: keys of visible ASCII'),
        (
            {"SERVING_API_KEYS_FILE": "/no/such"},
            "(environment: SERVING_API_KEYS_FILE): it cannot be read: No such file",
        ),
        ({"OPTION_API_KEY": "sk-hidden"}, "set SERVING_API_KEYS"),
    ],
)
def test_keys_that_cannot_be_asked_for_stop_the_start(model_dir: Path, environ: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(model_dir, environ)
    (problem,) = caught.value.problems
    assert words in problem
    assert "hidden" not in problem


def test_on_sagemaker_iam_decides_and_keys_are_not_asked_for(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SAGEMAKER_METADATA", model_dir)
    settings = load_settings(model_dir, {"API_KEY": "a key of the handler", "SERVING_API_KEYS_FILE": "/no/such"})
    assert settings.server.api_keys is None
    of_variable, of_file = settings.warnings
    assert of_variable == (
        "api_keys (environment: API_KEY) is ignored: SageMaker passes no key on to the container; "
        "IAM decides who may call the endpoint"
    )
    assert "api_keys_file (environment: SERVING_API_KEYS_FILE)" in of_file


@pytest.mark.parametrize("name", ["HOSTNAME", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "SM_NUM_CPUS", "SAGEMAKER_REGION"])
def test_variables_of_other_software_are_not_warned_of(model_dir: Path, name: str) -> None:
    assert load_settings(model_dir, {name: "x"}).warnings == ()


def test_offline_for_lmi_is_offline_for_the_hub(model_dir: Path) -> None:
    assert load_settings(model_dir, {"DJL_OFFLINE": "true"}).exports == {"HF_HUB_OFFLINE": "1"}


def test_no_variable_is_an_alias_twice() -> None:
    assert len({alias.variable for alias in ALIASES}) == len(ALIASES)


@pytest.mark.parametrize(
    ("variable", "text", "key", "expected"),
    [
        ("OPTION_DTYPE", "fp16", "option.dtype", "fp16"),
        ("OPTION_MAX_MODEL_LEN", "1", "option.max_model_len", "1"),
        ("OPTION_modelName", "m", "option.modelName", "m"),
        ("OPTION_ENTRYPOINT", "model.py", "option.entryPoint", "model.py"),
        ("OPTION_ENGINE", "Python", "engine", "Python"),
        ("ARGS_BATCH_SIZE", "2", "batch_size", "2"),
        ("ARGS_minWorkers", "2", "minWorkers", "2"),
        ("HF_MODEL_QUANTIZE", "awq", "option.quantize", "awq"),
        ("HF_MODEL_TRUST_REMOTE_CODE", "true", "option.trust_remote_code", "true"),
        ("MAX_BATCH_PREFILL_TOKENS", "4096", "option.max_rolling_batch_prefill_tokens", "4096"),
        ("MAX_BATCH_SIZE", "16", "option.max_rolling_batch_size", "16"),
        ("ENABLE_CUDA_GRAPHS", "true", "option.enforce_eager", "false"),
        ("ENABLE_CUDA_GRAPHS", "no", "option.enforce_eager", "true"),
        ("CUDA_MEMORY_FRACTION", "0.8", "option.gpu_memory_utilization", "0.8"),
    ],
)
def test_a_variable_sets_a_key_of_the_model(variable: str, text: str, key: str, expected: str) -> None:
    layer = option_layer(read_variables({variable: text}, []), [])
    assert layer == {key: Value(expected, f"environment: {variable}")}


def test_an_empty_variable_counts_as_unset() -> None:
    variables = read_variables({"OPTION_QUANTIZE": "", "HF_MODEL_QUANTIZE": "awq", "OPTION_DTYPE": ""}, [])
    assert texts(option_layer(variables, [])) == {"option.quantize": "awq"}


def test_a_translation_does_not_overwrite() -> None:
    variables = read_variables({"OPTION_QUANTIZE": "gptq", "HF_MODEL_QUANTIZE": "awq", "SM_NUM_GPUS": "2"}, [])
    assert texts(option_layer(variables, [])) == {"option.quantize": "gptq"}
    assert variables["TENSOR_PARALLEL_DEGREE"] == Value("2", "environment: SM_NUM_GPUS")


def test_server_keys_are_lower_cased() -> None:
    variables = read_variables({"SERVING_Job_Queue_SIZE": "5", "MAX_CONCURRENT_REQUESTS": "7", "SERVING_": "x"}, [])
    problems: list[str] = []
    layer = serving_layer(variables, problems)
    assert layer["job_queue_size"].text == "5"
    assert "job_queue_size is set twice" in problems[0]


def test_two_spellings_of_a_variable_must_agree() -> None:
    problems: list[str] = []
    option_layer(read_variables({"OPTION_DTYPE": "fp16", "OPTION_dtype": "fp16"}, []), problems)
    assert problems == []
    option_layer(read_variables({"OPTION_DTYPE": "fp16", "OPTION_dtype": "bf16"}, []), problems)
    assert "OPTION_DTYPE" in problems[0]
    assert "OPTION_dtype" in problems[0]


def test_a_variable_that_is_no_text_is_a_problem_only_if_it_matters() -> None:
    problems: list[str] = []
    assert read_variables({"OPTION_DTYPE": "\udcff", "OTHER": "\udcff"}, problems) == {}
    assert problems == ["environment: OPTION_DTYPE is not UTF-8 text"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}, {"max_request_size": str(6 * 1024 * 1024)}),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6", "SAGEMAKER_MAX_REQUEST_SIZE": "99"}, {"max_request_size": "99"}),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "0"}, {"max_request_size": str(2**63 - 1)}),
        ({"SAGEMAKER_BIND_TO_PORT": "9090"}, {"port": "9090"}),
    ],
)
def test_sagemaker_sets_keys_of_the_server(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert texts(sagemaker_server_layer(read_variables(environ, []), [])) == expected


@pytest.mark.parametrize("text", ["-1", "six", "1.5", "99999999999"])
def test_a_payload_that_is_no_number_of_mebibytes_is_a_problem(text: str) -> None:
    problems: list[str] = []
    sagemaker_server_layer(read_variables({"SAGEMAKER_MAX_PAYLOAD_IN_MB": text}, []), problems)
    assert "environment: SAGEMAKER_MAX_PAYLOAD_IN_MB" in problems[0]


def test_sagemaker_overwrites_keys_of_the_model() -> None:
    variables = read_variables(
        {
            "SAGEMAKER_STARTUP_TIMEOUT": "60",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "30",
            "SAGEMAKER_NUM_MODEL_WORKERS": "2",
        },
        [],
    )
    assert texts(sagemaker_model_layer(variables)) == {
        "option.model_loading_timeout": "60",
        "option.predict_timeout": "30",
        "minWorkers": "2",
        "maxWorkers": "2",
    }


@given(st.dictionaries(st.sampled_from(["OPTION_A", "OPTION_a", "SERVING_B", "ARGS_C", "OPTION_", "X"]), st.text()))
def test_any_environment_is_read(environ: dict[str, str]) -> None:
    problems: list[str] = []
    variables = read_variables(environ, problems)
    option_layer(variables, problems)
    serving_layer(variables, problems)
    sagemaker_server_layer(variables, problems)
