"""The code in a model directory that serves the model, and the settings of this code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from container.settings.report import render_text
from container.settings.settings import Settings, SettingsError
from handlers.custom.settings import HandlerConfig
from tests.settings import load_settings

HANDLER = "def handle(inputs):\n    return None\n"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "my_llm"
    directory.mkdir()
    return directory


def load(
    directory: Path, code: str | None = None, properties: str = "", environ: Mapping[str, str] | None = None
) -> Settings:
    if code is not None:
        (directory / "model.py").write_text(code)
    (directory / "serving.properties").write_text(properties)
    return load_settings(directory, environ or {})


def handler(
    directory: Path, code: str | None = HANDLER, properties: str = "", environ: Mapping[str, str] | None = None
) -> HandlerConfig:
    found = load(directory, code, properties, environ).config.handler
    assert found is not None
    return found


def test_the_file_may_have_the_name_of_its_directory(model_dir: Path) -> None:
    (model_dir / "my_llm.py").write_text(HANDLER)
    assert handler(model_dir, None).entry_point == str(model_dir / "my_llm.py")


def test_secrets_in_the_workers_environment_are_not_shown(model_dir: Path) -> None:
    settings = load(model_dir, HANDLER, "option.env=TOKEN=secret-1")
    assert "option.env" in render_text(settings)
    assert "secret-1" not in render_text(settings)
    assert settings.config.handler is not None
    assert "env" not in settings.config.handler.properties, "handlers print their properties"


@pytest.mark.parametrize("name", ["code/model.py", "code/handler.py"])
def test_an_entry_point_may_name_the_only_directory(tmp_path: Path, name: str) -> None:
    code = tmp_path / "model" / "code"
    code.mkdir(parents=True)
    (code / "model.py").write_text(HANDLER)
    (code / "handler.py").write_text(HANDLER)
    settings = load_settings(tmp_path / "model", {"DJL_ENTRY_POINT": name})
    assert settings.config.handler is not None
    assert settings.config.handler.entry_point == str(tmp_path / "model" / name)
    with pytest.raises(SettingsError, match=str(code)):
        load_settings(tmp_path / "model", {"DJL_ENTRY_POINT": "code/other.py"})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "not JSON in UTF-8"),
        (b"", "not JSON in UTF-8"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": "\xff"}', "not JSON in UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON in UTF-8"),
    ],
)
def test_a_broken_config_json_is_a_problem(model_dir: Path, tmp_path: Path, config: bytes, why: str) -> None:
    (model_dir / "config.json").write_bytes(config)
    with pytest.raises(SettingsError, match=f"model directory .*{why}"):
        load_settings(model_dir, {})
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SettingsError, match=f"HF_MODEL_ID.*{why}"):
        load_settings(other, {"HF_MODEL_ID": str(model_dir)})
    assert load_settings(model_dir, {"OPTION_HF_CONFIG_PATH": "org/name"}).config.model_id == str(model_dir)
    assert handler(model_dir).entry_point == str(model_dir / "model.py")


def test_a_directory_without_a_model_is_refused_before_the_engine_starts(model_dir: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    for place, why in {
        tmp_path / "hub": "root of the hub's cache",
        tmp_path / "hub" / "models--org--name": "in the hub's cache",
        snapshot: r"it has no config\.json",
    }.items():
        for environ in ({"HF_MODEL_ID": str(place)}, {"OPTION_MODEL_ID": str(place)}):
            with pytest.raises(SettingsError, match=why):
                load_settings(model_dir, environ)
    for variable in ("OPTION_SPECULATIVE_DRAFT_MODEL", "OPTION_SPECULATIVE_MODEL"):
        with pytest.raises(SettingsError, match=r"config\.json"):
            load_settings(model_dir, {"HF_MODEL_ID": "org/name", variable: str(snapshot)})
    (snapshot / "config.json").write_text("{}")
    assert load_settings(model_dir, {"HF_MODEL_ID": str(snapshot)}).config.model_id == str(snapshot)
    for name in ("params.json", "model.GGUF"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
        assert load_settings(model_dir, {"OPTION_MODEL_ID": str(tmp_path / name)}).warnings == ()
