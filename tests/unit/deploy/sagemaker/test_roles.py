from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

from deploy.sagemaker.roles import caller_policy, execution_policy, trust_policy
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import ACCOUNT, REGION, ROLE, VALUES, configuration


def _document(name: str) -> Any:
    """The execution role's policy as CloudFormation makes it in a stack."""
    document = json.dumps(execution_policy(configuration(name)))
    for key, value in (("Partition", "aws"), ("Region", REGION), ("AccountId", ACCOUNT)):
        document = document.replace(f"${{AWS::{key}}}", value)
    return json.loads(document)


@pytest.mark.parametrize("name", VALUES)
def test_a_policy_names_places_and_no_more(name: str) -> None:
    document = _document(name)
    for statement in document["Statement"]:
        if statement["Sid"] in ("Read", "Write", "Image", "List"):
            assert "*" not in json.dumps(statement["Resource"]).replace("/*", "")
    assert len(json.dumps(document)) < 10240


@pytest.mark.parametrize("name", ["real_time", "asynchronous", "adapters", "everything"])
def test_who_deploys_may_do_what_cloudformation_does_for_them_on_their_own_stacks(name: str) -> None:
    statements = {each["Sid"]: each for each in caller_policy(ACCOUNT, REGION)["Statement"]}
    assert statements["Stack"]["Resource"] == f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/slipway-*/*"
    assert statements["MakeRole"]["Resource"] == f"arn:aws:iam::{ACCOUNT}:role/slipway-*"
    allowed = {action for each in statements.values() for action in each["Action"]}
    for resource in template(configuration(name))["Resources"].values():
        handlers = PROVIDER_SCHEMA_MANAGER.get_resource_schema(REGION, resource["Type"]).schema["handlers"]
        for handler in ("create", "read", "update", "delete"):
            needed = set(handlers.get(handler, {}).get("permissions", ()))
            assert {each for each in needed if each.startswith("sagemaker:")} <= allowed
            if resource["Type"] == "AWS::IAM::Role" and handler != "update":
                assert {
                    each for each in needed if not each.endswith(("AttachRolePolicy", "DetachRolePolicy"))
                } <= allowed


def test_who_is_given_a_role_may_pass_it_and_make_none() -> None:
    statements = {each["Sid"]: each for each in caller_policy(ACCOUNT, REGION, ROLE)["Statement"]}
    assert statements["PassRole"]["Resource"] == ROLE
    assert "MakeRole" not in statements


def test_a_policy_is_of_its_regions_partition() -> None:
    document = json.dumps(caller_policy(ACCOUNT, "cn-north-1", repository="slipway"))
    assert set(re.findall(r"arn:(aws[a-z-]*):", document)) == {"aws-cn"}


def test_the_docs_have_the_policies_of_the_execution_role() -> None:
    page = (Path(__file__).parents[4] / "docs/deploy.md").read_text()
    for document in (_document("scale_to_zero"), trust_policy()):
        assert json.dumps(document, indent=2) in page
