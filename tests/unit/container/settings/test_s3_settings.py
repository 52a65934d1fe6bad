"""Settings that name a model on S3: the files that are read from there, and the messages if that fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from container.models.life_cycle import Lifecycle, fetch_weights
from container.settings.settings import Settings, SettingsError
from container.sources.download import RemoteModel
from engines.interface import EngineStartError
from tests.settings import load_settings
from tests.stand_ins.s3 import Gate, put, refuse


@pytest.fixture
def model(s3_address: str, prefix: str, gate: Gate) -> Gate:
    files = {
        "config.json": b"{}",
        "serving.properties": b"option.max_prompt_tokens=7\n",
        "requirements.txt": b"x\n",
        "model.safetensors": b"weights",
    }
    put(s3_address, {f"{prefix}/{name}": body for name, body in files.items()})
    return gate


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "empty").mkdir()
    return {"SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"), "SERVING_MODEL_STORE": str(tmp_path / "empty")}


def check(settings: Settings) -> None:
    assert settings.config.name == "tiny_model"
    assert settings.config.model_id == str(settings.config.model_dir)
    assert settings.config.max_prompt_tokens == 7
    (remote,) = settings.remote_models
    assert not (settings.config.model_dir / "model.safetensors").exists()
    asyncio.run(fetch_weights(settings.remote_models, 60))
    assert (settings.config.model_dir / "model.safetensors").read_bytes() == b"weights"
    assert remote.bytes_here == 7


def test_hf_model_id_is_a_model_directory_of_its_own(model: Gate, url: str, environ: dict[str, str]) -> None:
    check(load_settings(None, environ | {"HF_MODEL_ID": url}))


def test_so_is_the_model_store(model: Gate, url: str, environ: dict[str, str]) -> None:
    check(load_settings(None, environ | {"SERVING_MODEL_STORE": url}))


def test_so_is_model_dir(model: Gate, url: str, environ: dict[str, str]) -> None:
    check(load_settings(url, environ))


def test_option_model_id_is_the_model_of_the_directory_that_is_here(
    model: Gate, url: str, environ: dict[str, str], tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "serving.properties").write_text(f"option.model_id={url}\n")
    settings = load_settings(here, environ)
    assert (settings.config.model_dir, settings.config.name, settings.config.max_prompt_tokens) == (here, "here", None)
    (remote,) = settings.remote_models
    assert isinstance(remote, RemoteModel)
    assert settings.config.model_id == str(remote.directory)


def test_a_draft_model_may_be_on_s3(model: Gate, url: str, environ: dict[str, str]) -> None:
    environ = environ | {"OPTION_SPECULATIVE_CONFIG": json.dumps({"model": url, "num_speculative_tokens": 3})}
    settings = load_settings(url, environ)
    written = json.loads(settings.config.engine_arguments["speculative_config"])
    (remote,) = settings.remote_models
    assert isinstance(remote, RemoteModel)
    assert written == {"model": str(remote.directory), "num_speculative_tokens": 3}


def test_so_may_that_of_lmis_option(model: Gate, url: str, environ: dict[str, str]) -> None:
    settings = load_settings(url, environ | {"OPTION_SPECULATIVE_DRAFT_MODEL": url})
    written = json.loads(settings.config.engine_arguments["speculative_config"])
    (remote,) = settings.remote_models
    assert isinstance(remote, RemoteModel)
    assert written == {"model": str(remote.directory), "num_speculative_tokens": 5}


@pytest.mark.parametrize("name", ["HF_MODEL_ID", "SERVING_MODEL_STORE", "OPTION_MODEL_ID"])
def test_what_cannot_be_had_is_named_with_its_source(gate: Gate, environ: dict[str, str], name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, environ | {name: "s3://no-such-bucket-here/x"})
    problem = caught.value.problems[0]
    assert f"(environment: {name})" in problem
    assert "The specified bucket does not exist" in problem


def test_a_download_that_fails_is_a_load_that_fails(model: Gate, url: str, environ: dict[str, str]) -> None:
    settings = load_settings(url, environ)
    model.fault = refuse(403, "AccessDenied")
    with pytest.raises(EngineStartError, match="AccessDenied"):
        asyncio.run(fetch_weights(settings.remote_models, 60))


def test_the_time_for_loading_counts(model: Gate, url: str, environ: dict[str, str]) -> None:
    settings = load_settings(url, environ)
    model.fault = refuse(503, "SlowDown")
    with pytest.raises(EngineStartError, match=r"option\.model_loading_timeout .*0\.5 s"):
        asyncio.run(fetch_weights(settings.remote_models, 0.5))


@pytest.mark.parametrize(("name", "weights"), [("pickled.bin", True), ("chat_template.jinja", False)])
def test_the_secure_mode_looks_into_what_comes_from_s3_whatever_its_channels_are(
    model: Gate,
    url: str,
    s3_address: str,
    prefix: str,
    environ: dict[str, str],
    tmp_path: Path,
    name: str,
    weights: bool,
) -> None:
    put(s3_address, {f"{prefix}/more/{name}": b"x"})
    (tmp_path / "channel").mkdir()
    secure = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES,DISALLOW_CHAT_TEMPLATE",
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(tmp_path / "channel"),
        "HF_MODEL_ID": url,
    }
    put(s3_address, {f"{prefix}/serving.properties": b""})
    if weights:
        lifecycle = Lifecycle(load_settings(None, environ | secure))
        with pytest.raises(EngineStartError, match=name):
            asyncio.run(lifecycle.start())
    else:
        with pytest.raises(SettingsError, match=name):
            load_settings(None, environ | secure)
