"""What is known of SageMaker's instance types: accelerators and their memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TYPE = re.compile(r"ml\.([a-z0-9-]+)\.([a-z0-9]+)")

_ONE_FOUR_EIGHT = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_ONE_TWO_FOUR_EIGHT = {"12xlarge": 2, "24xlarge": 4, "48xlarge": 8}


@dataclass(frozen=True, slots=True)
class _Family:
    memory: int
    """GiB for each GPU."""
    gpus: dict[str, int]
    """By size; a size that is not there has `smallest`."""
    smallest: int = 1


# From the instance types' pages of EC2.
_GPU_FAMILIES = {
    "p2": _Family(12, {"8xlarge": 8, "16xlarge": 16}),
    "p3": _Family(16, {"8xlarge": 4, "16xlarge": 8}),
    "p4d": _Family(40, {}, 8),
    "p4de": _Family(80, {}, 8),
    "p5": _Family(80, {"48xlarge": 8}),
    "p5e": _Family(141, {}, 8),
    "p5en": _Family(141, {}, 8),
    "p6-b200": _Family(179, {}, 8),
    "p6-b300": _Family(268, {}, 8),
    "p6e-gb200": _Family(185, {}, 4),
    "g4dn": _Family(16, {"12xlarge": 4}),
    "g5": _Family(24, _ONE_FOUR_EIGHT),
    "g6": _Family(24, _ONE_FOUR_EIGHT),
    "g6e": _Family(48, _ONE_FOUR_EIGHT),
    "g7e": _Family(96, _ONE_TWO_FOUR_EIGHT),
}
_LOCAL_DISKS = re.compile(r"(g[5-9]|p[5-9]|trn)|.*d")
"""Families with disks of their own, to which SageMaker attaches no volume; a d in a name says that it has them."""
_TOO_OLD = frozenset({"p2", "p3"})
"""CUDA 13 has no code for these GPUs (compute capability below 7.5)."""

Accelerator = Literal["gpu", "neuron", "none"]


def family(instance_type: str) -> str:
    """ "g6e" of "ml.g6e.xlarge"; empty for what is no instance type."""
    match = TYPE.fullmatch(instance_type)
    return match[1] if match else ""


def accelerator(instance_type: str) -> Accelerator:
    """What the instance computes with, judged by its family's name."""
    name = family(instance_type)
    if name.startswith(("inf", "trn")):
        return "neuron"
    return "gpu" if re.match(r"[gp]\d", name) else "none"


def gpus(instance_type: str) -> int | None:
    """GPUs of one instance; 0 if it has none, None if the type is not known here."""
    if accelerator(instance_type) != "gpu":
        return 0
    known = _GPU_FAMILIES.get(family(instance_type))
    return None if known is None else known.gpus.get(instance_type.rpartition(".")[2], known.smallest)


def gpu_memory(instance_type: str) -> int | None:
    """GiB of all GPUs of one instance together; None if the type is not known here or has none."""
    known = _GPU_FAMILIES.get(family(instance_type))
    count = gpus(instance_type)
    return known.memory * count if known and count else None


def takes_a_volume(instance_type: str) -> bool:
    """Whether the size of the volume can be said: what has disks of its own gets none."""
    return _LOCAL_DISKS.match(family(instance_type)) is None


def runs_cuda_13(instance_type: str) -> bool:
    """Whether CUDA 13 still has code for the instance's GPUs."""
    return family(instance_type) not in _TOO_OLD
