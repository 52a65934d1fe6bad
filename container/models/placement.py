"""Chooses the GPUs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engines.choice import is_vllm
from engines.model_settings import ModelSettings
from engines.parallelism import Layout

_ALIKE = 1 << 30  # GPUs whose free bytes differ by less count as equally free.


def placed(model: ModelSettings, memory: Sequence[int]) -> ModelSettings:
    """Return the settings with `devices` in the order in which the engine takes them: most room first.

    They are unchanged for a custom handler, whose workers already have devices, and for an engine that chooses its
    GPUs, such as one on Ray.
    """
    gpus = gpus_of(model, memory)
    if model.handler is not None or not gpus or _chooses_itself(model):
        return model
    return replace(model, devices=gpus)


def gpus_of(model: ModelSettings, memory: Sequence[int]) -> tuple[int, ...]:
    """Return the GPUs that a model may use, in the order in which it takes them. Empty if it runs in main memory."""
    gpus = range(len(memory) - 1)
    if model.handler is not None:
        own = {int(index) for group in model.handler.devices for index in group.split(",")}
        return tuple(index for index in gpus if index in own)
    allowed = gpus if model.devices is None else [index for index in model.devices if index in gpus]
    return tuple(sorted(allowed, key=lambda index: (-(memory[index] // _ALIKE), index)))


def sharing_gpus(model: ModelSettings, gpus: int) -> tuple[Sequence[int], Layout]:
    """Return how many GPUs may share each layer: all possible counts, ascending. Also return the model's layout.

    If `gpus` is 0, the model runs in main memory. The counts are then counts of processes.
    """
    if model.handler is not None:
        workers = len(model.handler.devices) or 1
        return ((gpus or 1) // workers or 1,), Layout(replicas=workers, replicas_here=workers)
    if not is_vllm(model):
        return ((gpus or 1) if "device_map" in model.engine_arguments else 1,), Layout()
    layout = _layout(model)
    if model.tensor_parallel_degree is not None or not gpus:
        return (model.tensor_parallel_degree or 1,), layout
    most = layout.most(gpus)
    return range(most if model.tensor_parallel_max else 1, most + 1), layout


def gpus_asked_for(model: ModelSettings) -> int:
    """Return the number of this machine's GPUs that an engine takes with the model's settings."""
    return _layout(model).gpus(model.tensor_parallel_degree or 1)


def _layout(model: ModelSettings) -> Layout:
    return Layout.of({**model.engine_arguments, "pipeline_parallel_size": model.pipeline_parallel_degree})


def _chooses_itself(model: ModelSettings) -> bool:
    arguments = model.engine_arguments
    return (
        "device_ids" in arguments
        or arguments.get("distributed_executor_backend", "mp") not in ("mp", "uni")
        or arguments.get("data_parallel_backend", "mp") != "mp"
        or integer(arguments.get("nnodes", "1")) > 1
    )


def integer(text: str) -> int:
    """Return the number that an engine's argument holds, 0 if it holds none."""
    return int(text) if text.strip().isdecimal() else 0
