from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from container.settings import environment
from container.settings import server as server_module
from container.settings.server import ServerConfig
from container.settings.settings import Settings, SettingsError
from container.sources import location as model_location
from handlers.model_config import ModelConfig
from tests.settings import load_settings

SAME_DIRECTORY = hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NOT_SERVED = "not served by this version of Slipway"


def load(
    model_dir: Path | None,
    properties: str = "",
    environ: Mapping[str, str] | None = None,
    command_line: Mapping[str, str] | None = None,
) -> Settings:
    if model_dir is not None:
        (model_dir / "serving.properties").write_text(properties, encoding="ascii")
    return load_settings(model_dir, environ or {}, command_line)


def problems(*arguments: Any, **keywords: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(*arguments, **keywords)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def entry(settings: Settings, name: str) -> tuple[Any, str]:
    (found,) = [one for one in settings.entries if one.name == name]
    return found.value, found.source


def test_nothing_given_means_defaults(model_dir: Path) -> None:
    settings = load(model_dir)
    assert settings.server == ServerConfig()
    assert settings.model == ModelConfig(name="model", model_dir=model_dir, model_id=str(model_dir))
    assert settings.warnings == ()
    assert {one.source for one in settings.entries} == {"default", "command line: --model-dir"}


def test_a_setting_of_the_server_in_the_models_file_is_ignored_with_the_name_of_its_variable(model_dir: Path) -> None:
    settings = load(model_dir, "throttle_error_http_code=429\napi_keys=secret")
    assert settings.server == ServerConfig()
    assert settings.warnings == tuple(
        f"{key} (serving.properties: {key}) is ignored: it is a setting of the server; use SERVING_{key.upper()}"
        for key in ("throttle_error_http_code", "api_keys")
    )
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("properties", "field", "value"),
    [
        ("option.revision=main", "revision", "main"),
        ("option.trust_remote_code=True", "trust_remote_code", True),
        ("option.rolling_batch=auto", "rolling_batch", "auto"),
        ("option.rolling_batch=lmi-dist", "rolling_batch", "lmi-dist"),
        ("option.rolling_batch=scheduler", "rolling_batch", "scheduler"),
        ("option.rolling_batch=trtllm", "rolling_batch", "trtllm"),
        ("option.rolling_batch=disable", "rolling_batch", "disable"),
        ("option.rolling_batch=tnx", "rolling_batch", "vllm"),
        ("option.entryPoint=djl_python.tensorrt_llm", "rolling_batch", "trtllm"),
        ("option.entryPoint=djl_python.deepspeed", "rolling_batch", "auto"),
        ("batch_size=4", "batch_size", 4),
        ("batch_size=4", "rolling_batch", "disable"),
        ("max_dynamic_batch_size=4\noption.rolling_batch=vllm", "rolling_batch", "disable"),
        ("option.rolling_batch=disable\nmax_batch_delay=250", "max_batch_delay", 0.25),
        ("option.rolling_batch=disable\noption.enable_streaming=True", "enable_streaming", "true"),
        ('option.rolling_batch=disable\noption.stop_sequence=["a", "b"]', "lmi.stop_sequences", ("a", "b")),
        ("option.rolling_batch=disable\noption.stop_sequence=['</s>', 'x']", "lmi.stop_sequences", ("</s>", "x")),
        ("option.rolling_batch=disable\noption.device_map=auto", "engine_arguments", {"device_map": "auto"}),
        ("option.rolling_batch=trtllm\noption.max_num_tokens=9", "engine_arguments", {}),
        ("option.rolling_batch=scheduler\noption.model_impl=vllm", "engine_arguments", {"model_impl": "vllm"}),
        ("option.max_rolling_batch_size=16  ", "max_rolling_batch_size", 16),
        ("option.max_num_seqs=16", "max_rolling_batch_size", 16),
        ("option.output_formatter=jsonlines", "lmi.output_formatter", "jsonlines"),
        ("option.tgi_compat=on", "lmi.tgi_compat", True),
        ("option.do_sample_inferred=0", "do_sample_inferred", False),
        ("option.strict_parameters=yes", "strict_parameters", True),
        ("option.dtype=fp16", "dtype", "float16"),
        ("option.tensor_parallel_degree=2", "tensor_parallel_degree", 2),
        ("option.tensor_parallel_size=2", "tensor_parallel_degree", 2),
        ("option.tensor_parallel_degree=max", "tensor_parallel_degree", None),
        ("option.tensor_parallel_degree=max", "tensor_parallel_max", True),
        ("option.pipeline_parallel_degree=2", "pipeline_parallel_degree", 2),
        ("option.predict_timeout=1.5", "predict_timeout", 1.5),
        ("option.model_loading_timeout=60", "model_loading_timeout", 60.0),
        ("option.quantize=awq", "engine_arguments", {"quantization": "awq"}),
        ("option.quantization=bitsandbytes8", "engine_arguments", {"quantization": "bitsandbytes8"}),
        ("option.max_rolling_batch_prefill_tokens=64", "engine_arguments", {"max_num_batched_tokens": "64"}),
        ("option.cpu_offload_gb_per_gpu=2.5", "engine_arguments", {"cpu_offload_gb": "2.5"}),
        ("option.max_model_len=4096 ", "engine_arguments", {"max_model_len": "4096 "}),
    ],
)
def test_a_model_option_reaches_its_field(model_dir: Path, properties: str, field: str, value: object) -> None:
    assert attrgetter(field)(load(model_dir, properties).model) == value


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"TENSOR_PARALLEL_DEGREE": "2"}, "tensor_parallel_degree", 2),
        ({"SM_NUM_GPUS": "4"}, "tensor_parallel_degree", 4),
        ({"TENSOR_PARALLEL_DEGREE": "max"}, "tensor_parallel_max", True),
        ({"TENSOR_PARALLEL_DEGREE": "2", "OPTION_TENSOR_PARALLEL_SIZE": "4"}, "tensor_parallel_degree", 4),
        ({"PIPELINE_PARALLEL_DEGREE": "2"}, "pipeline_parallel_degree", 2),
        ({"PREDICT_TIMEOUT": "9"}, "predict_timeout", 9.0),
        ({"MODEL_LOADING_TIMEOUT": "9"}, "model_loading_timeout", 9.0),
        ({"OPTION_DTYPE": "bf16"}, "dtype", "bfloat16"),
        ({"HF_TASK": "text-generation"}, "dtype", "auto"),
        ({"SERVING_BATCH_SIZE": "2"}, "batch_size", 2),
    ],
)
def test_a_variable_reaches_its_field(model_dir: Path, environ: dict[str, str], field: str, value: object) -> None:
    assert attrgetter(field)(load(model_dir, environ=environ).model) == value


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"SERVING_PORT": "9000"}, "port", 9000),
        ({"SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:9001"}, "port", 9001),
        ({"SERVING_INFERENCE_ADDRESS": "http://[::1]:9001/"}, "host", "::1"),
        ({"SERVING_INFERENCE_ADDRESS": "http://localhost:9001", "SERVING_PORT": "9002"}, "port", 9002),
        ({"SERVING_INFERENCE_ADDRESS": "http://localhost:9001", "SAGEMAKER_BIND_TO_PORT": "9003"}, "port", 9003),
        ({"SERVING_JOB_QUEUE_SIZE": "5"}, "job_queue_size", 5),
        ({"MAX_CONCURRENT_REQUESTS": "6"}, "job_queue_size", 6),
        ({"ARGS_JOB_QUEUE_SIZE": "7", "SERVING_JOB_QUEUE_SIZE": "5"}, "job_queue_size", 7),
        ({"SERVING_MAX_REQUEST_SIZE": "10"}, "max_request_size", 10),
        ({"SERVING_MAX_REQUEST_SIZE": "10", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}, "max_request_size", 1048576),
        ({"SERVING_DRAIN_TIMEOUT": "3"}, "drain_timeout", 3.0),
        ({"SERVING_FAIL_FAST": "true"}, "fail_fast", True),
        ({"SERVING_ENGINE_RESTART": "2"}, "engine_restart", 2),
        ({"SERVING_CONTINUE": "0"}, "continue_calls", 0),
        ({"SERVING_ENGINE_RESTART_WHEN_STALLED": "true"}, "engine_restart_when_stalled", True),
        ({"SERVING_HEALTH_CHECK_OVERRIDE": "true"}, "health_check_override", True),
        ({"SAGEMAKER_HEALTH_CHECK_OVERRIDE": "true"}, "workers_health_check", True),
        ({"SERVING_LOG_FORMAT": "JSON"}, "log_format", "json"),
        ({"SERVING_LOG_LEVEL": "WARN"}, "log_level", "warning"),
        ({"SERVING_LOG_PROMPTS": "1"}, "log_prompts", True),
        ({"SERVING_REQUEST_ID_HEADER_KEY": "X-Id"}, "request_id_header", "X-Id"),
        ({"SERVING_ALLOW_MULTI_STATUS": "true"}, "allow_multi_status", True),
        ({"SERVING_CORS_ALLOWED_ORIGIN": "*"}, "cors_allowed_origin", "*"),
        ({"SERVING_CORS_ALLOWED_METHODS": "GET, POST"}, "cors_allowed_methods", "GET, POST"),
        ({"SERVING_CORS_ALLOWED_HEADERS": "X-A"}, "cors_allowed_headers", "X-A"),
        ({"SERVING_THROTTLE_ERROR_HTTP_CODE": "429"}, "throttle_error_http_code", 429),
        ({"SERVING_WLM_ERROR_HTTP_CODE": "502"}, "wlm_error_http_code", 502),
        ({"SERVING_SERVER_ERROR_HTTP_CODE": "520"}, "server_error_http_code", 520),
    ],
)
def test_a_server_variable_reaches_its_field(
    model_dir: Path, environ: dict[str, str], field: str, value: object
) -> None:
    assert attrgetter(field)(load(model_dir, environ=environ).server) == value


