"""From an image's CUDA to the machine image whose driver can run it.

An image made for a newer CUDA than the driver has leaves an endpoint in `Creating` without a line of log; so the
machine image (`InferenceAmiVersion`) is always stated.
"""

from __future__ import annotations

import re

from deploy.sagemaker import instances

Version = tuple[int, int]

IMAGE_CUDA: Version = (13, 0)
"""CUDA of the GPU image of this version of Slipway (requirements/gpu.txt)."""

# SageMaker's API reference, ProductionVariant.InferenceAmiVersion. In ascending order of the driver's CUDA.
MACHINE_IMAGES: tuple[tuple[Version, str], ...] = (
    ((12, 2), "al2-ami-sagemaker-inference-gpu-2-1"),
    ((12, 4), "al2-ami-sagemaker-inference-gpu-3-1"),
    ((13, 0), "al2023-ami-sagemaker-inference-gpu-4-1"),
)
_IN_TAG = re.compile(r"(?:^|[-_.])cu(?:da)?-?(\d{2})\.?(\d)(?!\d)")


class NoMachineImage(ValueError):
    """No machine image of SageMaker has a driver for this CUDA, or the instance cannot run it."""


def cuda_of_image(image: str) -> Version:
    """CUDA version that the image's tag names ("...:0.1.0-cu128"), else that of this version's image."""
    tag = image.rpartition("/")[2].partition(":")[2]
    match = _IN_TAG.search(tag)
    return (int(match[1]), int(match[2])) if match else IMAGE_CUDA


def machine_image(cuda: Version, instance_type: str) -> str | None:
    """The `InferenceAmiVersion` with the oldest driver that runs `cuda`; None for instances without GPUs.

    CUDA runs on drivers of its own minor version and newer ones. Where only an older minor version of the same major
    version is offered, that is taken: CUDA guarantees compatibility within a major version.

    Raises:
        NoMachineImage: there is none, or the instance's accelerator cannot run the image.
    """
    shown = f"{cuda[0]}.{cuda[1]}"
    kind = instances.accelerator(instance_type)
    if kind == "none":
        return None
    if kind == "neuron":
        raise NoMachineImage(f"{instance_type} has Neuron accelerators; the image needs NVIDIA GPUs or a CPU")
    if cuda >= (13, 0) and not instances.runs_cuda_13(instance_type):
        raise NoMachineImage(f"the GPUs of {instance_type} are too old for CUDA {shown}, which the image has")
    enough = [name for version, name in MACHINE_IMAGES if version >= cuda]
    if enough:
        return enough[0]
    same_major = [name for version, name in MACHINE_IMAGES if version[0] == cuda[0]]
    if same_major:
        return same_major[-1]
    newest = MACHINE_IMAGES[-1][0]
    raise NoMachineImage(f"CUDA {shown} is newer than any driver of SageMaker's (up to {newest[0]}.{newest[1]})")
