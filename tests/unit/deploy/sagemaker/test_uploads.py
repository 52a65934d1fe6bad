from __future__ import annotations

from typing import Any

import pytest
from botocore.session import get_session

from deploy.sagemaker import uploads

_PARTITIONS: Any = get_session().get_data("endpoints")["partitions"]


@pytest.mark.parametrize("partition", _PARTITIONS, ids=lambda each: each["partition"])
def test_every_region_of_sagemaker_has_its_partitions_registry(partition: dict[str, Any]) -> None:
    regions = get_session().get_available_regions("sagemaker", partition["partition"])
    assert regions
    for region in regions:
        host = uploads.registry("111122223333", region)
        assert host == f"111122223333.dkr.ecr.{region}.{partition['dnsSuffix']}"
        assert uploads.ecr_image(f"{host}/slipway:gpu") == uploads.EcrImage("111122223333", region, "slipway")


def test_a_pushed_image_keeps_its_tag_and_gets_the_accounts_registry() -> None:
    made = uploads.pushed_image("localhost:5000/slipway:gpu", "team/slipway", "111122223333", "eu-west-1")
    assert made == "111122223333.dkr.ecr.eu-west-1.amazonaws.com/team/slipway:gpu"
    china = uploads.pushed_image("slipway", "slipway", "1" * 12, "cn-north-1")
    assert china.endswith("amazonaws.com.cn/slipway:latest")
    found = uploads.ecr_image(made)
    assert found is not None
    assert (found.account, found.region, found.repository) == ("111122223333", "eu-west-1", "team/slipway")


@pytest.mark.parametrize("image", ["docker.io/slipway", "slipway:gpu", "ghcr.io/a/b@sha256:00"])
def test_an_image_of_another_registry_has_no_account(image: str) -> None:
    assert uploads.ecr_image(image) is None