def test_the_queue_of_the_model_goes_before_that_of_the_server(model_dir: Path) -> None:
    settings = load(model_dir, "job_queue_size=3", {"SERVING_JOB_QUEUE_SIZE": "5", "ARGS_JOB_QUEUE_SIZE": "7"})
    assert entry(settings, "job_queue_size") == (3, "serving.properties: job_queue_size")


def test_on_sagemaker_the_request_id_comes_in_its_header(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SAGEMAKER_METADATA", model_dir / "config.json")
    assert load(model_dir).server.request_id_header == "X-Amzn-SageMaker-Inference-Id"
    given_header = load(model_dir, environ={"SERVING_REQUEST_ID_HEADER_KEY": "x-id"}).server.request_id_header
    assert given_header == "x-id"


MODEL_LAYERS = [
    ("environment: SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", 1.0),
    ("serving.properties: option.predict_timeout", 2.0),
    ("environment: OPTION_PREDICT_TIMEOUT", 3.0),
    ("environment: PREDICT_TIMEOUT", 4.0),
]


@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=4)))
def test_precedence_of_model_settings_holds_for_any_layers(model_dir: Path, chosen: tuple[bool, ...]) -> None:
    layers = [layer for layer, wanted in zip(MODEL_LAYERS, chosen, strict=True) if wanted]
    variables = {source.removeprefix("environment: "): str(value) for source, value in layers}
    text = variables.pop("serving.properties: option.predict_timeout", None)
    settings = load(model_dir, f"option.predict_timeout={text}" if text else "", variables)
    source, value = layers[0] if layers else ("default", 240.0)
    assert settings.model.predict_timeout == value
    assert entry(settings, "option.predict_timeout") == (value, source)


SERVER_LAYERS = [
    ("environment: SAGEMAKER_BIND_TO_PORT", 9001),
    ("environment: SERVING_PORT", 9002),
    ("command line: --port", 9003),
]


@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=3)))
def test_precedence_of_server_settings_holds_for_any_layers(model_dir: Path, chosen: tuple[bool, ...]) -> None:
    layers = [layer for layer, wanted in zip(SERVER_LAYERS, chosen, strict=True) if wanted]
    variables = {source.removeprefix("environment: "): str(value) for source, value in layers}
    port = variables.pop("command line: --port", None)
    settings = load(model_dir, environ=variables, command_line={"port": port} if port else {})
    source, value = layers[0] if layers else ("default", 8080)
    assert entry(settings, "port") == (value, source)


