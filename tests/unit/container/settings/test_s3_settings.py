"""Settings that name a model on S3: the files that are read from S3, and the messages about files that are not read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from container.models.life_cycle import Lifecycle, fetch_weights
from container.settings.settings import SettingsError
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


@pytest.mark.parametrize("name", ["HF_MODEL_ID", "SERVING_MODEL_STORE", "--model-dir"])
def test_a_folder_is_a_model_directory_of_its_own(model: Gate, url: str, environ: dict[str, str], name: str) -> None:
    settings = load_settings(url, environ) if name == "--model-dir" else load_settings(None, environ | {name: url})
    config = settings.config
    assert (config.name, config.model_id, config.max_prompt_tokens) == ("tiny_model", str(config.model_dir), 7)
    (remote,) = settings.remote_models
    assert not (config.model_dir / "model.safetensors").exists()
    asyncio.run(fetch_weights(settings.remote_models, 60))
    assert (config.model_dir / "model.safetensors").read_bytes() == b"weights"
    assert remote.bytes_here == 7


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


@pytest.mark.parametrize(
    ("name", "value", "tokens"),
    [
        ("OPTION_SPECULATIVE_CONFIG", '{"model": "<url>", "num_speculative_tokens": 3}', 3),
        ("OPTION_SPECULATIVE_DRAFT_MODEL", "<url>", 5),
    ],
)
def test_a_draft_model_may_be_on_s3(
    model: Gate, url: str, environ: dict[str, str], name: str, value: str, tokens: int
) -> None:
    settings = load_settings(url, environ | {name: value.replace("<url>", url)})
    written = json.loads(settings.config.engine_arguments["speculative_config"])
    (remote,) = settings.remote_models
    assert isinstance(remote, RemoteModel)
    assert written == {"model": str(remote.directory), "num_speculative_tokens": tokens}


@pytest.mark.parametrize("name", ["HF_MODEL_ID", "SERVING_MODEL_STORE", "OPTION_MODEL_ID"])
def test_what_cannot_be_had_is_named_with_its_source(gate: Gate, environ: dict[str, str], name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, environ | {name: "s3://no-such-bucket-here/x"})
    problem = caught.value.problems[0]
    assert f"(environment: {name})" in problem
    assert "The specified bucket does not exist" in problem


@pytest.mark.parametrize(
    ("status", "code", "seconds", "words"),
    [(403, "AccessDenied", 60, "AccessDenied"), (503, "SlowDown", 0.5, r"option\.model_loading_timeout .*0\.5 s")],
)
def test_a_download_that_fails_or_takes_too_long_is_a_load_that_fails(
    model: Gate, url: str, environ: dict[str, str], status: int, code: str, seconds: float, words: str
) -> None:
    settings = load_settings(url, environ)
    model.fault = refuse(status, code)
    with pytest.raises(EngineStartError, match=words):
        asyncio.run(fetch_weights(settings.remote_models, seconds))


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
            asyncio.run(lifecycle.start(lambda given: given))
    else:
        with pytest.raises(SettingsError, match=name):
            load_settings(None, environ | secure)
