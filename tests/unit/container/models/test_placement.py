"""The plan of a machine's GPUs: what the models take, what stays idle, and the settings that use it."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from hypothesis import given
from hypothesis import strategies as st

from container.models import placement
from container.models.placement import GpuPlan, GpuUse, gpu_plan, hub_asked_once
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from handlers.custom.settings import HandlerConfig
from handlers.model_config import ModelConfig
from tests.stand_ins.model_configs import LLAMA

GIB = 1 << 30
DEGREE, REPLICAS, COPIES = "option.tensor_parallel_degree", "option.data_parallel_size", "maxWorkers"
FITTING = None  # As many copies as the GPUs hold.


@pytest.fixture
def large_model(tmp_path: Path) -> Path:
    """Make a model with 100 GiB of weights, which take no room on the disk."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * GIB)
    return tmp_path


def settings(model: Path | str, name: str = "m", **fields: Any) -> Settings:
    loaded = ModelConfig(name=name, model_dir=Path("/m"), model_id=str(model), **fields)
    return Settings(server_config=ServerConfig(), config=loaded)


def plan(settings: Settings, count: int = 8, gibibytes: int = 80) -> tuple[int | None, int | None, dict[str, int]]:
    """Return the numbers of used and of idle GPUs, and the settings that would use the idle GPUs."""
    found = gpu_plan([settings], [gibibytes * GIB] * count)
    (use,) = found.models
    assert bool(found.idle) == bool(found.warning)
    return use.gpus, found.idle, use.remedies(found.idle or 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 6, {COPIES: 4, DEGREE: 8})),
        ({"max_copies": FITTING}, (8, 0, {})),
        ({"max_copies": 3}, (6, 2, {COPIES: 4, DEGREE: 4})),
        ({"max_copies": 4}, (8, 0, {})),
        ({"max_copies": FITTING, "devices": (0, 1, 5)}, (2, 6, {})),  # two GPUs hold the weights, and one is left
        ({"max_copies": FITTING, "pipeline_parallel_degree": 3}, (6, 2, {})),
        ({"tensor_parallel_degree": 4}, (4, 4, {COPIES: 2, DEGREE: 8})),
        ({"tensor_parallel_degree": 4, "max_copies": FITTING, "devices": (0, 1, 2, 3, 4, 5)}, (4, 4, {DEGREE: 2})),
        ({"tensor_parallel_max": True}, (8, 0, {})),
        ({"pipeline_parallel_degree": 2}, (2, 6, {COPIES: 4, DEGREE: 4})),
        ({"pipeline_parallel_degree": 3}, (3, 5, {COPIES: 2, DEGREE: 2})),
        ({"engine_arguments": {"data_parallel_size": "2"}}, (4, 4, {REPLICAS: 4, DEGREE: 4})),
        ({"engine_arguments": {"data_parallel_size": "4"}}, (8, 0, {})),
        ({"engine_arguments": {"kv_transfer_config": "{}"}}, (2, 6, {REPLICAS: 4, DEGREE: 8})),
        ({"engine_arguments": {"max_model_len": "200k"}}, (4, 4, {COPIES: 2, DEGREE: 8})),
        ({"engine_arguments": {"max_model_len": "auto"}}, (2, 6, {COPIES: 4, DEGREE: 8})),
        ({"tensor_parallel_degree": 1}, (1, 7, {DEGREE: 8})),  # one GPU is too small for any copy
        ({"tensor_parallel_degree": 2, "devices": (0, 1, 5)}, (2, 6, {})),
        ({"tensor_parallel_degree": 2, "devices": (0, 1, 5, 6)}, (2, 6, {COPIES: 2, DEGREE: 4})),
        ({"engine_arguments": {"max_model_len": "-1", "gpu_memory_utilization": ".5"}}, (4, 4, {COPIES: 2, DEGREE: 8})),
        # There is no advice for a model that cannot have copies.
        ({"devices": ()}, (0, 8, {})),
        ({"rolling_batch": "disable"}, (1, 7, {})),
        ({"rolling_batch": "disable", "engine_arguments": {"device_map": "auto"}}, (8, 0, {})),
        ({"engine_arguments": {"device_ids": "1"}}, (None, None, {})),
        ({"engine_arguments": {"nnodes": "2"}}, (None, None, {})),
        ({"handler": HandlerConfig(entry_point="model.py", devices=("0,1", "2,3"))}, (4, 4, {})),
    ],
)
def test_the_settings_that_use_idle_gpus_fit_the_machine(
    large_model: Path, fields: dict[str, Any], expected: tuple[int | None, int | None, dict[str, int]]
) -> None:
    assert plan(settings(large_model, **fields)) == expected


