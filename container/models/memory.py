"""The memory that a model needs, and the memory that is free."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from container.gpus import GpusUnknown, gpu_count, gpu_memory
from container.models.placement import gpus_of, integer, sharing_gpus
from container.settings.settings import Settings
from engines.memory.cpu_memory import machine_limits
from engines.memory.parallelism import Layout, Weights, copies_that_fit
from engines.memory.weight_files import draft_model, expert_bytes, weight_bytes
from handlers.model_config import ModelConfig

logger = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20
_BEYOND_FILES = 1.2  # The memory of a loaded model, as a multiple of the size of its weight files.


class OutOfMemory(Exception):
    """A model does not fit into the free memory. The message states the sizes."""


def free_memory() -> tuple[int, ...]:
    """Return the free bytes of each GPU that this process sees, in CUDA's order, then the free bytes of main memory.

    Raises:
        SliceNotChosen: It is unclear which GPU or MIG slice would be used.
    """
    main = min(limit.available for limit in machine_limits())
    if not gpu_count():
        return (main,)
    try:
        return (*gpu_memory(), main)
    except GpusUnknown as error:
        logger.warning("the memory of the GPUs is not known, and main memory is counted instead: %s", error)
        return (main,)


def check_room(settings: Settings, memory: Sequence[int]) -> None:
    """Check that a model fits into the free memory of the devices that will load it.

    Each copy of the model needs the memory that its settings declare. If they declare none, a copy needs 1.2 times the
    size of its weight files, as in LMI, and `kv_cache_memory_bytes`. vLLM itself checks the rest of its memory.

    Args:
        settings: The settings of the model.
        memory: The free memory, see `free_memory`.

    Raises:
        OutOfMemory: The model does not fit.
    """
    name, reserved = settings.config.name, settings.reserved_memory * _MEBIBYTE
    gpus = gpus_of(settings.config, memory)
    sizes, layout = sharing_gpus(settings.config, len(gpus))
    if not gpus:
        each, free = _needed(settings, sizes[0], layout), memory[-1]
        need = each if settings.required_memory is not None else each * layout.gpus(sizes[0])
        need *= settings.config.max_copies or 1
        if need + reserved > free:
            raise OutOfMemory(
                f"model {name} needs {_mebibytes(need)} of memory and {_mebibytes(reserved)} "
                f"have to stay free (reserved_memory_mb); {_mebibytes(free)} are free"
            )
        return
    for size in sizes:
        each, count = _needed(settings, size, layout), layout.gpus(size)
        count *= copies_that_fit(len(gpus), count, settings.config.max_copies)
        if all(each + reserved <= memory[index] for index in gpus[:count]):
            return
    where = "GPU memory" if count == 1 else f"memory on each of {count} GPUs"
    listing = ", ".join(f"{_mebibytes(memory[index])} of GPU {index}" for index in sorted(gpus))
    raise OutOfMemory(
        f"model {name} needs {_mebibytes(each)} of {where} and {_mebibytes(reserved)} "
        f"have to stay free (reserved_memory_mb); free are {listing}"
    )


def _needed(settings: Settings, size: int, layout: Layout) -> int:
    if settings.required_memory is not None:
        return settings.required_memory * _MEBIBYTE
    cache = integer(settings.config.engine_arguments.get("kv_cache_memory_bytes", ""))
    return int(_BEYOND_FILES * _loaded(settings.config, layout).each(size, layout)) + cache


def _loaded(config: ModelConfig, layout: Layout) -> Weights:
    """Return the size of the weight files. If a custom handler's directory has none, all files in it count."""
    if config.handler is not None:
        paths = {str(config.model_dir), config.model_id}
        return Weights(sum(weight_bytes(path) or size_of(path) for path in paths))
    draft = draft_model(config.engine_arguments.get("speculative_config"))
    return Weights(
        weight_bytes(config.model_id),
        expert_bytes(config.model_id) if layout.expert_ranks > 1 else 0,
        weight_bytes(draft) if draft and draft != config.model_id else 0,
    )


def size_of(path: str) -> int:
    """Return the total size of the files below a directory, without hidden directories. 0 if `path` is a hub id."""
    size = 0
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [os.path.join(folder, name) for name in names]
        size += sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return size


def _mebibytes(size: int) -> str:
    return f"{size // _MEBIBYTE} MiB"
