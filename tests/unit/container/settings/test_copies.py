"""The number of copies of a model that an engine serves."""

from __future__ import annotations

import os
from pathlib import Path

from container.settings.load import further_settings, load_startup
from container.settings.values import Value

FITTING = None  # As many copies as the GPUs hold.


def startup(place: Path | None, environ: dict[str, str]) -> list[int | None]:
    return [one.settings.config.max_copies for one in load_startup(place, environ, {}, gpus=4).models]


def test_a_servers_only_model_takes_the_machine_however_it_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    one, other = tmp_path / "a", tmp_path / "b"
    assert startup(one, {}) == [FITTING]
    assert startup(one, {"HF_MODEL_ID": os.fspath(one)}) == [FITTING]
    assert startup(one, {"HF_MODEL_ID": "org/name"}) == [1, 1]
    assert startup(tmp_path, {}) == [1, 1]
    assert startup(tmp_path, {"SERVING_MAX_WORKERS": "2"}) == [2, 2]
    assert startup(None, {"SERVING_LOAD_MODELS": f"m={one}"}) == [FITTING]
    assert startup(None, {"SERVING_LOAD_MODELS": f"m={one},n={other}"}) == [1, 1]
    assert startup(None, {"SERVING_LOAD_MODELS": f"m={one}", "HF_MODEL_ID": "org/name"}) == [1, 1]
    assert startup(None, {"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": "org/name"}) == [FITTING]
    assert startup(None, {"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": os.fspath(one)}) == [FITTING]


def test_models_that_are_registered_later_have_one_copy_unless_they_name_a_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    started, url = load_startup(tmp_path, {}, {}, gpus=4), Value(str(tmp_path), "POST /models: url")

    def registered(**numbers: str) -> int | None:
        arguments = {key: Value(number, "POST /models") for key, number in numbers.items()}
        return further_settings(url, "m", started.environment, {}, arguments).config.max_copies

    assert registered() == 1
    assert registered(maxWorkers="3") == 3
    assert registered(minWorkers="2") == 2
