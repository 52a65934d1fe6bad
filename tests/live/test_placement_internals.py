"""vLLM takes the GPUs that the container has chosen. vLLM's own arithmetic shows this without any GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.interface import EngineStartError
from engines.model_settings import ModelSettings
from tests.stand_ins.model_configs import LLAMA

GIBIBYTE = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM on a machine with eight GPUs."""
    import vllm.platforms
    from vllm.engine import arg_utils
    from vllm.platforms.interface import Platform
    from vllm.v1.engine import utils

    # Import the engine's modules first, so that they do not keep the platform below for later tests.
    import engines.vllm.engine  # noqa: F401

    class EightGpus(Platform):
        device_name = device_type = "cuda"
        device_control_env_var = "CUDA_VISIBLE_DEVICES"
        count = 8

        @classmethod
        def device_count(cls) -> int:
            return cls.count

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * GIBIBYTE

    for module in (vllm.platforms, arg_utils, utils):
        monkeypatch.setattr(module, "current_platform", EightGpus, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return EightGpus


def settings(devices: tuple[int, ...] | None, **others: Any) -> ModelSettings:
    return ModelSettings(name="m", model_dir=Path("/m"), model_id="/m", devices=devices, **others)


def chosen(devices: tuple[int, ...] | None, tensor: int, **arguments: Any) -> Any:
    """Engine arguments after the choice."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.loading import choose_devices

    given = AsyncEngineArgs(model="/m", tensor_parallel_size=tensor, **arguments)
    choose_devices(given, settings(devices, tensor_parallel_degree=tensor))
    return given


def test_vllm_takes_the_first_of_the_devices_as_many_as_it_needs(gpus: Any) -> None:
    assert chosen((6, 3, 1, 0, 2, 4, 5, 7), 2).device_ids == [3, 6]
    assert chosen((6, 3, 1, 0), 1, data_parallel_size=2, pipeline_parallel_size=2).device_ids == [0, 1, 3, 6]
    assert chosen((6, 3, 1, 0), 1, prefill_context_parallel_size=2).device_ids == [3, 6]
    assert chosen((6, 3, 1, 0), 4, pipeline_parallel_size=2, nnodes=2).device_ids == [0, 1, 3, 6]
    assert chosen(None, 2).device_ids is None
    assert chosen((0, 1, 2, 3, 4, 5, 6, 7), 8).device_ids is None, "all there are, in their order"
    assert chosen((5, 6), 1, device_ids=[2]).device_ids == [2], "option.device_ids goes before"
    with pytest.raises(EngineStartError, match="needs 4 GPUs, and load_on_devices allows 2"):
        chosen((5, 6), 4)
    with pytest.raises(EngineStartError, match="load_on_devices is cpu, but this vLLM is built for GPUs"):
        chosen((), 1)


@pytest.mark.parametrize(("visible", "physical"), [(None, [1, 3, 4, 6]), ("9,8,7,6,5,4,3,2", [8, 6, 5, 3])])
def test_each_replica_runs_on_its_part_of_the_devices(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, physical: list[int]
) -> None:
    """Replica 1 of two has the last two of four GPUs if two GPUs share its layers. vLLM's workers resolve the ids."""
    from vllm.platforms import interface

    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ids = chosen((6, 3, 1, 4, 0), 2, data_parallel_size=2)._resolve_device_ids()
    assert ids == physical
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", ids)
    local_ranks = [replica * 2 + rank for replica in range(2) for rank in range(2)]
    assert [gpus.logical_device_id_to_visible_device_id(rank) for rank in local_ranks] == [1, 3, 4, 6]


def test_without_a_number_the_allowed_gpus_are_counted(gpus: Any, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.loading import choose_devices

    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * GIBIBYTE)  # takes no room on the disk
    for devices, most, ids in (((5, 4, 3, 2), False, [4, 5]), ((5, 4, 3, 2), True, [2, 3, 4, 5]), ((5,), False, [5])):
        given = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
        choose_devices(given, settings(devices, tensor_parallel_max=most))
        assert given.device_ids == ids


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"pipeline_parallel_size": 2}, 4),
        ({"pipeline_parallel_size": 2, "nnodes": 2}, 8),
        ({"prefill_context_parallel_size": 2}, 4),
        ({"data_parallel_size": 4}, 2),
    ],
)
def test_all_gpus_are_shared_out_and_vllm_counts_as_many(
    gpus: Any, tmp_path: Path, arguments: dict[str, int], size: int
) -> None:
    """With `tensor_parallel_degree=max`, by vLLM's own ParallelConfig."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.loading import choose_devices

    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True, **arguments)
    choose_devices(given, settings(None, tensor_parallel_max=True))
    assert given.tensor_parallel_size == size
    parallel = ParallelConfig(tensor_parallel_size=size, distributed_executor_backend="mp", **arguments)
    assert parallel.world_size_across_dp == 8 * arguments.get("nnodes", 1)