@pytest.mark.parametrize(
    "properties",
    [
        "option.bedrock_compat=true",
        "option.entryPoint=djl_python.sklearn_handler",
        "option.output_formatter=json_chat",
        "option.output_formatter=3p",
        "option.task=question-answering",
        "engine=TensorFlow",
        "option.lmcache_auto_config=true",
        "option.lmcache_config_file=lmcache.yaml",
        "option.s3url=s3://bucket/llama/",
        "option.model_id=djl://x",
    ],
)
def test_a_feature_that_is_missing_stops_the_start(model_dir: Path, properties: str) -> None:
    (problem,) = problems(model_dir, properties)
    key, _, text = properties.partition("=")
    assert NOT_SERVED in problem
    assert problem.startswith(f'{key} is "{text}" (serving.properties, line 1)')


@pytest.mark.parametrize(
    ("properties", "advice"),
    [
        ("option.task=fill-mask", "A model.py that says `from djl_python.huggingface import handle` serves"),
        ("option.lmcache_auto_config=true", "`option.kv_offloading_size=<GiB of a copy's GPUs>`"),
    ],
)
def test_a_feature_that_is_missing_has_advice(model_dir: Path, properties: str, advice: str) -> None:
    (problem,) = problems(model_dir, properties)
    assert advice in problem


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("text-embedding", "embed"),
        ("feature-extraction", "embed"),
        ("text-classification", "classify"),
        ("text-generation", "generate"),
        ("auto", "auto"),
    ],
)
def test_the_task_of_a_model_has_the_names_of_lmi_and_transformers(model_dir: Path, task: str, expected: str) -> None:
    assert load(model_dir, f"option.task={task}").model.task == expected
    assert load(model_dir, environ={"HF_TASK": task}).model.task == expected


@pytest.mark.parametrize("engine", ["Rust", "OnnxRuntime", "PyTorch"])
def test_the_engines_of_djl_are_vllm_with_the_answers_of_djl(model_dir: Path, engine: str) -> None:
    properties = f"engine={engine}\noption.pooling=cls\noption.normalize=false\nbatch_size=32"
    model = load(model_dir, properties).model
    assert (model.lmi.vector_format, model.lmi.scores_in_order) == ("djl", True)
    assert (model.pooling, model.lmi.normalize, model.rolling_batch, model.batch_size) == ("CLS", False, "auto", 1)


def test_lmis_vllm_handler_has_vectors_of_another_form(model_dir: Path) -> None:
    properties = """
        engine=Python
        option.async_mode=true
        option.rolling_batch=disable
        option.entryPoint=djl_python.lmi_vllm.vllm_async_service
        option.task=text-embedding
    """
    model = load(model_dir, "\n".join(line.strip() for line in properties.splitlines())).model
    assert (model.lmi.vector_format, model.task, model.rolling_batch) == ("vllm", "embed", "auto")


def test_teis_variables_are_read(model_dir: Path) -> None:
    environ = {"AUTO_TRUNCATE": "false", "MAX_CLIENT_BATCH_SIZE": "64", "POOLING": "last-token"}
    model = load(model_dir, environ=environ).model
    assert (model.tei.auto_truncate, model.tei.max_client_batch_size, model.pooling) == (False, 64, "LAST")


def test_teis_default_prompt_keeps_its_blank(model_dir: Path) -> None:
    model = load(model_dir, environ={"DEFAULT_PROMPT": "query: ", "DEFAULT_PROMPT_NAME": "passage"}).model
    assert (model.default_prompt, model.default_prompt_name) == ("query: ", "passage")


def test_reranking_loads_the_model_for_scores(model_dir: Path) -> None:
    model = load(model_dir, "option.reranking=true").model
    assert (model.task, model.lmi.scores_in_order) == ("classify", True)


def test_option_model_is_option_model_id(model_dir: Path) -> None:
    settings = load(model_dir, "option.model=org/name", {"HF_MODEL_ID": "org/other"})
    assert (settings.model.model_id, settings.model.name) == ("org/name", model_dir.name)
    assert load(model_dir, environ={"OPTION_MODEL": "org/name"}).model.model_id == "org/name"
    assert load(model_dir, "option.model=org/name\noption.model_id=org/name").model.model_id == "org/name"
    (problem,) = problems(model_dir, "option.model=org/name\noption.model_id=org/other")
    assert 'option.model_id is "org/other" (serving.properties, line 2)' in problem
    assert 'option.model is "org/name" (serving.properties, line 1)' in problem


def test_option_model_names_the_model_of_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert load(tmp_path / "empty", environ={"OPTION_MODEL": "org/name"}).model.model_id == "org/name"


@pytest.mark.parametrize("name", ["SERVING_INFERENCE_ADDRESS", "SERVING_MANAGEMENT_ADDRESS"])
def test_an_address_has_no_tls(model_dir: Path, name: str) -> None:
    (problem,) = problems(model_dir, environ={name: "https://0.0.0.0:8443"})
    assert problem.endswith(f"(environment: {name}); allowed: http://host:port, without TLS")


@pytest.mark.parametrize(
    "environ",
    [
        {"SERVING_CERTIFICATE_FILE": "/x"},
        {"HF_TASK": "question-answering"},
    ],
)
def test_a_variable_for_a_feature_that_is_missing_stops_the_start(model_dir: Path, environ: dict[str, str]) -> None:
    (problem,) = problems(model_dir, environ=environ)
    assert NOT_SERVED in problem
    assert f"(environment: {next(iter(environ))})" in problem


@pytest.mark.parametrize(
    "properties",
    [
        "engine=Python",
        "engine=MPI",
        "batch_size=1",
        "option.entryPoint=djl_python.huggingface",
        "option.async_mode=false",
        "option.enable_lora=False",
        "option.task=text-generation",
        "option.task=Image-Text-To-Text",
        "engine=python",
        "option.enable_streaming=false",
        "minWorkers=1\nmaxWorkers=1",
        "option.rolling_batch=vllm",
    ],
)
def test_what_asks_for_nothing_missing_is_accepted_in_silence(model_dir: Path, properties: str) -> None:
    assert load(model_dir, properties).warnings == ()


