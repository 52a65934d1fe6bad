"""Machine images and GPUs: what is chosen where nothing is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session

from deploy.sagemaker import instances

SAGEMAKER = get_session().get_service_model("sagemaker")


def _choices(shape: str) -> list[str]:
    found: Any = SAGEMAKER.shape_for(shape)
    values: list[str] = found.enum
    return values


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("x/slipway:0.1.0-cu128", (12, 8)),
        ("x/slipway:cuda12.4", (12, 4)),
        ("x/slipway:0.1_cu130", (13, 0)),
        ("x/slipway:0.1.0", instances.IMAGE_CUDA),
        ("x/cu118:focus", instances.IMAGE_CUDA),
        ("x:5000/slipway@sha256:00", instances.IMAGE_CUDA),
    ],
)
def test_an_images_cuda_is_in_its_tag_or_that_of_this_version(image: str, version: tuple[int, int]) -> None:
    assert instances.cuda_of_image(image) == version


@pytest.mark.parametrize(
    ("version", "machine_image"),
    [
        ((11, 8), "al2-ami-sagemaker-inference-gpu-2-1"),
        ((12, 2), "al2-ami-sagemaker-inference-gpu-2-1"),
        ((12, 4), "al2-ami-sagemaker-inference-gpu-3-1"),
        ((12, 8), "al2023-ami-sagemaker-inference-gpu-4-1"),
        ((13, 0), "al2023-ami-sagemaker-inference-gpu-4-1"),
        ((13, 1), "al2023-ami-sagemaker-inference-gpu-4-1"),
    ],
)
def test_the_machine_image_has_a_driver_for_the_images_cuda(version: tuple[int, int], machine_image: str) -> None:
    assert instances.machine_image(version, "ml.g5.xlarge") == machine_image
    assert instances.machine_image(version, "ml.c7i.xlarge") is None


def test_the_machine_images_are_sagemakers() -> None:
    known = _choices("ProductionVariantInferenceAmiVersion")
    assert {name for _, name in instances.MACHINE_IMAGES} <= set(known)


def test_the_cuda_of_this_version_is_that_of_the_gpu_images_lock() -> None:
    lock = (Path(__file__).parents[4] / "requirements/gpu.txt").read_text()
    found = re.search(r"^nvidia-cuda-runtime==(\d+)\.(\d+)", lock, re.M)
    assert found
    assert (int(found[1]), int(found[2])) == instances.IMAGE_CUDA


def test_gpus_are_known_for_every_gpu_instance_but_the_newest_family() -> None:
    types = _choices("ProductionVariantInstanceType")
    unknown = {instances.family(each) for each in types if instances.gpus(each) is None}
    assert unknown == {"g7"}
    assert instances.gpus("ml.g6e.12xlarge") == 4
    assert instances.gpus("ml.p5.4xlarge") == 1
    assert instances.gpus("ml.m5.large") == 0
