from __future__ import annotations

from typing import Any

import pytest
from botocore.session import get_session

from deploy.sagemaker.ecr import EcrImage, ecr_image

_PARTITIONS: Any = get_session().get_data("endpoints")["partitions"]


@pytest.mark.parametrize("partition", _PARTITIONS, ids=lambda each: each["partition"])
def test_an_image_in_any_partitions_registry_is_taken_apart(partition: dict[str, Any]) -> None:
    for region in get_session().get_available_regions("sagemaker", partition["partition"]):
        host = f"111122223333.dkr.ecr.{region}.{partition['dnsSuffix']}"
        for version in (":gpu", "@sha256:00", ""):
            found = ecr_image(f"{host}/team/slipway{version}")
            assert found == EcrImage("111122223333", region, "team/slipway")


@pytest.mark.parametrize("image", ["docker.io/slipway", "slipway:gpu", "ghcr.io/a/b@sha256:00"])
def test_an_image_of_another_registry_has_no_account(image: str) -> None:
    assert ecr_image(image) is None