@pytest.mark.parametrize(
    ("properties", "environ"),
    [
        ("option.mpi_mode=true", {}),
        ("option.enable_streaming=true", {}),
        ('option.stop_sequence=["a"]', {}),
        ("max_batch_delay=5", {}),
        ("option.pythonExecutable=python3", {}),
        ("retry_threshold=3", {}),
        ("option.device_map=auto", {}),
        ("option.max_num_tokens=64", {}),
        ("option.draft_model_tp_size=1", {}),
        ("option.speculative_length=4", {}),
        ("option.speculative_draft_model=x\noption.rolling_batch=disable", {}),
        ("option.max_output_len=512", {}),
        ("minWorkers=2\noption.rolling_batch=disable", {}),
        ("nonsense=1", {}),
        ("", {"SERVING_USE_NATIVE_IO": "true"}),
        ("", {"SERVING_NONSENSE": "true"}),
        ("", {"SERVING_MAX_IDLE_TIME": "5"}),
        ("", {"HF_REVISION": "main"}),
    ],
)
def test_what_has_no_effect_is_warned_of(model_dir: Path, properties: str, environ: dict[str, str]) -> None:
    settings = load(model_dir, properties, environ)
    (warning,) = settings.warnings
    source = f"environment: {next(iter(environ))}" if environ else f"serving.properties: {properties.split('=')[0]}"
    assert f"({source})" in warning
    assert settings.model.engine_arguments == {}


