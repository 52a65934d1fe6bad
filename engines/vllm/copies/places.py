"""The places of copies: the GPUs of each copy, or its share of the processors."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import vllm.platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils import cpu_resource_utils

from engines.interface import EngineStartError
from engines.memory.parallelism import Layout, ModelMemory, copies_that_fit, tensor_parallel_sizes, why_one_copy
from engines.memory.weight_files import weights_of
from engines.settings.engine_config import EngineConfig
from engines.vllm.copies import core_client

logger = logging.getLogger(__name__)

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class Place:
    """The part of the machine that a copy uses."""

    # The indices of the copy's GPUs among the GPUs that are visible to this process. Empty: vLLM uses the first GPUs.
    gpus: tuple[int, ...] = ()
    physical_gpus: tuple[int, ...] | None = None  # The same GPUs, by their indices in the machine.
    processors: tuple[int, ...] = ()  # Empty: all processors.


def processor_places(copies: int) -> list[Place]:
    """Return the places of copies on a CPU. Each copy has an equal share of the processors, but at least one."""
    if copies == 1 or os.environ.get(_BINDING, "auto") != "auto":  # The user has bound the threads.
        return [Place()] * copies
    # The order keeps the processors of a NUMA node and of a core together.
    allowed = sorted(
        cpu_resource_utils.get_allowed_cpu_list(), key=lambda one: (one.numa_node, one.physical_core, one.id)
    )
    processors = [one.id for one in allowed]
    ends = [len(processors) * number // copies for number in range(copies + 1)]
    shares = [processors[begin:end] or [processors[begin]] for begin, end in itertools.pairwise(ends)]
    return [Place(processors=tuple(share)) for share in shares]


def gpu_places(engine_args: AsyncEngineArgs, config: EngineConfig) -> list[Place]:
    """Return a place for each copy that fits on the GPUs.

    This function sets the tensor-parallel size in `engine_args` if the size is not given. It also sets `device_ids` to
    the GPUs of the first copy.

    Raises:
        EngineStartError: `load_on_devices` allows fewer GPUs than the model needs.
    """
    visible = range(vllm.platforms.current_platform.device_count())
    devices = visible if config.devices is None else config.devices
    if config.devices == ():
        raise EngineStartError("load_on_devices is cpu, but this vLLM is built for GPUs")
    if config.tensor_parallel_degree is None:
        share_layers(engine_args, devices, config.tensor_parallel_max)
    count = Layout.of(vars(engine_args)).gpus(engine_args.tensor_parallel_size)
    alone = why_one_copy(vars(engine_args))
    if engine_args.device_ids or (config.devices is None and (alone or count >= len(visible))):
        return [Place()]
    if count > len(devices):
        if len(devices) == len(visible):
            return [Place()]  # vLLM reports that there are too few GPUs, or finds more on other machines.
        raise EngineStartError(f"the model needs {count} GPUs, and load_on_devices allows {len(devices)}")
    copies = copies_that_fit(len(devices), count, 1 if alone else None)
    # GPUs with neighbouring indices are often connected directly.
    chosen = [sorted(devices[copy * count : (copy + 1) * count]) for copy in range(copies)]
    if chosen == [list(visible)]:
        return [Place()]
    engine_args.device_ids = chosen[0]
    logger.info("GPUs of each copy that there is room for: %s", "; ".join(", ".join(map(str, gpus)) for gpus in chosen))
    if (most := config.max_copies) is not None and most > copies:
        logger.warning("maxWorkers is %d, and there is room for %d copies", most, copies)
    return [Place(tuple(gpus), tuple(core_client.physical_gpus(engine_args, gpus))) for gpus in chosen]


def share_layers(engine_args: AsyncEngineArgs, devices: Sequence[int], most: bool) -> None:
    """Set the tensor-parallel size to the fewest GPUs that hold the model.

    With `most`, set the size to the highest number of GPUs that the model allows.
    """
    platform = vllm.platforms.current_platform
    gpus = len(devices)
    layout = Layout.of(vars(engine_args))
    if layout.most(gpus) <= 1:
        return
    model = engine_args.create_model_config()
    config = model.hf_config.to_dict()
    sizes = tensor_parallel_sizes(config, layout.most(gpus))
    if most:
        engine_args.tensor_parallel_size, why = sizes[-1], "the most that the model allows"
    else:
        memory = ModelMemory(
            config,
            weights_of(model.model, model.revision, engine_args.speculative_config, layout),
            layout,
            memory_share=engine_args.gpu_memory_utilization,
            # With -1, vLLM itself chooses a length that fits into memory.
            max_model_len=0 if engine_args.max_model_len == -1 else model.max_model_len,
            cache_element_bytes=1 if "fp8" in engine_args.kv_cache_dtype else model.dtype.itemsize,
        )
        smallest = min(platform.get_device_total_memory(gpu) for gpu in devices)
        engine_args.tensor_parallel_size, why = memory.fewest(sizes, smallest)
    logger.info(
        "%d of %d GPUs share each layer (%d pipeline stages, %d replicas, %d machines): %s; the model allows %s; "
        "option.tensor_parallel_degree sets it by hand",
        engine_args.tensor_parallel_size,
        gpus * layout.nodes,
        layout.stages,
        layout.replicas,
        layout.nodes,
        why,
        ", ".join(map(str, sizes)),
    )
