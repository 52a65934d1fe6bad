"""Names, machine images, timeouts: what is chosen where nothing is said."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.sagemaker import cuda, images, instances, partitions, timeouts
from deploy.sagemaker.naming import LONGEST_NAME, NAME, fingerprint, is_versioned, name_from_model, versioned

SAGEMAKER = get_session().get_service_model("sagemaker")


def _choices(shape: str) -> list[str]:
    found: Any = SAGEMAKER.shape_for(shape)
    values: list[str] = found.enum
    return values


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-1-8b-instruct"),
        ("s3://bucket/models/llama/", "llama"),
        ("s3://bucket/llama.tar.gz", "llama"),
        ("s3://bucket/", "bucket"),
        ("s3://bucket", "bucket"),
        ("___", ""),
    ],
)
def test_a_name_is_made_of_the_model(model: str, name: str) -> None:
    assert name_from_model(model) == name


@settings(deadline=None)
@given(st.text())
def test_whatever_the_model_its_name_is_one_or_empty(model: str) -> None:
    name = name_from_model(model)
    assert not name or (NAME.fullmatch(name) and len(name) <= LONGEST_NAME)


@settings(deadline=None)
@given(st.from_regex(NAME, fullmatch=True).filter(lambda name: len(name) <= LONGEST_NAME))
def test_a_versioned_name_is_short_enough_and_known_again(name: str) -> None:
    made = versioned(name, {"a": 1})
    assert len(made) <= 63
    assert is_versioned(made, name)
    assert not is_versioned(f"{name}-2-{made[-10:]}", name)


def test_a_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("x/slipway:0.1.0-cu128", (12, 8)),
        ("x/slipway:cuda12.4", (12, 4)),
        ("x/slipway:0.1_cu130", (13, 0)),
        ("x/slipway:0.1.0", cuda.IMAGE_CUDA),
        ("x/cu118:focus", cuda.IMAGE_CUDA),
        ("x:5000/slipway@sha256:00", cuda.IMAGE_CUDA),
    ],
)
def test_an_images_cuda_is_in_its_tag_or_that_of_this_version(image: str, version: tuple[int, int]) -> None:
    assert cuda.cuda_of_image(image) == version


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
    assert cuda.machine_image(version, "ml.g5.xlarge") == machine_image
    assert cuda.machine_image(version, "ml.c7i.xlarge") is None


def test_the_machine_images_are_sagemakers() -> None:
    known = _choices("ProductionVariantInferenceAmiVersion")
    assert {name for _, name in cuda.MACHINE_IMAGES} <= set(known)


def test_the_cuda_of_this_version_is_that_of_the_gpu_images_lock() -> None:
    lock = (Path(__file__).parents[3] / "requirements/gpu.txt").read_text()
    found = re.search(r"^nvidia-cuda-runtime==(\d+)\.(\d+)", lock, re.M)
    assert found
    assert (int(found[1]), int(found[2])) == cuda.IMAGE_CUDA


def test_gpus_are_known_for_every_gpu_instance_but_the_newest_family() -> None:
    types = _choices("ProductionVariantInstanceType")
    unknown = {instances.family(each) for each in types if instances.gpus(each) is None}
    assert unknown == {"g7"}
    assert instances.gpus("ml.g6e.12xlarge") == 4
    assert instances.gpus("ml.p5.4xlarge") == 1
    assert instances.gpus("ml.m5.large") == 0


def test_a_volume_is_for_instances_without_disks_of_their_own_as_the_sagemaker_sdk_has_it() -> None:
    supported = importlib.import_module("sagemaker.core.common_utils").volume_size_supported
    types = _choices("ProductionVariantInstanceType")
    differing = {instances.family(each) for each in types if instances.takes_a_volume(each) != supported(each)}
    # Newer than the SDK's list; EC2 has them with NVMe disks.
    assert differing == {"g7", "p6-b300", "p6e-gb200"}


@settings(deadline=None)
@given(st.floats(0.1, 5000), st.booleans())
def test_timeouts_are_whole_minutes_that_sagemaker_allows(size: float, downloads: bool) -> None:
    for seconds in (timeouts.download_timeout(size), timeouts.startup_timeout(size, container_downloads=downloads)):
        assert timeouts.SHORTEST <= seconds <= timeouts.LONGEST
        assert seconds % 60 == 0
    assert timeouts.startup_timeout(size, container_downloads=True) >= timeouts.startup_timeout(
        size, container_downloads=False
    )


_PARTITIONS: Any = get_session().get_data("endpoints")["partitions"]


@pytest.mark.parametrize("partition", _PARTITIONS, ids=lambda each: each["partition"])
def test_every_region_of_sagemaker_has_its_partitions_arns_and_hosts(partition: dict[str, Any]) -> None:
    regions = get_session().get_available_regions("sagemaker", partition["partition"])
    assert regions
    for region in regions:
        assert partitions.partition(region) == partition["partition"]
        assert partitions.domain(region) == partition["dnsSuffix"]
        host = images.registry("111122223333", region)
        assert images.ecr_image(f"{host}/slipway:gpu") == images.EcrImage("111122223333", region, "slipway")


def test_a_pushed_image_keeps_its_tag_and_gets_the_accounts_registry() -> None:
    made = images.pushed_image("localhost:5000/slipway:gpu", "team/slipway", "111122223333", "eu-west-1")
    assert made == "111122223333.dkr.ecr.eu-west-1.amazonaws.com/team/slipway:gpu"
    assert images.pushed_image("slipway", "slipway", "1" * 12, "cn-north-1").endswith("amazonaws.com.cn/slipway:latest")
    found = images.ecr_image(made)
    assert found is not None
    assert (found.account, found.region, found.repository) == ("111122223333", "eu-west-1", "team/slipway")
