"""Whether there is room for one more model, told before it is loaded.

Source: contracts/lmi.md sections 1.10, 2.5 and 2.9.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass

from container.devices import gpu_count
from container.settings import Settings
from handlers.engines.cpu_memory import machine_limits

_MEBIBYTE = 1 << 20
_BEYOND_FILES = 1.2
"""A loaded model to its files, where nothing is declared."""
_GPU_SHARE = 0.9
"""What vLLM takes of a GPU unless it is told otherwise."""
_QUERY_SECONDS = 10.0


class OutOfMemory(Exception):
    """A model does not fit beside those that are loaded; the message has the figures."""


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes of the memory that models are loaded into: of the fullest GPU, or main memory where there is none."""

    free: int
    total: int
    gpu: bool


def check_room(settings: Settings, memory: Free) -> None:
    """Compare what a model needs with what is free.

    Raises:
        OutOfMemory: there is less than it needs and what has to stay free.
    """
    needed = needed_bytes(settings, memory)
    reserved = settings.memory.reserved * _MEBIBYTE
    if needed + reserved > memory.free:
        where = "GPU memory" if memory.gpu else "memory"
        raise OutOfMemory(
            f"model {settings.model.name} needs {needed // _MEBIBYTE} MiB of {where} and {reserved // _MEBIBYTE} MiB "
            f"have to stay free (reserved_memory_mb); {memory.free // _MEBIBYTE} MiB are free"
        )


def needed_bytes(settings: Settings, memory: Free) -> int:
    """What is declared, or else an estimate by the model's files; on a GPU at least what its engine will ask for."""
    if settings.memory.required is not None:
        return settings.memory.required * _MEBIBYTE
    model = settings.model
    files = int(_BEYOND_FILES * sum(size_of(path) for path in {str(model.model_dir), model.model_id}))
    arguments = model.engine_arguments
    if "kv_cache_memory_bytes" in arguments:
        return files + _integer(arguments["kv_cache_memory_bytes"])
    if not memory.gpu or model.handler is not None or model.rolling_batch == "disable":
        return files
    share = arguments.get("gpu_memory_utilization", "")
    with contextlib.suppress(ValueError):
        return max(files, int(float(share or _GPU_SHARE) * memory.total))
    return files  # a share that is no number: the engine says so


def size_of(path: str) -> int:
    """Bytes of all files below a directory; 0 for what is none, such as a hub id."""
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
        if os.path.isfile(os.path.join(folder, name))
    )


def free_memory() -> Free:
    """What is free now."""
    return _gpus() if gpu_count() else _main_memory()


def _main_memory() -> Free:
    least = min(machine_limits(), key=lambda limit: limit.available)
    return Free(least.available, least.total, gpu=False)


def _gpus() -> Free:
    """Asked of the driver's own tool: to ask the driver in this process would leave a context on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command.append(f"--id={visible}")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
        free, total = min(tuple(int(part) * _MEBIBYTE for part in line.split(",")) for line in text.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return _main_memory()  # the model goes through main memory in any case
    return Free(free, total, gpu=True)


def _integer(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0