@pytest.mark.parametrize(
    ("properties", "tokens"),
    [
        ("option.speculative_draft_model=a/draft", 5),
        ("option.speculative_draft_model= a/draft \noption.speculative_length=3", 3),
        ("option.speculative_model=a/draft\noption.num_speculative_tokens=2", 2),
        ("option.rolling_batch=lmi-dist\noption.speculative_draft_model=a/draft", 5),
    ],
)
def test_lmis_options_of_a_draft_model_are_vllms(model_dir: Path, properties: str, tokens: int) -> None:
    settings = load(model_dir, properties)
    assert list(settings.model.engine_arguments) == ["speculative_config"]
    written = json.loads(settings.model.engine_arguments["speculative_config"])
    assert written == {"model": "a/draft", "num_speculative_tokens": tokens}
    assert settings.warnings == ()
    assert "speculative_" in settings.model.engine_argument_sources["speculative_config"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_draft_model_is_looked_for_in_the_model_directory(model_dir: Path, absolute: bool) -> None:
    (model_dir / "draft").mkdir()
    (model_dir / "draft" / "config.json").write_text("{}")
    name = str(model_dir / "draft") if absolute else "draft"
    for properties in (
        f"option.speculative_draft_model={name}",
        f'option.speculative_config={{"model": "{name}", "num_speculative_tokens": 2}}',
    ):
        arguments = load(model_dir, properties).model.engine_arguments
        assert json.loads(arguments["speculative_config"])["model"] == str(model_dir / "draft")


@pytest.mark.parametrize("value", ["0", "many", "1.5"])
def test_a_wrong_length_of_drafts_is_refused(model_dir: Path, value: str) -> None:
    with pytest.raises(SettingsError, match=rf'option.speculative_length is "{value}" .*; allowed: '):
        load(model_dir, f"option.speculative_draft_model=x\noption.speculative_length={value}")


def test_two_draft_models_are_refused(model_dir: Path) -> None:
    both = 'option.speculative_draft_model=x\noption.speculative_config={"method": "ngram"}'
    with pytest.raises(SettingsError, match=r"option.speculative_draft_model .*option.speculative_config"):
        load(model_dir, both)


def test_an_option_without_its_prefix_is_pointed_out(model_dir: Path) -> None:
    (warning,) = load(model_dir, "dtype=fp16").warnings
    assert "did you mean option.dtype?" in warning


def test_two_names_of_an_option_must_agree(model_dir: Path) -> None:
    assert load(model_dir, "option.max_rolling_batch_size=4\noption.max_num_seqs= 4").model.max_rolling_batch_size == 4
    (problem,) = problems(model_dir, "option.tensor_parallel_degree=4", {"OPTION_TENSOR_PARALLEL_SIZE": "2"})
    assert problem == (
        'option.tensor_parallel_degree is "4" (serving.properties, line 1), but '
        'option.tensor_parallel_size is "2" (environment: OPTION_TENSOR_PARALLEL_SIZE); '
        "both are the same option: give one of them"
    )


@pytest.mark.parametrize(
    ("properties", "environ", "size"),
    [
        ("batch_size=2\nmax_dynamic_batch_size=4", {}, 2),
        ("max_dynamic_batch_size=4", {"ARGS_BATCH_SIZE": "2"}, 2),
        ("max_dynamic_batch_size=4", {"SERVING_BATCH_SIZE": "2"}, 4),
        ("max_dynamic_batch_size=4\noption.batch_size=2", {}, 4),
    ],
)
def test_a_batch_size_goes_before_its_other_names(
    model_dir: Path, properties: str, environ: dict[str, str], size: int
) -> None:
    assert load(model_dir, properties, environ).model.batch_size == size


def test_a_batch_size_that_does_not_count_is_warned_of(model_dir: Path) -> None:
    (warning,) = load(model_dir, "batch_size=2\nmax_dynamic_batch_size=4").warnings
    assert warning == (
        "max_dynamic_batch_size (serving.properties: max_dynamic_batch_size) is ignored: "
        'batch_size is "2" (serving.properties, line 1)'
    )


def test_an_empty_value_in_the_file_counts_as_unset(model_dir: Path) -> None:
    settings = load(
        model_dir,
        "option.quantize=\noption.revision=\noption.dtype= \nbatch_size=\noption.max_num_seqs=",
        {"OPTION_DTYPE": "fp16"},
    )
    model = settings.model
    assert (model.revision, model.dtype, model.batch_size, model.max_rolling_batch_size) == (None, "float16", 1, None)
    assert model.engine_arguments == {}
    assert settings.warnings == tuple(
        f"{key} (serving.properties: {key}) is ignored: it is empty"
        for key in ("option.quantize", "option.revision", "option.dtype", "batch_size", "option.max_num_seqs")
    )


@pytest.mark.parametrize(
    "key", ["option.default_prompt", "option.max_model_len", "option.unknown", "job_queue_size", "cpu.minWorkers"]
)
def test_empty_values_of_all_kinds_of_keys_count_as_unset(model_dir: Path, key: str) -> None:
    settings = load(model_dir, f"{key}=")
    assert (settings.model.default_prompt, settings.model.engine_arguments) == (None, {})
    assert settings.warnings == (f"{key} (serving.properties: {key}) is ignored: it is empty",)


def test_a_word_that_begins_one_allowed_value_means_this_value(model_dir: Path) -> None:
    (problem,) = problems(model_dir, "option.dtype=bfloat")
    assert problem.endswith("did you mean bfloat16?")


def test_all_problems_are_listed_at_once(model_dir: Path) -> None:
    found = problems(
        model_dir,
        "option.dtype=fp17\noption.predict_timeout=soon\noption.trust_remote_code=maybe",
        {"SERVING_PORT": "tcp://10.0.0.1:8080", "OPTION_BEDROCK_COMPAT": "true"},
        {"nonsense": "1"},
    )
    expected = [
        'port is "tcp://10.0.0.1:8080" (environment: SERVING_PORT); allowed: an integer from 1 to 65535',
        "command line: --nonsense: there is no such option",
        'option.trust_remote_code is "maybe" (serving.properties, line 3); allowed: true or false',
        'option.dtype is "fp17" (serving.properties, line 1); allowed: auto, fp32, fp16, bf16, ',
        'option.predict_timeout is "soon" (serving.properties, line 2); allowed: seconds',
        f'option.bedrock_compat is "true" (environment: OPTION_BEDROCK_COMPAT): {NOT_SERVED}; ',
    ]
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("name", ["MODEL_ALIASES", "ALLOWED_HOSTS"])
@pytest.mark.parametrize("text", ['["a"', "[a.b", "[1]"])
def test_a_list_of_names_that_is_no_json_is_a_problem(model_dir: Path, name: str, text: str) -> None:
    (found,) = problems(model_dir, "", {f"SERVING_{name}": text})
    assert found.endswith(f"(environment: SERVING_{name}); allowed: names with commas between, or a JSON array")


@pytest.mark.parametrize(
    ("properties", "rolling_batch"),
    [
        ("option.async_mode=true", "auto"),
        ("option.async_mode=true\noption.rolling_batch=disable", "auto"),
        ("option.async_mode=true\noption.rolling_batch=scheduler", "scheduler"),
        ("option.entryPoint=djl_python.lmi_vllm.vllm_async_service\noption.rolling_batch=disable", "auto"),
        ("option.entryPoint=djl_python.lmi_trtllm.trtllm_async_service", "trtllm"),
    ],
)
def test_the_asynchronous_mode_selects_a_schema_and_leaves_the_engine(
    model_dir: Path, properties: str, rolling_batch: str
) -> None:
    model = load(model_dir, properties).model
    assert (model.lmi.async_mode, model.rolling_batch) == (True, rolling_batch)


HANDLE = "async def handle(inputs):\n    return None\n"


def test_a_handle_beside_lmis_service_for_vllm_comes_before_the_engine(model_dir: Path) -> None:
    (model_dir / "model.py").write_text(HANDLE)
    model = load(
        model_dir,
        "option.entryPoint=djl_python.lmi_vllm.vllm_async_service\noption.tensor_parallel_degree=1\noption.env=A=b",
    ).model
    assert (model.handler, model.lmi.async_mode, model.formatters) == (None, True, model_dir / "model.py")
    handler = model.handler_before_engine
    assert handler is not None
    assert (handler.entry_point, handler.function) == ("djl_python.lmi_vllm.vllm_async_service", "handle")
    assert (handler.async_mode, handler.min_workers, handler.max_workers) == (True, 1, 1)
    assert handler.properties["tensor_parallel_degree"] == "1"
    assert handler.environment == model.environment == {"A": "b"}


def test_variables_beside_an_engine_are_its_own(model_dir: Path) -> None:
    settings = load(model_dir, "option.env=VLLM_LOGGING_LEVEL=DEBUG,B=x,y")
    assert settings.warnings == ()
    assert settings.model.environment == {"VLLM_LOGGING_LEVEL": "DEBUG", "B": "x,y"}


@pytest.mark.parametrize(
    ("entry_point", "code"),
    [
        ("djl_python.lmi_vllm.vllm_async_service", "def some_other_function():\n    pass\n"),
        ("djl_python.lmi_trtllm.trtllm_async_service", HANDLE),
        ("djl_python.huggingface", HANDLE),
    ],
)
def test_lmis_other_services_and_files_without_handle_have_an_engine_alone(
    model_dir: Path, entry_point: str, code: str
) -> None:
    (model_dir / "model.py").write_text(code)
    model = load(model_dir, f"option.entryPoint={entry_point}").model
    assert (model.handler, model.handler_before_engine) == (None, None)


def test_the_asynchronous_mode_has_no_dynamic_batch(model_dir: Path) -> None:
    assert problems(model_dir, "option.async_mode=true\nbatch_size=4") == (
        "option.async_mode is on, but batch_size is above 1: give one of them",
    )


@pytest.mark.parametrize("text", ["a,b", '["a", "b"]', "a b", "'a', \"b\""])
def test_a_model_may_be_served_under_several_names(model_dir: Path, text: str) -> None:
    model = load(model_dir, f"option.served_model_name={text}").model
    assert model.served_model_names == model.public_names == ("a", "b")


def test_networks_of_media_are_a_list(model_dir: Path) -> None:
    model = load(model_dir, "option.allowed_media_networks=10.0.0.0/8, fd00::/8").model
    assert model.media.allowed_media_networks == ("10.0.0.0/8", "fd00::/8")


def test_without_served_names_a_model_has_its_own(model_dir: Path) -> None:
    model = load(model_dir, "").model
    assert model.public_names == (model.name,)


def test_aliases_of_the_model_are_a_list(model_dir: Path) -> None:
    assert load(model_dir, "").server.model_aliases == ("dummy", "tgi", "tei", "text-embeddings-inference")
    assert load(model_dir, environ={"SERVING_MODEL_ALIASES": "gpt-4, x"}).server.model_aliases == ("gpt-4", "x")
    assert load(model_dir, environ={"SERVING_MODEL_ALIASES": '""'}).server.model_aliases == ()


def test_an_engine_argument_keeps_its_source(model_dir: Path) -> None:
    model = load(model_dir, "option.quantize=awq", {"OPTION_MAX_MODEL_LEN": "128"}).model
    assert model.engine_argument_sources == {
        "quantization": "serving.properties: option.quantize",
        "max_model_len": "environment: OPTION_MAX_MODEL_LEN",
    }


def test_the_model_is_option_model_id_before_hf_model_id(model_dir: Path) -> None:
    settings = load(model_dir, "option.model_id=org/first", {"HF_MODEL_ID": "org/second"})
    assert settings.model.model_id == "org/first"
    assert settings.model.name == "model"
    assert "HF_MODEL_ID" in settings.warnings[0]


def test_hf_model_id_is_a_model_of_its_own(model_dir: Path) -> None:
    model = load(model_dir, "option.dtype=fp16", {"HF_MODEL_ID": "org/My-Model", "HF_REVISION": "v1"}).model
    assert (model.model_id, model.name, model.revision) == ("org/My-Model", "org_My_Model", "v1")
    assert model.dtype == "float16"


def test_option_revision_goes_before_hf_revision(model_dir: Path) -> None:
    environ = {"HF_MODEL_ID": "org/m", "HF_REVISION": "v1"}
    assert load(model_dir, "option.revision=v2", environ).model.revision == "v2"


def test_a_relative_model_id_is_looked_for_below_the_model_directory(model_dir: Path) -> None:
    (model_dir / "weights").mkdir()
    (model_dir / "weights" / "config.json").write_text("{}")
    assert load(model_dir, "option.model_id=weights").model.model_id == str(model_dir / "weights")
    assert load(model_dir, "option.model_id=others").model.model_id == "others"


@pytest.mark.parametrize("text", ["/no/such/directory", "./weights", "a/b/c", "two words", "../x"])
def test_a_model_id_must_be_a_hub_id_or_be_there(model_dir: Path, text: str) -> None:
    (problem,) = problems(model_dir, f"option.model_id={text}")
    assert problem.startswith(f'option.model_id is "{text}" (serving.properties, line 1): ')


def test_without_a_model_it_is_said_how_to_give_one(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path)
    assert "option.model_id" in problem
    assert "HF_MODEL_ID" in problem


@pytest.mark.parametrize(
    ("directory", "name"), [("model", "model"), ("My-Model v1.0", "My_Model_v1_0"), ("modèle", "mod_le")]
)
def test_the_name_is_that_of_the_directory(tmp_path: Path, directory: str, name: str) -> None:
    path = tmp_path / directory
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert load(path).model.name == name


def test_the_name_of_a_local_hf_model_id_is_that_of_its_directory(tmp_path: Path, model_dir: Path) -> None:
    other = tmp_path / "Other-One"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert load(model_dir, environ={"HF_MODEL_ID": str(other)}).model.name == "Other_One"


def test_the_name_can_be_given(model_dir: Path) -> None:
    assert load(model_dir, command_line={"model_name": "mine"}).model.name == "mine"
    assert load(model_dir, environ={"SERVING_MODEL_NAME": "ours"}, command_line={"model_name": "mine"}).model.name == (
        "ours"
    )
    assert "allowed" in problems(model_dir, environ={"SERVING_MODEL_NAME": "a/b"})[0]


def test_the_model_store_is_the_model_directory_unless_one_is_given(tmp_path: Path, model_dir: Path) -> None:
    settings = load(None, environ={"SERVING_MODEL_STORE": str(model_dir)})
    assert settings.model.model_dir == model_dir
    assert load(model_dir, environ={"SERVING_MODEL_STORE": "/no/such/directory"}).model.model_dir == model_dir
    assert "SERVING_MODEL_STORE" in problems(None, environ={"SERVING_MODEL_STORE": "/no/such/directory"})[0]


def test_the_default_model_directory_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location, "DEFAULT_MODEL_DIR", tmp_path / "nothing")
    model = load_settings(None, {"OPTION_MODEL_ID": "org/My-Model"}, {}).model
    assert (model.model_id, model.name) == ("org/My-Model", "org_My_Model")


