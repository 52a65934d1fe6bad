from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.sagemaker.execution_role import execution_policy, trust_policy
from tests.unit.deploy.sagemaker.configurations import ACCOUNT, REGION, VALUES, configuration


def _document(name: str) -> Any:
    """Return the execution role's policy, as CloudFormation creates it in a stack."""

    def substituted(value: dict[str, Any]) -> Any:
        return value.get("Fn::Sub", value)

    document = json.dumps(execution_policy(configuration(name)))
    for key, value in (("Partition", "aws"), ("Region", REGION), ("AccountId", ACCOUNT)):
        document = document.replace(f"${{AWS::{key}}}", value)
    return json.loads(document, object_hook=substituted)


@pytest.mark.parametrize("name", VALUES)
def test_a_policy_names_places_and_no_more(name: str) -> None:
    document = _document(name)
    for statement in document["Statement"]:
        if statement["Sid"] in ("Read", "Write", "Image", "List"):
            assert "*" not in json.dumps(statement["Resource"]).replace("/*", "")
    assert len(json.dumps(document)) < 10240


@pytest.mark.parametrize(
    ("file", "document"),
    [("execution_role.json", _document("scale_to_zero")), ("trust_policy.json", trust_policy())],
)
def test_the_policies_that_the_docs_link_to_are_those_of_the_stack(file: str, document: Any) -> None:
    written = (Path(__file__).parents[4] / "deploy" / "templates" / file).read_text()
    assert written == json.dumps(document, indent=2) + "\n"


def _statements(name: str) -> dict[str, Any]:
    return {statement["Sid"]: statement for statement in _document(name)["Statement"]}


def test_a_role_may_read_the_requests_and_write_the_answers_of_asynchronous_calls() -> None:
    made = _statements("asynchronous")
    assert made["Read"]["Resource"] == ["arn:aws:s3:::models/llama/*", "arn:aws:s3:::questions/*"]
    assert made["List"]["Resource"] == ["arn:aws:s3:::models", "arn:aws:s3:::questions"]
    assert made["Write"]["Action"] == ["s3:AbortMultipartUpload", "s3:PutObject"]
    assert made["Write"]["Resource"] == ["arn:aws:s3:::answers/out/*", "arn:aws:s3:::answers/failed/*"]
    assert made["Notify"]["Resource"] == ["arn:aws:sns:eu-west-1:111122223333:answers"]


def test_a_role_may_write_captured_requests_and_core_dumps() -> None:
    written = ["arn:aws:s3:::captured/all/*", "arn:aws:s3:::dumps/llm/*"]
    assert _statements("everything")["Write"]["Resource"] == written
    assert "Write" not in _statements("scale_to_zero")


def test_a_role_may_connect_a_container_to_a_vpc() -> None:
    assert "Network" not in _statements("asynchronous")
    in_vpc = {"Model": {"VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}}}
    policy = execution_policy(msgspec.structs.replace(configuration("asynchronous"), properties=in_vpc))
    (network,) = [statement for statement in policy["Statement"] if statement["Sid"] == "Network"]
    assert "ec2:CreateNetworkInterface" in network["Action"]
