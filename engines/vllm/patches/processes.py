"""Patches of the start, the message polling and the end of vLLM's processes.

`engines.vllm.processes` has the replacements. The names at the top of the module are vLLM's own functions. The server
imports the patched modules of vLLM as well, so that `check_names` can check their names before a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import coordinator
from vllm.v1.engine import utils as engine_utils
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

if current_platform.is_cpu():  # On a GPU, nothing patches the sampler.
    from vllm.v1.sample import sampler

default_context: Callable[[], BaseContext] = engine_utils.get_mp_context
run_in_subprocess: Callable[[Callable[[], Any]], Any] = registry._run_in_subprocess
await_workers: Callable[[Sequence[BaseProcess]], None] = MultiprocExecutor._ensure_worker_termination
cgroup_usage: Callable[[], int | None] = cpu_resource_utils.get_cgroup_memory_usage


def patch_server(context: Callable[[], BaseContext], run: Callable[[Callable[[], Any]], Any]) -> None:
    """Patch the server's process, so that the fork server forks vLLM's processes. They do not import vLLM again.

    Args:
        context: Returns the context that starts the engine process and the coordinator of data-parallel ranks.
        run: Calls a function in another process. vLLM inspects model classes there.
    """
    for module in (engine_utils, coordinator):
        module.get_mp_context = context
    registry._run_in_subprocess = run


def patch_engine_process(
    context: Callable[[], BaseContext],
    end_workers: Callable[[Sequence[BaseProcess]], None],
    meeting_place: Callable[[], str],
) -> None:
    """Patch the engine process.

    After the patch, the workers are forked as well. If a worker has died, vLLM itself would wait 8 seconds for the
    other workers. It would also leave a file in /tmp, through which workers find each other.

    Args:
        context: Returns the context that starts workers.
        end_workers: Waits for the end of the workers.
        meeting_place: Returns the URL of the file through which workers find each other.
    """
    multiproc_executor.get_mp_context = context
    MultiprocExecutor._ensure_worker_termination = staticmethod(end_workers)
    for executor in (multiproc_executor, uniproc_executor):
        executor.get_file_store_init_method = meeting_place


def patch_executor(started: Callable[[Executor], None]) -> None:
    """Make the engine process report the workers that run in Ray or on other machines.

    vLLM does not tell the server about these workers.

    Args:
        started: Called with the executor when its workers have started.
    """
    start = Executor.__init__

    def init(self: Executor, vllm_config: VllmConfig) -> None:
        start(self, vllm_config)
        started(self)

    Executor.__init__ = init


def patch_worker(wrap_start: Callable[[Callable[..., None]], Callable[..., None]], memory_used: Any) -> None:
    """Patch a worker process.

    vLLM itself only logs the error of a worker that cannot start, and counts cached pages of files as used memory.

    Args:
        wrap_start: Takes the method that starts the worker, and returns its replacement.
        memory_used: Returns the bytes of memory that the container uses; None if there is no limit.
    """
    cpu_resource_utils.get_cgroup_memory_usage = memory_used
    WorkerProc.__init__ = wrap_start(WorkerProc.__init__)


def patch_waiting(pause: Callable[[], None]) -> None:
    """Replace the pause between two polls for messages, in the engine process or in a worker.

    vLLM's pause only yields the processor, so each of these processes keeps a processor busy.
    """
    shm_broadcast.sched_yield = pause


def patch_token_ranks(token_ranks: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Replace the sampler's function that ranks the chosen tokens. vLLM would compile it for up to 90 seconds."""
    sampler.batched_count_greater_than = token_ranks


def use_processors(processors: Collection[int]) -> None:
    """Make vLLM bind its workers' threads to these processors, and make it use the memory near these processors.

    Call this function in the engine process.

    vLLM binds the OpenMP threads of each worker to processors of one visible memory node. All other threads may run on
    any processor. If whole processes were bound, the copies would leave no processor for the front end.
    """
    find = cpu_resource_utils.get_allowed_cpu_list
    allowed = [one for one in find() if one.id in processors]
    nodes = {one.numa_node for one in allowed}
    if seen := [str(node) for node in cpu_resource_utils.get_visible_memory_node() if node in nodes]:
        os.environ[cpu_resource_utils.DEVICE_CONTROL_ENV_VAR] = ",".join(seen)
    cpu_resource_utils.get_allowed_cpu_list = lambda: allowed
