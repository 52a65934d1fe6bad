"""The plan of a machine's GPUs: what the models take, what stays idle, and the settings that use it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.models import placement
from container.models.placement import GpuPlan, gpu_plan
from container.settings.settings import ServerSettings, Settings
from engines.model_settings import HandlerSettings, ModelSettings
from tests.stand_ins.model_configs import LLAMA

GIB = 1 << 30
DEGREE, REPLICAS = "option.tensor_parallel_degree", "option.data_parallel_size"


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """Make a model with 100 GiB of weights, which take no room on the disk."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * GIB)
    return tmp_path


def settings(model: Path | str, name: str = "m", **fields: Any) -> Settings:
    loaded = ModelSettings(name=name, model_dir=Path("/m"), model_id=str(model), **fields)
    return Settings(server=ServerSettings(), model=loaded)


def plan(model: Settings, count: int = 8, gibibytes: int = 80) -> tuple[int | None, int | None, dict[str, int]]:
    """The GPUs that are taken and those that stay idle, and the settings that use these."""
    found = gpu_plan([model], [gibibytes * GIB] * count)
    (use,) = found.models
    assert bool(found.idle) == bool(found.warning)
    return use.gpus, found.idle, use.remedies(found.idle or 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 6, {REPLICAS: 4, DEGREE: 8})),
        ({"tensor_parallel_degree": 4}, (4, 4, {REPLICAS: 2, DEGREE: 8})),
        ({"tensor_parallel_max": True}, (8, 0, {})),
        ({"pipeline_parallel_degree": 2}, (2, 6, {REPLICAS: 4, DEGREE: 4})),
        ({"pipeline_parallel_degree": 3}, (3, 5, {REPLICAS: 2, DEGREE: 2})),
        ({"engine_arguments": {"data_parallel_size": "2"}}, (4, 4, {REPLICAS: 4, DEGREE: 4})),
        ({"engine_arguments": {"data_parallel_size": "4"}}, (8, 0, {})),
        ({"engine_arguments": {"max_model_len": "200k"}}, (4, 4, {REPLICAS: 2, DEGREE: 8})),
        ({"engine_arguments": {"max_model_len": "auto"}}, (2, 6, {REPLICAS: 4, DEGREE: 8})),
        ({"tensor_parallel_degree": 1}, (1, 7, {DEGREE: 8})),  # the weights do not fit, and so no copy would
        ({"tensor_parallel_degree": 2, "devices": (0, 1, 5)}, (2, 6, {})),
        ({"tensor_parallel_degree": 2, "devices": (0, 1, 5, 6)}, (2, 6, {REPLICAS: 2, DEGREE: 4})),
        (
            {"engine_arguments": {"max_model_len": "-1", "gpu_memory_utilization": "0.5"}},
            (4, 4, {REPLICAS: 2, DEGREE: 8}),
        ),
    ],
)
def test_the_settings_that_use_idle_gpus_fit_the_machine(
    large_model: Path, fields: dict[str, Any], expected: tuple[int, int, dict[str, int]]
) -> None:
    assert plan(settings(large_model, **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"devices": ()}, 0),
        ({"rolling_batch": "disable"}, 1),
        ({"rolling_batch": "disable", "engine_arguments": {"device_map": "auto"}}, 8),
        ({"engine_arguments": {"device_ids": "1"}}, None),
        ({"engine_arguments": {"nnodes": "2"}}, None),
        ({"handler": HandlerSettings(entry_point="model.py", devices=("0,1", "2,3"))}, 4),
    ],
)
def test_what_copies_cannot_serve_has_no_advice(large_model: Path, fields: dict[str, Any], taken: int | None) -> None:
    assert plan(settings(large_model, **fields)) == (taken, None if taken is None else 8 - taken, {})


def test_several_models_share_a_machine(large_model: Path) -> None:
    models = [settings(large_model, "a"), settings(large_model, "b", tensor_parallel_degree=4)]
    found = gpu_plan(models, [80 * GIB] * 8)
    assert ([use.gpus for use in found.models], found.idle) == ([2, 4], 2)
    assert [use.remedies(2) for use in found.models] == [{REPLICAS: 2, DEGREE: 4}, {}]
    assert f"{REPLICAS}=2 of model a" in found.warning
    assert gpu_plan(models, [80 * GIB] * 4).idle == 0


def test_too_few_gpus_are_told(large_model: Path) -> None:
    found = gpu_plan([settings(large_model, tensor_parallel_degree=4)], [80 * GIB] * 2)
    assert (found.models[0].gpus, found.idle) == (4, 0)
    assert "needs 4 GPUs; the machine has 2" in found.warning


def test_what_is_not_known_is_not_told(large_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(settings(large_model), gibibytes=0) == (None, None, {})
    assert plan(settings(large_model, tensor_parallel_degree=2), gibibytes=0) == (2, 6, {REPLICAS: 4, DEGREE: 8})
    monkeypatch.setattr(placement, "hub_file", lambda *_: None)
    assert plan(settings("org/name")) == (None, None, {})
    assert plan(settings("org/name", tensor_parallel_degree=2)) == (2, 6, {REPLICAS: 4})
    (large_model / "config.json").write_text('{"model_type": "gemma3"}')  # transformers fills in the rest
    assert plan(settings(large_model)) == (None, None, {})


@pytest.mark.parametrize(
    "config", ['{"hidden_size": "4k"}', '{"text_config": {"head_dim": "x"}}', "[]", "[" * 9999, "no"]
)
def test_a_config_may_have_anything(large_model: Path, config: str) -> None:
    (large_model / "config.json").write_text(config)
    assert plan(settings(large_model)) == (None, None, {})
    (large_model / "config.json").write_text(json.dumps(LLAMA | {"sliding_window": [1], "head_dim": "x"}))
    assert plan(settings(large_model)) == (None, None, {})


def test_weights_on_s3_count_before_they_are_fetched(large_model: Path) -> None:
    (large_model / "model.safetensors").unlink()
    remote = SimpleNamespace(total_bytes=100 * GIB)
    assert plan(replace(settings(large_model), remote_models=(remote,))) == (2, 6, {REPLICAS: 4, DEGREE: 8})


def test_a_model_of_the_hub_is_looked_up(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub_file(*names: str | None) -> Path:
        asked.append(names)
        return large_model / "config.json"

    monkeypatch.setattr(placement, "hub_file", hub_file)
    assert plan(settings("org/name", revision="v1")) == (2, 6, {REPLICAS: 4, DEGREE: 8})
    assert asked == [("org/name", "config.json", "v1")]


def test_without_gpus_nothing_is_looked_up() -> None:
    assert gpu_plan([settings("org/name")], ()) == GpuPlan(())


@given(st.integers(1, 16), st.sampled_from([0, 1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 4))
def test_an_advice_never_needs_more_than_the_machine_has(count: int, degree: int, stages: int, replicas: int) -> None:
    model = settings(
        "/none",
        tensor_parallel_degree=degree or None,
        pipeline_parallel_degree=stages,
        engine_arguments={"data_parallel_size": str(replicas)},
    )
    (use,) = gpu_plan([model], [24 * GIB] * count).models
    found = use.remedies(max(count - (use.gpus or 0), 0))
    for setting, number in found.items():
        size, copies = (number, replicas) if setting == DEGREE else (degree or 1, number)
        assert (use.gpus or 0) < size * stages * copies <= count