def test_a_directory_given_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--model-dir"):
        load_settings(tmp_path / "nothing", {"HF_MODEL_ID": "org/m"})


@pytest.mark.parametrize("url", ["https://example.com/model.tar.gz", "djl://x/y"])
def test_a_directory_elsewhere_is_no_directory(url: str) -> None:
    with pytest.raises(SettingsError, match=f"{url.partition(':')[0]}:// {NOT_SERVED.replace('not', 'is not', 1)}"):
        load_settings(url, {})


def test_an_archive_made_of_a_directory_is_entered(tmp_path: Path) -> None:
    inner = tmp_path / "llama-2"
    inner.mkdir()
    (inner / "config.json").write_text("{}")
    model = load_settings(tmp_path, {}).model
    assert (model.model_dir, model.name) == (inner, "llama_2")


def test_several_models_stop_the_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    with pytest.raises(SettingsError, match=r"a, b"):
        load_settings(tmp_path, {"HF_MODEL_ID": "org/m"})


@pytest.mark.parametrize(
    "environ",
    [
        {"SERVING_MANAGEMENT_ADDRESS": "http://0.0.0.0:8080"},
        {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:1", "SERVING_INFERENCE_ADDRESS": "http://127.0.0.1:1"},
    ],
)
def test_a_management_address_that_is_the_servers_own_is_accepted(model_dir: Path, environ: dict[str, str]) -> None:
    assert load(model_dir, environ=environ).warnings == ()


@pytest.mark.parametrize("text", ["0.0.0.0:8080", "unix:/tmp/x", "http://:80", "http://h:port", "http://h:99999"])
@pytest.mark.parametrize("name", ["SERVING_INFERENCE_ADDRESS", "SERVING_MANAGEMENT_ADDRESS"])
def test_a_wrong_address_is_a_problem(model_dir: Path, name: str, text: str) -> None:
    (problem,) = problems(model_dir, environ={name: text})
    assert f"environment: {name}" in problem


def test_a_token_is_neither_in_entries_nor_in_problems(model_dir: Path) -> None:
    settings = load(model_dir, environ={"HF_TOKEN": "hf_0123456789abcdef"})
    assert entry(settings, "HF_TOKEN") == ("***", "environment: HF_TOKEN")
    assert "0123456789abcdef" not in "".join(problems(model_dir, "option.dtype=hf_0123456789abcdef"))


def outcome(model_dir: Path, environ: Mapping[str, str]) -> Settings | tuple[str, ...]:
    try:
        return load_settings(model_dir, environ, {})
    except SettingsError as error:
        return error.problems


@SAME_DIRECTORY
@given(data=st.binary() | st.text("option.modelidtypengine=:/\\u0 \n").map(str.encode))
def test_any_file_gives_settings_or_a_settings_error(model_dir: Path, data: bytes) -> None:
    (model_dir / "serving.properties").write_bytes(data)
    found = outcome(model_dir, {})
    assert isinstance(found, Settings) or found


NAMES = st.sampled_from(
    [
        *("HF_MODEL_ID", "HF_REVISION", "OPTION_MODEL_ID", "OPTION_DTYPE", "OPTION_X", "ARGS_X", "SERVING_PORT"),
        *("SERVING_MODEL_STORE", "SERVING_INFERENCE_ADDRESS", "SERVING_MANAGEMENT_ADDRESS", "SERVING_MODEL_NAME"),
        *("SAGEMAKER_MAX_PAYLOAD_IN_MB", "SAGEMAKER_NUM_MODEL_WORKERS", "TENSOR_PARALLEL_DEGREE", "OPTION_"),
    ]
)


@SAME_DIRECTORY
@given(environ=st.dictionaries(NAMES, st.text() | st.from_regex(r"http://[a-z]*:[0-9]*", fullmatch=True)))
def test_any_environment_gives_settings_or_a_settings_error(model_dir: Path, environ: dict[str, str]) -> None:
    found = outcome(model_dir, environ)
    assert isinstance(found, Settings) or (found and all(problem.isprintable() for problem in found))


SECONDS_SETTINGS = (
    *("OPTION_PREDICT_TIMEOUT", "OPTION_MODEL_LOADING_TIMEOUT", "SAGEMAKER_STARTUP_TIMEOUT", "PREDICT_TIMEOUT"),
    *("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "SAGEMAKER_MODEL_SERVER_TIMEOUT", "SERVING_DRAIN_TIMEOUT"),
    *("SERVING_REQUEST_READ_TIMEOUT", "SERVING_STALL_TIMEOUT", "GRACEFUL_TERMINATION_TIMEOUT"),
    *("SERVING_MAX_BATCH_DELAY", "OPTION_SESSIONS_EXPIRATION"),
)


@pytest.mark.parametrize("name", SECONDS_SETTINGS)
@pytest.mark.parametrize("text", ["1e308", "1e999", "inf", "nan", "-1", "1000000001000", "9" * 5000])
def test_a_time_that_no_clock_can_count_is_refused(model_dir: Path, name: str, text: str) -> None:
    with pytest.raises(SettingsError, match="; allowed: "):
        load_settings(model_dir, {name: text})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '["a",' + "9" * 5000 + "]", '{"a": 1, "a": 2}', '["a", NaN]', '["a"']
)
@pytest.mark.parametrize(
    "name",
    [
        *("SERVING_API_KEYS", "SERVING_MODEL_ALIASES", "SERVING_ALLOWED_HOSTS", "OPTION_SERVED_MODEL_NAME"),
        *("OPTION_ALLOWED_MEDIA_NETWORKS", "OPTION_STOP_SEQUENCE", "OPTION_LORA_MODULES", "OPTION_SPECULATIVE_CONFIG"),
        "OPTION_HF_OVERRIDES",
    ],
)
def test_json_that_is_not_json_is_refused_without_a_traceback(model_dir: Path, name: str, text: str) -> None:
    takes_objects = name in ("OPTION_SPECULATIVE_CONFIG", "OPTION_HF_OVERRIDES")
    takes_names = not takes_objects and name not in ("OPTION_STOP_SEQUENCE", "OPTION_LORA_MODULES")
    if text.startswith("[" if takes_objects else "{") and (takes_objects or takes_names):
        return  # It is text of another kind: the engine refuses it, or it is a name.
    with pytest.raises(SettingsError) as refused:
        load_settings(model_dir, {name: text})
    (problem,) = refused.value.problems
    assert "; allowed: " in problem
    assert len(problem) < 1000


