from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.session import get_session
from botocore.stub import Stubber

from deploy.sagemaker.ecr import EcrImage, ecr_image, push

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


IMAGE = "999999999999.dkr.ecr.eu-west-1.amazonaws.com/slipway:1"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands of docker, which all succeed."""
    ran: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **more: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return ran


@pytest.fixture
def ecr() -> Any:
    return boto3.client("ecr", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="x")


@pytest.fixture
def answers(ecr: Any) -> Iterator[Stubber]:
    with Stubber(ecr) as answers:
        yield answers
        answers.assert_no_pending_responses()


def add_token(answers: Stubber) -> None:
    answers.add_response(
        "get_authorization_token", {"authorizationData": [{"authorizationToken": "QVdTOnNlY3JldA=="}]}, {}
    )


def test_an_account_that_allows_pushes_alone_is_pushed_to(
    ecr: Any, answers: Stubber, ran: list[tuple[str, ...]]
) -> None:
    answers.add_client_error("describe_repositories", "AccessDeniedException")
    add_token(answers)
    push(ecr, "slipway:gpu", IMAGE, lambda line: None)
    assert ran[-1] == ("docker", "push", IMAGE)


@pytest.mark.usefixtures("ran")
def test_the_repository_is_made_in_the_account_of_the_image(ecr: Any, answers: Stubber) -> None:
    asked = {"registryId": "999999999999", "repositoryNames": ["slipway"]}
    answers.add_client_error("describe_repositories", "RepositoryNotFoundException", expected_params=asked)
    made = {"registryId": "999999999999", "repositoryName": "slipway"}
    answers.add_response("create_repository", {}, made | {"imageScanningConfiguration": {"scanOnPush": True}})
    add_token(answers)
    push(ecr, "slipway:gpu", IMAGE, lambda line: None)
