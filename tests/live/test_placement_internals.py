"""vLLM uses the GPUs that the container chooses. vLLM's own code shows this without any GPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.interface import EngineStartError
from handlers.model_config import ModelConfig
from tests.stand_ins.model_configs import LLAMA

GIBIBYTE = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM on a machine with eight GPUs."""
    import vllm.platforms
    from vllm.engine import arg_utils
    from vllm.platforms.interface import Platform
    from vllm.v1.engine import utils

    # Import the engine's modules before the platform is replaced, so that they do not keep the replacement in later
    # tests.
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


def settings(devices: tuple[int, ...] | None, **others: Any) -> ModelConfig:
    return ModelConfig(name="m", model_dir=Path("/m"), model_id="/m", devices=devices, **others)


def placed(devices: tuple[int, ...] | None, tensor: int, **arguments: Any) -> tuple[Any, list[Any]]:
    """Return the places, and vLLM's arguments after the container has chosen GPUs."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.copies.places import gpu_places

    given = AsyncEngineArgs(model="/m", tensor_parallel_size=tensor, **arguments)
    return given, gpu_places(given, settings(devices, tensor_parallel_degree=tensor))


def chosen(devices: tuple[int, ...] | None, tensor: int, **arguments: Any) -> Any:
    """Return vLLM's arguments after the container has chosen GPUs."""
    return placed(devices, tensor, **arguments)[0]


def places(devices: tuple[int, ...] | None, tensor: int, **arguments: Any) -> list[tuple[int, ...]]:
    """Return the GPUs of each place. An empty tuple stands for the GPUs that vLLM takes by default."""
    return [place.gpus for place in placed(devices, tensor, **arguments)[1]]


def test_vllm_takes_the_first_of_the_devices_as_many_as_it_needs(gpus: Any) -> None:
    assert chosen((6, 3, 1, 0, 2, 4, 5, 7), 2).device_ids == [3, 6]
    assert chosen((6, 3, 1, 0), 1, data_parallel_size=2, pipeline_parallel_size=2).device_ids == [0, 1, 3, 6]
    assert chosen((6, 3, 1, 0), 1, prefill_context_parallel_size=2).device_ids == [3, 6]
    assert chosen((6, 3, 1, 0), 4, pipeline_parallel_size=2, nnodes=2).device_ids == [0, 1, 3, 6]
    assert chosen(None, 2).device_ids == [0, 1]
    assert chosen((0, 1, 2, 3, 4, 5, 6, 7), 8).device_ids is None, "all there are, in their order"
    assert chosen((5, 6), 1, device_ids=[2]).device_ids == [2], "option.device_ids goes before"
    with pytest.raises(EngineStartError, match="needs 4 GPUs, and load_on_devices allows 2"):
        chosen((5, 6), 4)
    with pytest.raises(EngineStartError, match="load_on_devices is cpu, but this vLLM is built for GPUs"):
        chosen((), 1)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", [1, 2])
def test_all_gpus_are_shared_out_among_places(gpus: Any, count: int, tensor: int) -> None:
    gpus.count = count
    found = places(None, tensor)
    if count <= tensor:
        assert found == [()], "vLLM takes all, or says that they are too few"
    else:
        assert found == [tuple(range(first, first + tensor)) for first in range(0, count, tensor)]


def test_gpus_that_are_left_over_are_in_no_place(gpus: Any) -> None:
    gpus.count = 8
    assert places(None, 3) == [(0, 1, 2), (3, 4, 5)]
    assert places((7, 2, 5, 1, 0), 2) == [(2, 7), (1, 5)]
    assert places(None, 2, pipeline_parallel_size=2) == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"data_parallel_size": 2}, 2),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, 1),
        ({"enable_expert_parallel": True}, 1),
        ({"distributed_executor_backend": "ray"}, 1),
        ({"kv_transfer_config": "any"}, 1),
        ({"kv_events_config": "any"}, 1),
    ],
)
def test_a_model_that_shares_something_has_one_place(gpus: Any, arguments: dict[str, Any], count: int) -> None:
    assert places(None, 1, **arguments) == [()], "vLLM takes the first ones"
    assert places((7, 5, 3, 1), 1, **arguments) == [tuple(sorted((7, 5)[:count]))]


@pytest.mark.parametrize(("visible", "physical"), [(None, [(1, 3), (4, 6)]), ("9,8,7,6,5,4,3,2", [(8, 6), (5, 3)])])
def test_a_place_knows_its_gpus_as_the_machine_numbers_them(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, physical: list[tuple[int, ...]]
) -> None:
    from engines.vllm.copies.core_client import config_of_copy

    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given, found = placed((3, 1, 6, 4), 2)
    assert [place.physical_gpus for place in found] == physical
    assert given._resolve_device_ids() == list(physical[0]), "the first copy gets its GPUs by vLLM's argument"
    config = _configuration()
    for place in found:
        assert place.physical_gpus is not None
        own = config_of_copy(config, place.gpus, place.physical_gpus)
        assert own.parallel_config.assigned_physical_gpu_ids == list(place.physical_gpus)
        assert own.cache_config.num_gpu_blocks is None, "vLLM's client adds up what the processes report"
    assert (config.parallel_config.assigned_physical_gpu_ids, config.cache_config.num_gpu_blocks) == (None, 9)
    kept = config_of_copy(config_of_copy(config, (5,), (5,)), (), None)
    assert kept.parallel_config.assigned_physical_gpu_ids == [5]


