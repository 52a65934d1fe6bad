from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from container.settings import server as server_module
from container.settings.server import ServerConfig
from container.settings.settings import Settings, SettingsError
from container.sources import location as model_location
from handlers.model_config import ModelConfig
from tests.settings import load_settings

SAME_DIRECTORY = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert settings.server_config == ServerConfig()
    assert settings.config == ModelConfig(name="model", model_dir=model_dir, model_id=str(model_dir))
    assert settings.warnings == ()
    assert {one.source for one in settings.entries} == {"default", "command line: --model-dir"}


def test_sagemaker_has_defaults_of_its_own(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load(model_dir).server_config.blackbox_log
    monkeypatch.setattr(server_module, "SAGEMAKER_METADATA", model_dir / "config.json")
    there = load(model_dir).server_config
    assert (there.request_id_header, there.blackbox_log) == ("X-Amzn-SageMaker-Inference-Id", True)
    environ = {"SERVING_REQUEST_ID_HEADER_KEY": "x-id", "SERVING_BLACKBOX_LOG": "false"}
    chosen = load(model_dir, environ=environ).server_config
    assert (chosen.request_id_header, chosen.blackbox_log) == ("x-id", False)


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
    assert settings.config.predict_timeout == value
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
    ("directory", "name"), [("model", "model"), ("My-Model v1.0", "My_Model_v1_0"), ("modèle", "mod_le")]
)
def test_the_name_is_that_of_the_directory(tmp_path: Path, directory: str, name: str) -> None:
    path = tmp_path / directory
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert load(path).config.name == name


def test_the_name_of_a_local_hf_model_id_is_that_of_its_directory(tmp_path: Path, model_dir: Path) -> None:
    other = tmp_path / "Other-One"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert load(model_dir, environ={"HF_MODEL_ID": str(other)}).config.name == "Other_One"


def test_the_model_store_is_the_model_directory_unless_one_is_given(tmp_path: Path, model_dir: Path) -> None:
    settings = load(None, environ={"SERVING_MODEL_STORE": str(model_dir)})
    assert settings.config.model_dir == model_dir
    assert load(model_dir, environ={"SERVING_MODEL_STORE": "/no/such/directory"}).config.model_dir == model_dir
    assert "SERVING_MODEL_STORE" in problems(None, environ={"SERVING_MODEL_STORE": "/no/such/directory"})[0]


def test_the_default_model_directory_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location, "DEFAULT_MODEL_DIR", tmp_path / "nothing")
    config = load_settings(None, {"OPTION_MODEL_ID": "org/My-Model"}, {}).config
    assert (config.model_id, config.name) == ("org/My-Model", "org_My_Model")


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
    config = load_settings(tmp_path, {}).config
    assert (config.model_dir, config.name) == (inner, "llama_2")


def test_several_models_stop_the_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    with pytest.raises(SettingsError, match=r"a, b"):
        load_settings(tmp_path, {"HF_MODEL_ID": "org/m"})


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
        return  # The setting does not read this text as JSON. It is read as a name, or the engine refuses it.
    with pytest.raises(SettingsError) as refused:
        load_settings(model_dir, {name: text})
    (problem,) = refused.value.problems
    assert "; allowed: " in problem
    assert len(problem) < 1000


def test_degrees_of_any_length_do_not_fail_a_handler(model_dir: Path) -> None:
    (model_dir / "model.py").write_text("def handle(inputs): ...\n")
    settings = load_settings(model_dir, {"OPTION_TENSOR_PARALLEL_DEGREE": "9" * 5000, "OPTION_DEVICE_MAP": "²"})
    assert settings.config.handler is not None


def test_the_value_of_an_unknown_name_is_not_shown(model_dir: Path) -> None:
    environ = {"OPTION_API_KYE": "abcdefg", "SERVING_API_KYES": "abcdefg", "SERVING_ALLOW_UNKNOWN_SETTINGS": "true"}
    settings = load(model_dir, "api_kye=abcdefg", environ)
    assert len(settings.warnings) == 3
    assert "abcdefg" not in str((settings.entries, settings.warnings))
