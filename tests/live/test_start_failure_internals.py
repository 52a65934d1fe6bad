"""The errors that vLLM raises if memory is too small, and the reports of its processes. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engines.start_failure import failure_of
from engines.vllm.internals import module_of

_MEBIBYTE = 1 << 20


def no_cache() -> None:
    module_of("_check_enough_kv_cache_memory")._check_enough_kv_cache_memory(0, lambda: 1, 1024, lambda _: 0)


def small_cache() -> None:
    planning = module_of("_check_enough_kv_cache_memory")
    planning._check_enough_kv_cache_memory(_MEBIBYTE, lambda: 2 * _MEBIBYTE, 1024, lambda _: 512)


def taken_gpu(external: int = 0) -> None:
    from vllm.v1.worker.utils import request_memory

    snapshot: Any = SimpleNamespace(device_="cuda:0", total_memory=80 << 30, free_memory=8 << 30)
    config: Any = SimpleNamespace(gpu_memory_utilization=0.9)
    request_memory(snapshot, config, external)


def taken_host() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker: Any = SimpleNamespace(
        _should_warm_up_model=lambda: False, cache_config=SimpleNamespace(kv_cache_memory_bytes=1 << 60)
    )
    CPUWorker.determine_available_memory(worker)


@pytest.mark.parametrize(
    "shortage",
    [no_cache, small_cache, taken_gpu, lambda: taken_gpu(1 << 30), lambda: taken_gpu(1 << 40), taken_host],
)
def test_what_vllm_raises_where_memory_is_short_is_known(shortage: Any) -> None:
    with pytest.raises(ValueError) as refused:
        shortage()
    assert failure_of(refused.value).out_of_memory, str(refused.value)


@pytest.mark.parametrize(("shortage", "length"), [(no_cache, ""), (small_cache, "512")])
def test_vllms_advice_is_given_by_the_names_of_options(shortage: Any, length: str) -> None:
    with pytest.raises(ValueError) as refused:
        shortage()
    reason = failure_of(refused.value).reason
    assert ("Set option.max_model_len to 512 or less" in reason) == bool(length)
    assert "option.gpu_memory_utilization" in reason
    assert "`" not in reason, "a flag of vLLM's"
    assert "http" not in reason


def test_a_worker_that_cannot_start_tells_why_though_vllm_keeps_it_to_its_log(monkeypatch: Any) -> None:
    import torch
    from vllm.utils import cpu_resource_utils
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.sample import sampler

    from engines.vllm.processes import contexts as processes

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(WorkerProc, "__init__", failing)
    # `prepare_worker` replaces these two functions. `monkeypatch` puts vLLM's own functions back after the test.
    monkeypatch.setattr(cpu_resource_utils, "get_cgroup_memory_usage", lambda: None)
    monkeypatch.setattr(sampler, "batched_count_greater_than", lambda *_: None)
    with processes.tied_to_this_thread() as reports:
        assert processes.first_failure(reports) is None
        processes.prepare_worker(processes._this_thread.report)
        with pytest.raises(torch.OutOfMemoryError):
            WorkerProc()
        failure = processes.first_failure(reports)
    assert failure is not None
    assert failure.out_of_memory
    assert failure.reason == "CUDA out of memory. Tried to allocate 2.00 GiB."
    with pytest.raises(torch.OutOfMemoryError):
        WorkerProc()  # nobody reads the reports in this test