def test_copies_are_bound_to_the_nodes_of_their_own_gpus() -> None:
    from engines.vllm.copies.core_client import config_of_copy

    config = _configuration(
        numa_bind=True, numa_bind_nodes=[0, 0, 1, 1], numa_bind_cpus=["0-3", "4-7", "8-11", "12-15"]
    )
    own = config_of_copy(config, (1, 2), (5, 6)).parallel_config
    assert (own.numa_bind_nodes, own.numa_bind_cpus) == ([0, 1], ["4-7", "8-11"])
    assert config.parallel_config.numa_bind_nodes == [0, 0, 1, 1]
    assert config_of_copy(_configuration(), (1,), (5,)).parallel_config.numa_bind_nodes is None


def test_copies_do_not_share_the_names_of_shared_memory() -> None:
    from vllm.config import KVTransferConfig

    from engines.vllm.copies.core_client import config_of_copy

    config = _configuration()
    config.kv_transfer_config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    configs = [config, *(config_of_copy(config, (gpu,), (gpu,)) for gpu in (1, 2))]
    assert len({own.instance_id for own in configs}) == 3
    assert len({own.kv_transfer_config.engine_id for own in configs}) == 3
    assert {own.kv_transfer_config.kv_connector for own in configs} == {"OffloadingConnector"}


def _configuration(**parallel: Any) -> Any:
    from vllm.config import ParallelConfig

    return SimpleNamespace(
        parallel_config=ParallelConfig(**parallel),
        cache_config=SimpleNamespace(num_gpu_blocks=9),
        kv_transfer_config=None,
        instance_id="first",
    )


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """A machine with two NUMA nodes, three cores in each node, and two processors in each core.

    This process may use all of them.

    The processors have numbers as on many Linux machines: 0 to 5 are the first processors of the six cores, and 6 to 11
    are the second processors of these cores. Returns the node and the core of each processor.
    """
    from vllm.utils import cpu_resource_utils
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

    of = {number: (number % 6 // 3, number % 6) for number in range(12)}
    listed = [LogicalCPUInfo(id=number, physical_core=core, numa_node=node) for number, (node, core) in of.items()]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: listed)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    return of


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 6, 12])
def test_the_processors_are_shared_out_among_places(two_nodes: dict[int, tuple[int, int]], copies: int) -> None:
    from engines.vllm.copies.places import processor_places

    found = [place.processors for place in processor_places(copies)]
    assert len(found) == copies
    assert sorted(one for place in found for one in place) == sorted(two_nodes), "each is in one place"
    sizes = sorted(map(len, found))
    assert sizes[-1] - sizes[0] <= 1
    if 6 % copies == 0:  # whole cores
        for place in found:
            assert len({two_nodes[one] for one in place}) * 2 == len(place), "the two of a core are together"
    if copies in (2, 6):
        assert all(len({two_nodes[one][0] for one in place}) == 1 for place in found), "no place is on two nodes"


@pytest.mark.parametrize("copy", [0, 1])
def test_vllm_binds_the_threads_of_a_copy_to_processors_of_its_share(
    two_nodes: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, copy: int
) -> None:
    """By itself, vLLM takes the processors of the first node that it sees.

    The second copy's share is on the second node.
    """
    from vllm.utils import cpu_resource_utils
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    from engines.vllm.copies.places import processor_places
    from engines.vllm.patches.processes import use_processors

    share = processor_places(2)[copy].processors
    monkeypatch.setattr(cpu_resource_utils, "get_memory_affinity", lambda: [0, 1])
    monkeypatch.setenv("CPU_VISIBLE_MEMORY_NODES", "")
    use_processors(share)
    parallel = SimpleNamespace(local_world_size=1, data_parallel_rank_local=None, _api_process_count=1)
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    (processors,) = OMPProcessManager(config).cpu_lists
    assert processors
    assert set(processors) <= set(share)


def test_one_copy_and_threads_that_the_user_has_bound_have_all_processors(
    two_nodes: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.vllm.copies.places import Place, processor_places

    assert processor_places(1) == [Place()]
    assert {len(place.processors) for place in processor_places(13)} == {1}, "copies share one if there are too few"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-5|6-11")
    assert processor_places(2) == [Place(), Place()]


@pytest.mark.parametrize(("visible", "physical"), [(None, [1, 3, 4, 6]), ("9,8,7,6,5,4,3,2", [8, 6, 5, 3])])
def test_each_replica_runs_on_its_part_of_the_devices(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, physical: list[int]
) -> None:
    """Two replicas have four GPUs. Two GPUs share the layers of a replica, so replica 1 has the last two GPUs.

    vLLM's workers resolve the ids.
    """
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

    from engines.vllm.copies.places import gpu_places

    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100 * GIBIBYTE)  # the file takes no space on the disk
    for devices, most, ids in (((5, 4, 3, 2), False, [4, 5]), ((5, 4, 3, 2), True, [2, 3, 4, 5]), ((5,), False, [5])):
        given = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
        gpu_places(given, settings(devices, tensor_parallel_max=most))
        assert given.device_ids == ids
