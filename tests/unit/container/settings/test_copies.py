"""The number of copies of a model that an engine serves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from container.settings import environment
from container.settings.load import further_settings, load_startup
from container.settings.settings import Settings
from container.settings.values import Value
from tests.settings import load_settings

FITTING = None  # As many copies as the GPUs hold.


def load(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    gpus: int = 4,
    one_model: bool = True,
) -> Settings:
    monkeypatch.setattr(environment, "gpu_count", lambda: gpus)
    (model_dir / "serving.properties").write_text(properties)
    return load_settings(model_dir, environ or {}, one_model=one_model)


def copies(settings: Settings) -> tuple[int | None, int | None]:
    return settings.model.min_copies, settings.model.max_copies


@pytest.mark.parametrize(
    ("properties", "environ", "expected"),
    [
        ("", {}, (None, FITTING)),
        ("minWorkers=1\nmaxWorkers=1", {}, (None, FITTING)),
        ("maxWorkers=1", {}, (None, FITTING)),
        ("", {"SERVING_MIN_WORKERS": "1", "SERVING_MAX_WORKERS": "1"}, (None, FITTING)),
        ("", {"SAGEMAKER_NUM_MODEL_WORKERS": "1"}, (None, FITTING)),
        ("minWorkers=1\nmaxWorkers=4", {}, (1, 4)),
        ("minWorkers=2\nmaxWorkers=4", {}, (2, 4)),
        ("maxWorkers=2", {}, (None, 2)),
        ("minWorkers=2", {}, (2, FITTING)),
        ("max_workers=3", {"SERVING_MIN_WORKERS": "2"}, (2, 3)),
        ("gpu.maxWorkers=2\nmaxWorkers=4\ncpu.maxWorkers=1", {}, (None, 2)),
        ("gpu.minWorkers=2\ncpu.minWorkers=1", {}, (2, FITTING)),
        ("", {"SAGEMAKER_NUM_MODEL_WORKERS": "3"}, (3, 3)),
        ("maxWorkers=4", {"SAGEMAKER_NUM_MODEL_WORKERS": "3"}, (3, 3)),
        ("", {"SERVING_MAX_WORKERS": "4"}, (None, 4)),
        ("maxWorkers=2", {"SERVING_MAX_WORKERS": "4"}, (None, 2)),
        ("", {"SAGEMAKER_TS_MIN_WORKERS": "2", "SAGEMAKER_TS_MAX_WORKERS": "4"}, (2, 4)),
        ("", {"SAGEMAKER_MODEL_SERVER_WORKERS": "1"}, (None, FITTING)),
        ("maxWorkers=2", {"SAGEMAKER_MODEL_SERVER_WORKERS": "1"}, (None, 2)),
        ("", {"SAGEMAKER_MODEL_SERVER_WORKERS": "1", "SERVING_MAX_WORKERS": "4"}, (None, 4)),
        ("load_on_devices=0;1", {}, (None, FITTING)),
        ("option.tensor_parallel_degree=max", {}, (None, FITTING)),
        ("option.data_parallel_size=1\noption.nnodes=1", {}, (None, FITTING)),
        ("option.data_parallel_size=2", {}, (None, 1)),
        ("option.rolling_batch=disable", {}, (None, 1)),
        ("load_on_devices=cpu\noption.rolling_batch=disable", {}, (None, 1)),
    ],
)
def test_settings_name_the_copies_and_the_gpus_are_the_default(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    properties: str,
    environ: dict[str, str],
    expected: tuple[int | None, int | None],
) -> None:
    settings = load(model_dir, monkeypatch, properties, environ)
    assert copies(settings) == expected
    assert settings.warnings == ()
    names = [entry.name for entry in settings.entries]
    assert len(names) == len(set(names))
    shown = {entry.name: entry.value for entry in settings.entries}
    if expected != (None, FITTING):
        assert (shown["minWorkers"], shown["maxWorkers"]) == expected
    notes = {entry.name: entry.note for entry in settings.entries}
    assert bool(notes["maxWorkers"]) is (expected[1] is FITTING)


@pytest.mark.parametrize(("gpus", "one_model"), [(0, True), (4, False), (0, False)])
def test_one_copy_is_the_default_on_a_cpu_and_beside_other_models(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, one_model: bool
) -> None:
    def found(properties: str) -> tuple[int | None, int | None]:
        settings = load(model_dir, monkeypatch, properties, gpus=gpus, one_model=one_model)
        assert settings.warnings == ()
        return copies(settings)

    assert found("") == (None, 1)
    assert found("maxWorkers=2") == (None, 2)
    assert found("minWorkers=2") == (2, 2)
    assert found("gpu.maxWorkers=3\ncpu.maxWorkers=2") == (None, 3 if gpus else 2)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("maxWorkers=0", (None, FITTING)),
        ("minWorkers=0", (None, FITTING)),
        ("minWorkers=0\nmaxWorkers=2", (1, 2)),
        ("minWorkers=3\nmaxWorkers=2", (3, 3)),
    ],
)
def test_numbers_that_an_engine_cannot_have_are_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, properties: str, expected: tuple[int | None, int | None]
) -> None:
    settings = load(model_dir, monkeypatch, properties)
    assert copies(settings) == expected
    (warning,) = settings.warnings
    assert "serving.properties: m" in warning


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ("option.data_parallel_size=2", "option.data_parallel_size"),
        ("option.data_parallel_rank=0", "option.data_parallel_rank"),
        ("option.data_parallel_backend=ray", "option.data_parallel_backend"),
        ("option.enable_expert_parallel=true", "option.enable_expert_parallel"),
        ('option.ec_transfer_config={"ec_connector": "x"}', "option.ec_transfer_config"),
        ("option.nnodes=2", "option.nnodes"),
        ("option.distributed_executor_backend=ray", "option.distributed_executor_backend"),
        ("option.device_ids=0", "option.device_ids"),
        ('option.kv_transfer_config={"kv_connector": "x"}', "option.kv_transfer_config"),
        ('option.kv_events_config={"enable_kv_cache_events": true}', "option.kv_events_config"),
        ("option.rolling_batch=disable", "dynamic batch"),
        ("batch_size=4", "dynamic batch"),
    ],
)
def test_where_there_can_be_one_copy_one_warning_says_why(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, properties: str, reason: str
) -> None:
    assert load(model_dir, monkeypatch, properties + "\nminWorkers=1\nmaxWorkers=1").warnings == ()
    asked = "\nminWorkers=2\nmaxWorkers=4\noption.parallel_loading=true"
    settings = load(model_dir, monkeypatch, properties + asked)
    assert copies(settings) == (None, 1)
    (warning,) = settings.warnings
    assert all(key in warning for key in (reason, "minWorkers", "maxWorkers", "option.parallel_loading"))
    assert len([entry for entry in settings.entries if entry.note.startswith("ignored")]) == 3


@pytest.mark.parametrize("name", ["distributed_executor_backend=mp", "enable_expert_parallel=false"])
def test_values_that_keep_the_model_on_its_gpus_allow_copies(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert copies(load(model_dir, monkeypatch, f"option.{name}\nmaxWorkers=4")) == (None, 4)


def test_copies_are_loaded_at_the_same_time_if_there_are_several(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = load(model_dir, monkeypatch, "option.parallel_loading=true")
    assert (together.model.parallel_loading, together.warnings) == (True, ())
    (warning,) = load(model_dir, monkeypatch, "option.parallel_loading=true", gpus=0).warnings
    assert "option.parallel_loading" in warning


def test_a_number_of_workers_of_scripts_is_no_number_of_copies(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(model_dir, monkeypatch, "", {"SAGEMAKER_MODEL_SERVER_WORKERS": "2"})
    assert copies(settings) == (None, FITTING)
    (warning,) = settings.warnings
    assert "SAGEMAKER_MODEL_SERVER_WORKERS" in warning
    assert "maxWorkers" in warning


@pytest.mark.parametrize(
    ("properties", "devices"),
    [
        ("load_on_devices=*", None),
        ("load_on_devices=2;1", (2, 1)),
        ("option.tensor_parallel_degree=1\nload_on_devices=0;2", (0, 2)),
        # LMI's form: the first GPU of each copy.
        ("option.tensor_parallel_degree=2\nload_on_devices=0", (0, 1)),
        ("option.tensor_parallel_degree=2\nload_on_devices=0;2", (0, 1, 2, 3)),
        ("option.tensor_parallel_degree=2\noption.pipeline_parallel_degree=2\nload_on_devices=0", (0, 1, 2, 3)),
        # All GPUs of the copies, because such copies would overlap or end after the last GPU.
        ("option.tensor_parallel_degree=2\nload_on_devices=0;1", (0, 1)),
        ("option.tensor_parallel_degree=2\nload_on_devices=0;3", (0, 3)),
        ("option.tensor_parallel_degree=2\nload_on_devices=0;1;3", (0, 1, 3)),
        ("option.tensor_parallel_degree=2\nload_on_devices=3", (3,)),
        ("option.tensor_parallel_degree=2\nload_on_devices=0\noption.data_parallel_size=2", (0,)),
    ],
)
def test_devices_are_the_gpus_of_all_copies(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, properties: str, devices: tuple[int, ...] | None
) -> None:
    settings = load(model_dir, monkeypatch, properties)
    assert settings.model.devices == devices
    assert settings.warnings == ()


def startup(place: Path | None, environ: dict[str, str]) -> list[int | None]:
    return [one.settings.model.max_copies for one in load_startup(place, environ, {}, gpus=4).models]


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
        return further_settings(url, "m", started.environment, {}, arguments).model.max_copies

    assert registered() == 1
    assert registered(maxWorkers="3") == 3
    assert registered(minWorkers="2") == 2