def test_several_models_share_a_machine(large_model: Path) -> None:
    models = [settings(large_model, "a"), settings(large_model, "b", tensor_parallel_degree=4)]
    found = gpu_plan(models, [80 * GIB] * 8)
    assert ([use.gpus for use in found.models], found.idle) == ([2, 4], 2)
    assert [use.remedies(2) for use in found.models] == [{COPIES: 2, DEGREE: 4}, {}]
    assert f"{COPIES}=2 of model a" in found.warning
    assert gpu_plan(models, [80 * GIB] * 4).idle == 0


def test_too_few_gpus_are_told(large_model: Path) -> None:
    found = gpu_plan([settings(large_model, tensor_parallel_degree=4)], [80 * GIB] * 2)
    assert (found.models[0].gpus, found.idle) == (4, 0)
    assert "needs 4 GPUs, and has 2" in found.warning
    alone = gpu_plan([settings(large_model, tensor_parallel_degree=4, devices=(1, 2))], [80 * GIB] * 8)
    assert "needs 4 GPUs, and has 2" in alone.warning


@pytest.mark.parametrize(
    ("fields", "copies", "told"),
    [
        ({"max_copies": 4}, 4, ""),
        ({"max_copies": 5}, 4, "maxWorkers asks for 5 copies, and 4 fit"),
        ({"max_copies": None, "min_copies": 5}, 4, "minWorkers asks for 5 copies, and 4 fit"),
        ({"max_copies": 2, "devices": (3, 4)}, 1, "maxWorkers asks for 2 copies, and 1 fit"),
    ],
)
def test_fewer_copies_than_are_asked_for_are_told(
    large_model: Path, fields: dict[str, Any], copies: int, told: str
) -> None:
    found = gpu_plan([settings(large_model, **fields)], [80 * GIB] * 8)
    assert found.models[0].copies == copies
    assert told in found.warning
    assert bool(told) == ("asks for" in found.warning)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Each GPU has 73.6 GiB, minus 3.2 GiB and 50 GiB of weights. A token takes 160 KiB on each of two GPUs.
        ({}, (1, 2, 134_000)),
        ({"max_copies": FITTING}, (4, 2, 134_000)),
        ({"tensor_parallel_max": True}, (1, 8, 1_520_000)),
        ({"engine_arguments": {"kv_cache_dtype": "fp8"}}, (1, 2, 267_000)),
        ({"engine_arguments": {"max_model_len": "100"}}, (1, 2, 134_000)),
        ({"engine_arguments": {"max_model_len": "auto"}}, (1, 2, 134_000)),
        ({"engine_arguments": {"kv_cache_memory_bytes": str(160 << 20)}}, (1, 2, 1020)),
        ({"engine_arguments": {"data_parallel_size": "2"}}, (1, 4, 267_000)),
        ({"tensor_parallel_degree": 1}, (1, 1, 0)),
        ({"rolling_batch": "disable"}, (1, 1, None)),
        ({"engine_arguments": {"nnodes": "2"}}, (None, None, None)),
    ],
)
def test_the_plan_has_the_gpus_and_the_cache_of_each_copy(
    large_model: Path, fields: dict[str, Any], expected: tuple[int | None, int | None, int | None]
) -> None:
    found = gpu_plan([settings(large_model, **fields)], [80 * GIB] * 8)
    (use,) = found.models
    assert (use.copies, use.gpus_of_copy, use.cache_tokens) == expected
    if use.cache_tokens:
        assert f"about {use.cache_tokens:,} tokens" in found.lines[-1]