def test_degrees_of_any_length_do_not_fail_a_handler(model_dir: Path) -> None:
    (model_dir / "model.py").write_text("def handle(inputs): ...\n")
    settings = load_settings(model_dir, {"OPTION_TENSOR_PARALLEL_DEGREE": "9" * 5000, "OPTION_DEVICE_MAP": "²"})
    assert settings.model.handler is not None


def test_devices_have_a_warning_without_gpus(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    (warning,) = load(model_dir, environ={"SERVING_LOAD_ON_DEVICES": "0;1"}).warnings
    assert "SERVING_LOAD_ON_DEVICES" in warning


@pytest.mark.parametrize(
    ("properties", "environ", "said"),
    [
        ("\n# mine\noption.quantise=awq", {}, "option.quantise (serving.properties, line 3)|option.quantize?"),
        ("option.max_modellen=3", {}, "option.max_modellen (serving.properties, line 1)|option.max_model_len?"),
        (
            "",
            {"OPTION_MAX_MODELLEN": "3"},
            "option.max_modellen (environment: OPTION_MAX_MODELLEN)|OPTION_MAX_MODEL_LEN?",
        ),
        ("", {"SM_VLLM_MAX_MODELLEN": "3"}, "option.max_modellen (|SM_VLLM_MAX_MODEL_LEN?"),
        ("option.eos=1", {}, "option.eos (|docs/configuration.md"),
        ("option.speed=1", {}, "option.speed (|option.seed?"),
        ("option.ssl_keyfil=1", {}, "option.ssl_keyfil (|docs/configuration.md"),
        ("option.zzz=1", {}, "option.zzz (serving.properties, line 1)|SERVING_ALLOW_UNKNOWN_SETTINGS=true"),
    ],
)
def test_a_name_that_nobody_knows_is_refused_or_warned_of(
    model_dir: Path, properties: str, environ: dict[str, str], said: str
) -> None:
    (problem,) = problems(model_dir, properties, environ)
    settings = load(model_dir, properties, environ | {"SERVING_ALLOW_UNKNOWN_SETTINGS": "true"})
    begin, end = said.split("|")
    assert problem.startswith(begin)
    assert end in problem
    (warning,) = settings.warnings
    assert warning.startswith(begin.partition(" (")[0])
    assert settings.model.engine_arguments == {}


@pytest.mark.parametrize(
    ("properties", "environ"),
    [
        ("option.swap_space=4\noption.use_v2_block_manager=true\noption.tokens_per_block=64", {}),
        ("translatorFactory=ai.djl.Mine\nwidth=224\nbatchsize=3\ntensor_parallel_degree=3", {}),
        ("option.paged_attention=true\noption.kv_cache_free_gpu_mem_fraction=0.9", {}),
        ("option.max_seq_len=4096\noption.free_gpu_memory_fraction=0.9\noption.fast_build=true", {}),
        ("option.draft_model_id=a/b\noption.spec_length=0\noption.input_formatter=mine", {}),
        ("option.fp8_scheme=x\noption.qkv_tiling=true\noption.mapLocation=true\noption.model_dir=/a", {}),
        ("", {"SERVING_SERVICE_HOST": "10.0.0.1", "SERVING_PORT_8080_TCP_ADDR": "10.0.0.1", "MY_OPTION": "1"}),
        ("", {"OPTION_ENABLE_CUDA_GRAPH": "true", "SAGEMAKER_REGION": "us-east-1"}),
    ],
)
def test_names_of_others_do_not_keep_a_server_from_starting(
    model_dir: Path, properties: str, environ: dict[str, str]
) -> None:
    settings = load(model_dir, properties, environ)
    assert len(settings.warnings) == len([name for name in environ if name.startswith(("OPTION", "SERVING"))]) + len(
        properties.splitlines()
    )
    assert settings.model.engine_arguments == {}


def test_the_older_name_of_the_type_of_weights_is_the_same_option(model_dir: Path) -> None:
    settings = load(model_dir, "option.data_type=fp16")
    assert (settings.model.dtype, settings.warnings) == ("float16", ())


@pytest.mark.parametrize(
    ("properties", "environ", "meant"),
    [
        ("option.job_queue_size=5", {}, "did you mean job_queue_size?"),
        ("option.load_on_devices=0", {}, "did you mean load_on_devices?"),
        ("", {"OPTION_MIN_WORKERS": "1"}, "did you mean ARGS_MIN_WORKERS?"),
        ("", {"SERVING_LOG_LEVL": "info"}, "did you mean SERVING_LOG_LEVEL?"),
        ("", {"SERVING_MODEL_STORE_PORT": "tcp://10.0.0.1:80"}, ""),
        ("option.rolling_batch=disable\noption.quantise=a", {}, "did you mean option.quantize?"),
    ],
)
def test_names_that_lmi_ignores_are_warned_of(
    model_dir: Path, properties: str, environ: dict[str, str], meant: str
) -> None:
    (warning,) = load(model_dir, properties, environ).warnings
    assert meant in warning


def test_the_value_of_an_unknown_name_is_not_shown(model_dir: Path) -> None:
    environ = {"OPTION_API_KYE": "abcdefg", "SERVING_API_KYES": "abcdefg", "SERVING_ALLOW_UNKNOWN_SETTINGS": "true"}
    settings = load(model_dir, "api_kye=abcdefg", environ)
    assert len(settings.warnings) == 3
    assert "abcdefg" not in str((settings.entries, settings.warnings))


def test_values_are_not_checked_for_vllm_if_it_does_not_run_the_model(model_dir: Path) -> None:
    properties = "option.rolling_batch=disable\noption.kv_cache_dtype=int8\noption.seed=auto\noption.hf_overrides={a"
    assert load(model_dir, properties).model.rolling_batch == "disable"


@pytest.mark.parametrize(("text", "tokens"), [("8k", "8000"), ("8K", "8192"), ("1.5k", "1500"), ("512", "512")])
def test_a_number_of_tokens_may_have_a_unit_of_vllm(model_dir: Path, text: str, tokens: str) -> None:
    settings = load(model_dir, environ={"SM_VLLM_MAX_NUM_BATCHED_TOKENS": text})
    assert settings.model.engine_arguments == {"max_num_batched_tokens": tokens}
    assert len(problems(model_dir, "option.max_num_batched_tokens=1.5K\noption.max_model_len=8ki")) == 2


def test_a_wrong_parser_is_named_once(model_dir: Path) -> None:
    (problem,) = problems(model_dir, "option.tool_call_parser=herms")
    assert problem.count("herms") == problem.count("herms)") + 1
    assert load(model_dir, "option.tool_call_parser=house_style").warnings == ()


def test_code_of_the_model_may_read_names_that_nobody_else_knows(model_dir: Path) -> None:
    (model_dir / "model.py").write_text("from djl_python.output_formatter import output_formatter\n")
    settings = load(model_dir, "option.mine=1\noption.max_modellen=2")
    assert settings.model.engine_arguments == {"mine": "1", "max_modellen": "2"}
    assert [warning.partition(" (")[0] for warning in settings.warnings] == ["option.max_modellen"]


def test_all_wrong_values_are_said_at_once_with_right_ones(model_dir: Path) -> None:
    properties = "option.dtype=bf17\noption.max_model_len=abc\noption.gpu_memory_utilization=90%\noption.quantise=a"
    found = problems(model_dir, properties, {"SERVING_PORT": "x", "OPTION_KV_CACHE_DTYPE": "fp9"})
    texts = {problem.partition(" ")[0]: problem for problem in found}
    assert texts.keys() == {
        *("option.dtype", "option.max_model_len", "option.gpu_memory_utilization", "option.quantise"),
        *("port", "option.kv_cache_dtype"),
    }
    assert "did you mean bf16?" in texts["option.dtype"]
    assert "8192" in texts["option.max_model_len"]
    assert "0.9" in texts["option.gpu_memory_utilization"]
    assert "for example 8080" in texts["port"]
    assert "fp8_e4m3" in texts["option.kv_cache_dtype"]


@pytest.mark.parametrize(
    "properties",
    [
        *("option.max_model_len=16k", "option.max_model_len=-1", "option.max_model_len=auto", "option.seed=None"),
        *("option.gpu_memory_utilization=1e-1", "option.linear_backend=FLASHINFER-CUTLASS", "option.enforce_eager="),
        *('option.hf_overrides={"a": 1}', "option.limit_mm_per_prompt=image=2,video=1", "option.enforce_eager=1"),
    ],
)
def test_values_that_vllm_takes_are_not_refused(model_dir: Path, properties: str) -> None:
    load(model_dir, properties)
