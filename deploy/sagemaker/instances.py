"""What SageMaker's instance types have, where neither SageMaker nor the template's reader can say it: GPUs and drivers.

An image made for a newer CUDA than the instance's driver has leaves an endpoint in `Creating` without a line of log. So
the machine image, which brings the driver (`InferenceAmiVersion`), is always stated.
"""

from __future__ import annotations

import re

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

_ONE_FOUR_EIGHT = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
# From the instance types' pages of EC2: GPUs of every size, or of the sizes that have more than one.
_GPUS: dict[str, int | dict[str, int]] = {
    "p2": {"8xlarge": 8, "16xlarge": 16},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p5": {"48xlarge": 8},
    **dict.fromkeys(("p4d", "p4de", "p5e", "p5en", "p6-b200", "p6-b300"), 8),
    "p6e-gb200": 4,
    "g4dn": {"12xlarge": 4},
    **dict.fromkeys(("g5", "g6", "g6e"), _ONE_FOUR_EIGHT),
    "g7e": {"12xlarge": 2, "24xlarge": 4, "48xlarge": 8},
}
_TOO_OLD = frozenset({"p2", "p3"})
"""CUDA 13 has no code for these GPUs (compute capability below 7.5)."""


def family(instance_type: str) -> str:
    """ "g6e" of "ml.g6e.xlarge"; empty for what is no instance type."""
    match = TYPE.fullmatch(instance_type)
    return match[1] if match else ""


def gpus(instance_type: str) -> int | None:
    """GPUs of one instance; 0 if it has none, None if the type is not known here."""
    name = family(instance_type)
    if not re.match(r"[gp]\d", name):
        return 0
    known = _GPUS.get(name)
    return known.get(instance_type.rpartition(".")[2], 1) if isinstance(known, dict) else known


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
    shown, name = f"{cuda[0]}.{cuda[1]}", family(instance_type)
    if name.startswith(("inf", "trn")):
        raise NoMachineImage(f"{instance_type} has Neuron accelerators; the image needs NVIDIA GPUs or a CPU")
    if gpus(instance_type) == 0:
        return None
    if cuda >= (13, 0) and name in _TOO_OLD:
        raise NoMachineImage(f"the GPUs of {instance_type} are too old for CUDA {shown}, which the image has")
    for version, image in MACHINE_IMAGES:
        if version >= cuda:
            return image
    newest, image = MACHINE_IMAGES[-1]
    if newest[0] < cuda[0]:
        raise NoMachineImage(f"CUDA {shown} is newer than any driver of SageMaker's (up to {newest[0]}.{newest[1]})")
    return image
