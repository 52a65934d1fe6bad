"""SageMaker's secure mode: one test for each check."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from container.settings.secure_mode import ALLOWED_KEYS, KNOWN_CONTROLS, SecureMode, read_secure_mode
from container.settings.settings import Settings, SettingsError
from container.settings.values import Value
from tests.settings import load_settings

ON = {"SAGEMAKER_SECURE_MODE": "true"}


def load(model_dir: Path, *controls: str, properties: str = "", **environ: str) -> Settings:
    (model_dir / "serving.properties").write_text(properties)
    # Each case has another control on as well: a check that was always on would be seen.
    listed = ",".join(controls) or "DISALLOW_PICKLE_FILES"
    return load_settings(model_dir, {**ON, "SAGEMAKER_SECURITY_CONTROLS": listed, **environ})


def refused(model_dir: Path, *controls: str, properties: str = "", **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(model_dir, *controls, properties=properties, **environ)
    return str(caught.value)


def test_the_mode_is_off_unless_it_is_asked_for(model_dir: Path) -> None:
    (model_dir / "model.py").write_text("def handle(inputs): ...")
    (model_dir / "weights.bin").touch()
    environ = {"SAGEMAKER_SECURE_MODE": "false", "SAGEMAKER_SECURITY_CONTROLS": ",".join(KNOWN_CONTROLS)}
    assert load_settings(model_dir, environ).model_faults is None


@pytest.mark.parametrize("key", ["option.model_id", "option.speculative_draft_model"])
@pytest.mark.parametrize("control", ["DISALLOW_CHAT_TEMPLATE", "DISALLOW_PICKLE_FILES"])
def test_a_hubs_model_that_the_model_directory_names_cannot_be_checked(model_dir: Path, control: str, key: str) -> None:
    (model_dir / "config.json").write_text("{}")
    refusal = refused(model_dir, control, properties=f"{key}=owner/model")
    assert f'{control}: {key} is "owner/model" (serving.properties, line 1): ' in refusal
    assert "cannot be checked" in refusal
    load(model_dir, control, HF_MODEL_ID="owner/model")


def test_the_mode_needs_its_controls(model_dir: Path) -> None:
    with pytest.raises(SettingsError, match="SAGEMAKER_SECURITY_CONTROLS"):
        load_settings(model_dir, ON)


def test_a_control_that_is_not_known_is_not_pretended_to_be_kept(model_dir: Path) -> None:
    assert "DISALLOW_EVERYTHING" in refused(model_dir, "DISALLOW_EVERYTHING")


def test_settings_of_the_list_are_allowed(model_dir: Path) -> None:
    properties = "engine=Python\noption.dtype=fp16\noption.max_model_len=64\nbatch_size=1"
    settings = load(model_dir, *KNOWN_CONTROLS, properties=properties, SERVING_RETRY_THRESHOLD="2")
    assert settings.model_faults is not None
    assert settings.model_faults() == []


@pytest.mark.parametrize("key", ["option.async_mode", "option.env", "option.predict_timeout", "option.Dtype", "x"])
def test_any_other_setting_is_refused_by_name(model_dir: Path, key: str) -> None:
    assert f"{key} (serving.properties: {key}) is not allowed" in refused(model_dir, properties=f"{key}=1")


def test_settings_of_the_environment_are_held_to_the_list_as_well(model_dir: Path) -> None:
    assert "option.chat_template (environment: OPTION_CHAT_TEMPLATE)" in refused(model_dir, OPTION_CHAT_TEMPLATE="x")


def test_the_list_has_what_the_contract_names() -> None:
    assert {"engine", "minWorkers", "option.entryPoint", "option.awq_format", "option.n_positions"} <= ALLOWED_KEYS
    assert len(ALLOWED_KEYS) == 89


def test_only_known_interpreters_run(model_dir: Path) -> None:
    assert "interpreter" in refused(model_dir, properties="option.pythonExecutable=/tmp/python")
    assert "interpreter" in refused(model_dir, PYTHON_EXECUTABLE="/tmp/python")
    load(model_dir, properties="option.pythonExecutable=/usr/bin/python3")


def test_inference_scripts(model_dir: Path) -> None:
    control = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
    load(model_dir, control, properties="option.entryPoint=djl_python.huggingface")
    assert control in refused(model_dir, control, properties="option.entryPoint=my.module")
    assert control in refused(model_dir, control, DJL_ENTRY_POINT="my.module")
    (model_dir / "model.py").write_text("def input_formatter(inputs): ...")
    assert f"{control}: there is a model.py" in refused(model_dir, control)
    load(model_dir)


def test_a_script_of_sagemaker_is_code_although_its_entry_point_is_of_ours(model_dir: Path) -> None:
    control, entry_point = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS", "option.entryPoint=djl_python.sagemaker"
    (model_dir / "code").mkdir()
    (model_dir / "code" / "inference.py").write_text("def model_fn(model_dir): ...")
    (model_dir / "code" / "requirements.txt").touch()
    assert f"{control}: there is a inference.py" in refused(model_dir, control, properties=entry_point)
    control = "DISALLOW_REQUIREMENTS_TXT"
    assert f"{control}: there is a requirements.txt" in refused(model_dir, control, properties=entry_point)
    load(model_dir, "DISALLOW_PICKLE_FILES", properties=entry_point)


def test_a_formatter_is_code_beside_an_entry_point_of_ours_as_well(model_dir: Path) -> None:
    control = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
    (model_dir / "model.py").write_text("x = 1")
    assert control in refused(model_dir, control, properties="option.entryPoint=djl_python.huggingface")


def test_requirements(model_dir: Path) -> None:
    (model_dir / "requirements.txt").touch()
    assert "DISALLOW_REQUIREMENTS_TXT" in refused(model_dir, "DISALLOW_REQUIREMENTS_TXT")
    load(model_dir)


@pytest.mark.parametrize("text", ["true", "True", "1", "yes"])
def test_remote_code(model_dir: Path, text: str) -> None:
    control = "DISALLOW_TRUST_REMOTE_CODE"
    assert control in refused(model_dir, control, properties=f"option.trust_remote_code={text}")
    assert control in refused(model_dir, control, OPTION_TRUST_REMOTE_CODE=text)
    assert control in refused(model_dir, control, HF_MODEL_TRUST_REMOTE_CODE=text)
    load(model_dir, control, properties="option.trust_remote_code=false")
    load(model_dir, properties=f"option.trust_remote_code={text}")


@pytest.mark.parametrize(
    "name", ["a.bin", "A.BIN", "b.pt", "c.pth", "d.ckpt", "deep/er/e.Pkl", "f.joblib", "pytorch_model.bin.index.json"]
)
def test_pickle_files_of_untrusted_channels(model_dir: Path, tmp_path: Path, name: str) -> None:
    channel = tmp_path / "channel"
    (channel / name).parent.mkdir(parents=True)
    (channel / name).touch()
    control = "DISALLOW_PICKLE_FILES"
    load(model_dir, control)
    assert name in refused(model_dir, control, SAGEMAKER_UNTRUSTED_CHANNELS=f"{model_dir},{channel}")


def test_without_channels_the_model_is_not_trusted(model_dir: Path) -> None:
    (model_dir / "weights.bin").touch()
    assert "weights.bin" in refused(model_dir, "DISALLOW_PICKLE_FILES")
    load(model_dir, "DISALLOW_REQUIREMENTS_TXT")


def test_a_link_does_not_hide_what_it_leads_to(model_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.pkl").touch()
    (model_dir / "weights.safetensors").symlink_to(elsewhere / "x.pkl")
    assert "weights.safetensors" in refused(model_dir, "DISALLOW_PICKLE_FILES")
    (model_dir / "weights.safetensors").unlink()
    (model_dir / "folder").symlink_to(elsewhere)
    (model_dir / "loop").symlink_to(model_dir)
    assert os.path.join("folder", "x.pkl") in refused(model_dir, "DISALLOW_PICKLE_FILES")


def test_a_channel_has_to_be_a_directory(model_dir: Path) -> None:
    assert "there is no such directory" in refused(model_dir, SAGEMAKER_UNTRUSTED_CHANNELS="/no/such/channel")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("tokenizer_config.json", "no json"),
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", "{}"),
        ("additional_chat_templates/tool_use.jinja", "{{ messages }}"),
        ("processor/chat_template.jinja", "{{ messages }}"),
        ("processor_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("processor_config.json", json.dumps({"tokenizer": [{"chat_template": "{{ messages }}"}]})),
        ("special_tokens_map.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("deep/tokenizer_config.json", '{"chat\\u005ftemplate": "{{ messages }}"}'),
    ],
)
def test_chat_templates(model_dir: Path, name: str, text: str) -> None:
    (model_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (model_dir / name).write_text(text)
    assert f"DISALLOW_CHAT_TEMPLATE: {name}" in refused(model_dir, "DISALLOW_CHAT_TEMPLATE").replace("there is ", "")
    load(model_dir)


def test_a_tokenizer_without_a_chat_template_is_allowed(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    (model_dir / "processor_config.json").write_text('{"chat_template": null, "image_processor": {"size": [8, 8]}}')
    (model_dir / "model.safetensors.index.json").write_text("{}")
    load(model_dir, "DISALLOW_CHAT_TEMPLATE")


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("model.py", "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"),
        ("requirements.txt", "DISALLOW_REQUIREMENTS_TXT"),
        ("adapter_model.bin", "DISALLOW_PICKLE_FILES"),
    ],
)
def test_an_adapters_directory_is_held_to_the_controls(tmp_path: Path, name: str, control: str) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    everything = SecureMode(KNOWN_CONTROLS)
    assert everything.adapter_faults(tmp_path) == []
    (tmp_path / name).touch()
    (problem,) = everything.adapter_faults(tmp_path)
    assert problem.startswith(f"{control}: there is")
    assert SecureMode(KNOWN_CONTROLS - {control}).adapter_faults(tmp_path) == []


def test_whoever_has_no_settings_reads_the_mode_from_the_environment_alone() -> None:
    problems: list[str] = []
    variables = {name: Value(text, name) for name, text in ON.items()}
    variables["SAGEMAKER_SECURITY_CONTROLS"] = Value(" DISALLOW_PICKLE_FILES , ", "environment")
    assert read_secure_mode(variables, problems) == SecureMode(frozenset({"DISALLOW_PICKLE_FILES"}))
    assert problems == []
