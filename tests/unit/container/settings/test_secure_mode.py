"""SageMaker's secure mode: links, and adapters that are loaded later. `cases/secure_mode.yaml` has more tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from container.settings.secure_mode import ALLOWED_KEYS, KNOWN_CONTROLS, SecureMode
from container.settings.settings import SettingsError
from tests.settings import load_settings


def test_the_list_has_what_the_contract_names() -> None:
    assert {"engine", "minWorkers", "option.entryPoint", "option.awq_format", "option.n_positions"} <= ALLOWED_KEYS
    assert len(ALLOWED_KEYS) == 89


def test_a_link_does_not_hide_what_it_leads_to(model_dir: Path, tmp_path: Path) -> None:
    environ = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.pkl").touch()
    (model_dir / "weights.safetensors").symlink_to(elsewhere / "x.pkl")
    with pytest.raises(SettingsError, match=r"weights\.safetensors"):
        load_settings(model_dir, environ)
    (model_dir / "weights.safetensors").unlink()
    (model_dir / "folder").symlink_to(elsewhere)
    (model_dir / "loop").symlink_to(model_dir)
    with pytest.raises(SettingsError, match=r"folder/x\.pkl"):
        load_settings(model_dir, environ)


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
