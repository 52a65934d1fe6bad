"""The workers that run in Ray or on another machine: how the engine process names them, and how the server learns their
names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


def executor(**parallel: Any) -> Any:
    from vllm.config import ParallelConfig

    config = ParallelConfig(distributed_executor_backend="mp", **parallel)
    return SimpleNamespace(uses_ray=False, parallel_config=config)


def named(executor: Any) -> str:
    from engines.vllm.processes.elsewhere import workers_elsewhere

    return workers_elsewhere(executor)


def test_workers_of_other_machines_are_named_with_their_machine() -> None:
    assert named(executor(tensor_parallel_size=4)) == "", "all are on this machine"
    several = executor(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes=3, node_rank=0)
    others = "workers 2, 3 on the machine with node_rank 1; workers 4, 5 on the machine with node_rank 2"
    assert named(several) == others
    many = executor(tensor_parallel_size=256, nnodes=256, node_rank=0)
    assert len(named(many)) < 4096 - 100, "it fits into a pipe that nobody reads"


@pytest.fixture
def ray() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_workers_of_ray_are_named_with_their_node_and_its_address(ray: Any) -> None:
    from vllm.v1.executor.ray_executor_v2 import RayWorkerHandle

    (node,) = ray.nodes()
    nodes = [node["NodeID"], node["NodeID"], "gone"]
    handles = [RayWorkerHandle(actor=None, rank=n, local_rank=n, node_id=each) for n, each in enumerate(nodes)]
    place = f"in Ray on {node['NodeManagerAddress']} (node {node['NodeID']})"
    newer: Any = SimpleNamespace(uses_ray=True, ray_worker_handles=handles)
    older: Any = SimpleNamespace(uses_ray=True, parallel_config=SimpleNamespace(world_size=2))
    assert named(newer) == f"workers 0, 1 {place}; worker 2 in Ray on an unknown address (node gone)"
    assert named(older) == "workers 0, 1 in Ray"


@pytest.mark.parametrize("broken", [False, True], ids=["", "cannot be known"])
def test_the_server_learns_them_from_the_engine_process(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    from vllm.v1.executor.abstract import Executor

    from engines.vllm.patches import grammars, processes
    from engines.vllm.processes import contexts

    def start(self: Any, vllm_config: Any) -> None:
        self.parallel_config = vllm_config if not broken else None

    class Started(Executor):
        """An executor of an engine process, without processes."""

        def _init_executor(self) -> None: ...

        def collective_rpc(self, *_: Any, **__: Any) -> Any: ...

        def check_health(self) -> None: ...

    for name in ("patch_engine_process", "patch_waiting"):
        monkeypatch.setattr(processes, name, lambda *_: None)
    monkeypatch.setattr(grammars, "patch_grammars", lambda _: None)
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(Executor, "__init__", start)
    with contexts.tied_to_this_thread() as reports:
        contexts.prepare_engine(contexts._this_thread.report)
        config: Any = executor(tensor_parallel_size=2, nnodes=2, node_rank=0).parallel_config
        Started(config)
        assert contexts.told_elsewhere(reports) == (() if broken else ("worker 1 on the machine with node_rank 1",))
        Started(config)
        assert contexts.first_failure(reports) is None, "it is no failure"


def test_data_parallel_engines_elsewhere_are_counted() -> None:
    from engines.vllm.copies.core_client import engines_elsewhere

    parallel = SimpleNamespace(data_parallel_size=4, local_engines_only=False)
    manager = SimpleNamespace(processes=[SimpleNamespace(pid=1)])
    client: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel), resources=SimpleNamespace(engine_manager=manager)
    )
    assert engines_elsewhere(client) == ("3 of 4 data-parallel engines on other machines or in Ray",)
    parallel.local_engines_only = True
    assert engines_elsewhere(client) == ()
