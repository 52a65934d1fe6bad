"""Slipway reads the same figures for a CPU's memory as vLLM's worker, and understands vLLM's refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.daemon_thread import LastingThreads
from engines.interface import EngineOutOfMemory
from engines.memory.cpu_memory import Demand, Limit, memory_limits, smaller_size
from handlers.model_config import ModelConfig
from tests.live.test_start_failure_internals import taken_host


@pytest.fixture
def resources() -> Any:
    """Return vLLM's own module. Its import warns about things that do not matter here."""
    from vllm.utils import cpu_resource_utils

    return cpu_resource_utils


def test_a_node_has_what_vllm_says_it_has(resources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "get_cgroup_memory_limit", lambda: None)
    nodes = [limit for limit in memory_limits(64) if limit.name.startswith("NUMA")]
    if not nodes:
        pytest.skip("needs a machine with NUMA nodes")
    theirs = [resources.get_memory_node_info(node) for node in resources.get_visible_memory_node()]
    # Other programs use memory at the same time, and a virtual machine may get more memory.
    total = nodes[0].total
    assert abs(sum(node.total_memory for node in theirs) - total) <= total / 4
    assert abs(sum(node.available_memory for node in theirs) - nodes[0].available) <= total / 4


def test_what_vllm_refuses_names_a_figure_that_a_second_try_is_below(resources: Any) -> None:
    with pytest.raises(ValueError) as refused:
        taken_host()
    size = smaller_size(Demand("m", 0, 0), str(refused.value))
    assert size is not None
    assert 0 < size < resources.get_memory_node_info(0).total_memory


def test_vllm_looks_for_the_function_that_a_worker_of_ours_replaces(
    resources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's memory is full of files, such as weights that were just read."""
    from engines.vllm.patches import processes
    from engines.vllm.processes import cpu

    memory = resources.get_memory_node_info(0).total_memory
    monkeypatch.setattr(resources, "get_cgroup_memory_limit", lambda: memory // 4)
    monkeypatch.setattr(processes, "cgroup_usage", lambda: memory // 4)
    monkeypatch.setattr(cpu, "page_cache", lambda _: memory // 8)
    monkeypatch.setattr(resources, "get_cgroup_memory_usage", lambda: memory // 4)
    assert resources.get_memory_node_info(0).available_memory == 0
    monkeypatch.setattr(resources, "get_cgroup_memory_usage", cpu.usage_without_page_cache)
    assert resources.get_memory_node_info(0).available_memory > 0


def test_what_a_model_will_need_is_read_from_its_files(sample_model: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from engines.vllm.arguments.from_settings import engine_arguments
    from engines.vllm.loading import cache_demand

    arguments = {"max_model_len": "1000"}
    config = ModelConfig(name="m", model_dir=sample_model, model_id=str(sample_model), engine_arguments=arguments)
    vllm_config = AsyncEngineArgs(**engine_arguments(config, on_cpu=True)).create_engine_config()
    demand = cache_demand(vllm_config, 1)
    assert demand.sequence == 1000 * 30 * 3 * 64 * 2 * 2
    assert demand.weights == (sample_model / "model.safetensors").stat().st_size
    assert demand.workers == 1
    assert cache_demand(vllm_config, 3).workers == 3, "each copy has a worker"


def test_a_machine_that_is_too_small_is_told_before_vllm_starts_a_process(sample_model: Path, monkeypatch: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from engines.vllm import loading as vllm_loading

    def nothing_starts(*_: Any) -> None:
        raise AssertionError("vLLM was started")

    config = ModelConfig(name="m", model_dir=sample_model, model_id=str(sample_model))
    monkeypatch.setattr(vllm_loading, "memory_limits", lambda *_: [Limit("NUMA node0", 1 << 30, 2 << 30)])
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", nothing_starts)
    thread = LastingThreads("loading")
    try:
        with pytest.raises(
            EngineOutOfMemory, match=r"too little memory for .* and NUMA node0 has 1\.00 GiB of 2\.00 GiB"
        ):
            asyncio.run(vllm_loading.VllmLoader(config, thread).load())
    finally:
        thread.end()