def test_layers_with_a_window_take_less_of_the_cache(large_model: Path) -> None:
    (large_model / "config.json").write_text(json.dumps(LLAMA | {"sliding_window": 1024, "sliding_window_pattern": 2}))
    (use,) = gpu_plan([settings(large_model)], [80 * GIB] * 8).models
    assert use.cache_tokens == 238_000  # every second layer keeps only an eighth of a sequence


def test_what_is_not_known_is_not_told(large_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(settings(large_model), gibibytes=0) == (None, None, {})
    assert plan(settings(large_model, tensor_parallel_degree=2), gibibytes=0) == (2, 6, {COPIES: 4, DEGREE: 8})
    (use,) = gpu_plan([settings(large_model, tensor_parallel_degree=2, max_copies=FITTING)], [0] * 8).models
    assert (use.copies, use.cache_tokens) == (4, None)
    monkeypatch.setattr(placement, "hub_file", lambda *_: None)
    assert plan(settings("org/name")) == (None, None, {})
    assert plan(settings("org/name", tensor_parallel_degree=2)) == (2, 6, {COPIES: 4})
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
    assert plan(replace(settings(large_model), remote_models=(remote,))) == (2, 6, {COPIES: 4, DEGREE: 8})


def test_a_model_of_the_hub_is_looked_up(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_file = Mock(return_value=large_model / "config.json")
    monkeypatch.setattr(placement, "hub_file", hub_file)
    assert plan(settings("org/name", revision="v1")) == (2, 6, {COPIES: 4, DEGREE: 8})
    hub_file.assert_called_once_with("org/name", "config.json", "v1")


def test_a_hub_that_does_not_answer_is_asked_once(large_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with hub_asked_once([settings("org/name"), settings(large_model)]) as note:
        assert "org/name" in note
        assert str(port) in note
        assert str(large_model) not in note
        assert constants.HF_HUB_OFFLINE
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get(constants.ENDPOINT)
    assert not constants.HF_HUB_OFFLINE
    with hub_asked_once([settings(large_model)]) as note:
        assert (note, constants.HF_HUB_OFFLINE) == ("", False)


@pytest.mark.parametrize(("status", "offline"), [(503, True), (401, False), (200, False)])
def test_a_hub_that_answers_is_looked_at(status: int, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with hub_asked_once([settings("org/name")]) as note:
            assert (bool(note), constants.HF_HUB_OFFLINE, len(asked)) == (offline, offline, 1)


def test_without_gpus_nothing_is_looked_up() -> None:
    assert gpu_plan([settings("org/name")], ()) == GpuPlan(())


@given(
    st.integers(1, 16),
    st.sampled_from([0, 1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([FITTING, 1, 2, 5]),
)
def test_a_plan_and_its_advice_never_need_more_than_the_machine_has(
    count: int, degree: int, stages: int, replicas: int, most: int | None
) -> None:
    def planned(**fields: Any) -> GpuUse:
        given = {
            "tensor_parallel_degree": degree or None,
            "pipeline_parallel_degree": stages,
            "engine_arguments": {"data_parallel_size": str(replicas)},
            "max_copies": 1 if replicas > 1 else most,
        }
        (use,) = gpu_plan([settings("/none", **given | fields)], [24 * GIB] * count).models
        return use

    use = planned()
    if not use.gpus or not use.copies:
        return
    assert use.gpus <= count or use.copies == 1
    assert use.copies <= (most or count)
    for setting, number in use.remedies(max(count - use.gpus, 0)).items():
        with_advice = planned(
            **{
                DEGREE: {"tensor_parallel_degree": number},
                COPIES: {"max_copies": number},
                REPLICAS: {"engine_arguments": {"data_parallel_size": str(number)}},
            }[setting]
        )
        assert with_advice.gpus is not None
        assert use.gpus < with_advice.gpus <= count
