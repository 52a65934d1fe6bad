"""How much memory a model needs, how much is free, and which GPUs a model is placed on."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from container.devices import GpusUnknown, gpu_count, gpu_memory
from container.settings.settings import Settings
from handlers.engines.choice import is_vllm
from handlers.engines.cpu_memory import machine_limits
from handlers.engines.parallelism import MEMORY_SHARE, ModelMemory, read_config, tensor_parallel_sizes
from handlers.engines.protocol import EngineStartError
from handlers.engines.weight_files import weight_bytes
from handlers.model_settings import ModelSettings

logger = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20
_BEYOND_FILES = 1.2
"""The memory of a loaded model, as a multiple of its weight files."""
_ALIKE = 1 << 30
"""GPUs whose free bytes differ by less count as equally free."""


class OutOfMemory(Exception):
    """A model does not fit; the message has the figures."""


@dataclass(frozen=True, slots=True)
class Free:
    """Free and total bytes of a GPU, or of main memory."""

    free: int
    total: int
    gpu: bool


@dataclass(frozen=True, slots=True)
class Need:
    """How much memory a model needs, and where."""

    gpus: int
    """0: it runs in main memory."""
    each: int
    """Bytes on each GPU."""
    share: float = 0.0
    """The share of each GPU that the engine asks for in any case."""

    def of(self, memory: Free) -> int:
        """Return the bytes that it needs of this GPU, or of main memory."""
        return max(self.each, int(self.share * memory.total))


def free_memory() -> tuple[Free, ...]:
    """Return what is free now on each GPU that this process sees, in CUDA's order, and last in main memory.

    Raises:
        SliceNotChosen: it is not clear which GPU or MIG slice would be used.
    """
    return (*_gpus(), _main_memory())


def check_room(settings: Settings, memory: Sequence[Free]) -> None:
    """Refuse a model for which there is too little memory where it will be loaded.

    Raises:
        OutOfMemory: less is free than it needs and has to stay free.
        EngineStartError: it needs more GPUs than `load_on_devices` allows.
    """
    gpus = _gpus_of(settings.model, memory)
    need = needed(settings, [memory[index] for index in gpus])
    reserved = settings.memory.reserved * _MEBIBYTE
    used = gpus[: need.gpus]
    short = [index for index in used if need.of(memory[index]) + reserved > memory[index].free]
    main = memory[-1]
    if not used and need.each + reserved > main.free:
        raise OutOfMemory(
            f"model {settings.model.name} needs {_mebibytes(need.each)} of memory and {_mebibytes(reserved)} "
            f"have to stay free (reserved_memory_mb); {_mebibytes(main.free)} are free"
        )
    if short:
        where = "GPU memory" if len(used) == 1 else f"memory on each of {len(used)} GPUs"
        size = need.of(memory[short[0]])
        free = ", ".join(f"{_mebibytes(memory[index].free)} of GPU {index}" for index in sorted(gpus))
        raise OutOfMemory(
            f"model {settings.model.name} needs {_mebibytes(size)} of {where} and {_mebibytes(reserved)} "
            f"have to stay free (reserved_memory_mb); free are {free}"
        )


def placed(model: ModelSettings, memory: Sequence[Free]) -> ModelSettings:
    """Return the settings with `devices` in the order in which the engine is to take them: most room first.

    They stay as they are for a custom handler, whose workers have their devices already, and where the engine chooses
    GPUs by itself, as with Ray.
    """
    gpus = _gpus_of(model, memory)
    if model.handler is not None or not gpus or _chooses_itself(model):
        return model
    return replace(model, devices=gpus)


def needed(settings: Settings, gpus: Sequence[Free]) -> Need:
    """Return the declared memory, or else an estimate from the weight files; on a GPU at least what vLLM asks for.

    Args:
        settings: the settings of the model.
        gpus: the GPUs that the model may use, in the order in which it takes them; none: main memory.

    Raises:
        EngineStartError: it needs more GPUs than `load_on_devices` allows.
    """
    model = settings.model
    count, copies = _processes(model, gpus)
    if settings.memory.required is not None:
        return Need(count if gpus else 0, settings.memory.required * _MEBIBYTE)
    arguments = model.engine_arguments
    each = int(_BEYOND_FILES * _loaded_bytes(model) * copies / count)
    if "kv_cache_memory_bytes" in arguments:
        each += _integer(arguments["kv_cache_memory_bytes"])
    if not gpus:
        return Need(0, each * count)
    if not is_vllm(model):
        return Need(count, each)
    return Need(count, each, _share(model))  # vLLM insists on it also where the size of the KV cache is given


def _gpus_of(model: ModelSettings, memory: Sequence[Free]) -> tuple[int, ...]:
    """Return the GPUs that a model may use, in the order in which it takes them; none: it runs in main memory."""
    gpus = [index for index, one in enumerate(memory) if one.gpu]
    if model.handler is not None:
        own = {int(index) for group in model.handler.devices for index in group.split(",")}
        return tuple(index for index in gpus if index in own)
    allowed = gpus if model.devices is None else [index for index in model.devices if index in gpus]
    return tuple(sorted(allowed, key=lambda index: (-(memory[index].free // _ALIKE), index)))


def _processes(model: ModelSettings, gpus: Sequence[Free]) -> tuple[int, int]:
    """Return how many processes run the model, each on one GPU if there are any, and how many copies they hold."""
    if model.handler is not None:
        return (len(gpus), len(model.handler.devices)) if gpus else (1, 1)
    if not is_vllm(model):
        return (max(len(gpus), 1) if "device_map" in model.engine_arguments else 1), 1
    data = _integer(model.engine_arguments.get("data_parallel_size", "")) or 1
    count = _tensor_parallel(model, gpus, data) * model.pipeline_parallel_degree * data
    if gpus and count > len(gpus) and model.devices is not None and not _chooses_itself(model):
        raise EngineStartError(f"model {model.name} needs {count} GPUs, and load_on_devices allows {len(gpus)}")
    return count, data


def _tensor_parallel(model: ModelSettings, gpus: Sequence[Free], data: int) -> int:
    if model.tensor_parallel_degree is not None:
        return model.tensor_parallel_degree
    if not gpus:
        return 1
    config, stages = read_config(model.model_id), model.pipeline_parallel_degree
    sizes = tensor_parallel_sizes(config, max(1, len(gpus) // (stages * data)))
    if model.tensor_parallel_max:
        return sizes[-1]
    weights = weight_bytes(model.model_id)
    if not weights:
        return 1  # they are yet to be downloaded by the engine, which chooses then
    longest = model.engine_arguments.get("max_model_len", "")
    need = ModelMemory(
        config,
        weights,
        stages=stages,
        memory_share=_share(model),
        max_model_len=0 if longest.strip() == "-1" else _integer(longest) or None,
    )
    return need.fewest(sizes, min(gpu.total for gpu in gpus))[0]


def _chooses_itself(model: ModelSettings) -> bool:
    """Return whether vLLM or Ray chooses the GPUs, by the settings."""
    arguments = model.engine_arguments
    return (
        "device_ids" in arguments
        or arguments.get("distributed_executor_backend", "mp") not in ("mp", "uni")
        or arguments.get("data_parallel_backend", "mp") != "mp"
        or _integer(arguments.get("nnodes", "1")) > 1
    )


def _share(model: ModelSettings) -> float:
    """Return the share of a GPU that vLLM asks for; 0 where the setting is no number, which vLLM refuses."""
    with contextlib.suppress(ValueError):
        return float(model.engine_arguments.get("gpu_memory_utilization", "") or MEMORY_SHARE)
    return 0.0


def _loaded_bytes(model: ModelSettings) -> int:
    """Return the bytes of the weight files; of all files where a custom handler's model has none of a known format."""
    if model.handler is None:
        return weight_bytes(model.model_id)
    paths = {str(model.model_dir), model.model_id}
    return sum(weight_bytes(path) or size_of(path) for path in paths)


def size_of(path: str) -> int:
    """Return the bytes of all files below a directory, without hidden directories; 0 for a hub id."""
    size = 0
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [os.path.join(folder, name) for name in names]
        size += sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return size


def _gpus() -> tuple[Free, ...]:
    if not gpu_count():
        return ()
    try:
        return tuple(Free(free, total, gpu=True) for free, total in gpu_memory())
    except GpusUnknown as error:
        logger.warning("the memory of the GPUs is not known, and main memory is counted instead: %s", error)
        return ()


def _main_memory() -> Free:
    least = min(machine_limits(), key=lambda limit: limit.available)
    return Free(least.available, least.total, gpu=False)


def _integer(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _mebibytes(size: int) -> str:
    return f"{size // _MEBIBYTE} MiB"
