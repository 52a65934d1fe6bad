"""What is known of SageMaker's instance types: accelerators, disks, drivers, and time limits estimated from them.

An image made for a newer CUDA than the instance's driver has leaves an endpoint in `Creating` without a line of log. So
the machine image, which brings the driver (`InferenceAmiVersion`), is always stated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TYPE = re.compile(r"ml\.([a-z0-9-]+)\.([a-z0-9]+)")

Version = tuple[int, int]

IMAGE_CUDA: Version = (13, 0)
"""CUDA of the GPU image of this version of Slipway (requirements/gpu.txt)."""

# SageMaker's API reference, ProductionVariant.InferenceAmiVersion. In ascending order of the driver's CUDA.
MACHINE_IMAGES: tuple[tuple[Version, str], ...] = (
    ((12, 2), "al2-ami-sagemaker-inference-gpu-2-1"),
    ((12, 4), "al2-ami-sagemaker-inference-gpu-3-1"),
    ((13, 0), "al2023-ami-sagemaker-inference-gpu-4-1"),
)
_CUDA_IN_TAG = re.compile(r"(?:^|[-_.])cu(?:da)?-?(\d{2})\.?(\d)(?!\d)")

SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 60, 3600
"""Seconds that SageMaker allows for a download or a start."""
_SHARE_OF_MEMORY = 0.7
"""Of the GPUs' memory, that weights take at most; the rest is KV cache."""
_UNKNOWN_SIZE = 40.0
# Gigabytes a second and seconds. Slow on purpose: a limit that is too long costs nothing, one too short the deployment.
_DOWNLOAD_RATE = 0.1
_LOAD_RATE = 0.25
_DOWNLOAD_BASE = 120
_START_BASE = 420
"""Starting the process, compiling, capturing CUDA graphs and warming up."""

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


class NoMachineImage(ValueError):
    """No machine image of SageMaker has a driver for this CUDA, or the instance cannot run it."""


def cuda_of_image(image: str) -> Version:
    """CUDA version that the image's tag names ("...:0.1.0-cu128"), else that of this version's image."""
    tag = image.rpartition("/")[2].partition(":")[2]
    match = _CUDA_IN_TAG.search(tag)
    return (int(match[1]), int(match[2])) if match else IMAGE_CUDA


def machine_image(cuda: Version, instance_type: str) -> str | None:
    """The `InferenceAmiVersion` with the oldest driver that runs `cuda`; None for instances without GPUs.

    CUDA runs on drivers of its own minor version and newer ones. Where only an older minor version of the same major
    version is offered, that is taken: CUDA guarantees compatibility within a major version.

    Raises:
        NoMachineImage: there is none, or the instance's accelerator cannot run the image.
    """
    shown = f"{cuda[0]}.{cuda[1]}"
    kind = accelerator(instance_type)
    if kind == "none":
        return None
    if kind == "neuron":
        raise NoMachineImage(f"{instance_type} has Neuron accelerators; the image needs NVIDIA GPUs or a CPU")
    if cuda >= (13, 0) and family(instance_type) in _TOO_OLD:
        raise NoMachineImage(f"the GPUs of {instance_type} are too old for CUDA {shown}, which the image has")
    enough = [name for version, name in MACHINE_IMAGES if version >= cuda]
    if enough:
        return enough[0]
    same_major = [name for version, name in MACHINE_IMAGES if version[0] == cuda[0]]
    if same_major:
        return same_major[-1]
    newest = MACHINE_IMAGES[-1][0]
    raise NoMachineImage(f"CUDA {shown} is newer than any driver of SageMaker's (up to {newest[0]}.{newest[1]})")


def model_size(instance_type: str) -> float:
    """Gigabytes of weights: the most that the instance's GPUs hold."""
    memory = gpu_memory(instance_type)
    return _UNKNOWN_SIZE if memory is None else memory * _SHARE_OF_MEMORY


def download_timeout(gigabytes: float) -> int:
    """Seconds for SageMaker's own download from S3."""
    return _timeout(_DOWNLOAD_BASE + gigabytes / _DOWNLOAD_RATE)


def startup_timeout(gigabytes: float, *, container_downloads: bool) -> int:
    """Seconds until the container is healthy; it downloads the model itself when that comes from a hub."""
    download = gigabytes / _DOWNLOAD_RATE if container_downloads else 0
    return _timeout(_START_BASE + download + gigabytes / _LOAD_RATE)


def _timeout(seconds: float) -> int:
    whole_minutes = -(-int(seconds) // 60) * 60
    return min(max(whole_minutes, SHORTEST_TIMEOUT), LONGEST_TIMEOUT)
