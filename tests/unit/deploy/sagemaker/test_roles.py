from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

from deploy.sagemaker.roles import (
    OF_STACK,
    Place,
    caller_policy,
    check_role,
    execution_policy,
    push_policy,
    trust_policy,
)
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import ACCOUNT, REGION, ROLE, VALUES, configuration

PLACE = Place("aws", REGION, ACCOUNT)


class NoSuchEntityException(ClientError):
    """What IAM's client raises."""


def error(operation: str, code: str) -> ClientError:
    kind = NoSuchEntityException if code == "NoSuchEntity" else ClientError
    return kind({"Error": {"Code": code, "Message": "no"}}, operation)


class Iam:
    """The answers of IAM and STS to what a check asks."""

    exceptions = SimpleNamespace(NoSuchEntityException=NoSuchEntityException)

    def __init__(self, **changes: Any) -> None:
        self.trust: Any = changes.get("trust", trust_policy())
        self.denied: set[str] = changes.get("denied", set())
        self.caller: str = changes.get("caller", f"arn:aws:iam::{ACCOUNT}:user/someone")
        self.errors: dict[str, Any] = changes.get("errors", {})

    def get_role(self, RoleName: str) -> dict[str, Any]:  # noqa: N803
        self._fail("get_role")
        assert RoleName == "models"
        return {"Role": {"AssumeRolePolicyDocument": self.trust}}

    def get_caller_identity(self) -> dict[str, Any]:
        self._fail("get_caller_identity")
        return {"Arn": self.caller}

    def simulate_principal_policy(self, ActionNames: list[str], **more: Any) -> dict[str, Any]:  # noqa: N803
        self._fail("simulate_principal_policy")
        return {
            "EvaluationResults": [
                {"EvalActionName": action, "EvalDecision": "implicitDeny" if action in self.denied else "allowed"}
                for action in ActionNames
            ]
        }

    def _fail(self, operation: str) -> None:
        if operation in self.errors:
            raise self.errors[operation]


def _texts(iam: Iam, name: str = "private") -> list[tuple[bool, str]]:
    return [(each.problem, each.text) for each in check_role(iam, iam, configuration(name))]


def test_a_right_role_gives_no_findings() -> None:
    assert _texts(Iam()) == []


def test_a_role_that_will_be_made_is_not_looked_up() -> None:
    assert _texts(Iam(errors={"get_role": AssertionError()}), "everything") == []


@pytest.mark.parametrize(
    ("changes", "problem", "said"),
    [
        ({"errors": {"get_role": error("get_role", "NoSuchEntity")}}, True, "there is no such role"),
        ({"errors": {"get_role": error("get_role", "AccessDenied")}}, False, "could not be checked"),
        ({"trust": {"Statement": []}}, True, "its trust policy must let sagemaker.amazonaws.com"),
        ({"trust": json.dumps({"Statement": {"Effect": "Deny"}})}, True, "trust policy"),
        ({"denied": {"s3:GetObject"}}, True, "the role may not do s3:GetObject on arn:aws:s3:::models/llama/*"),
        ({"denied": {"ecr:BatchGetImage"}}, True, "the role may not do ecr:BatchGetImage on"),
        ({"denied": {"logs:PutLogEvents"}}, False, "the role may not do logs:PutLogEvents"),
        ({"denied": {"iam:PassRole"}}, True, "may not do iam:PassRole on"),
        ({"caller": f"arn:aws:sts::{ACCOUNT}:assumed-role/Admin/me"}, False, "not checked: that"),
        (
            {"errors": {"simulate_principal_policy": error("simulate", "AccessDenied")}},
            False,
            "iam:SimulatePrincipalPolicy is not allowed",
        ),
        ({"errors": {"get_caller_identity": error("get", "AccessDenied")}}, False, "who is calling"),
    ],
)
def test_what_is_wrong_with_a_role_is_said(changes: dict[str, Any], problem: bool, said: str) -> None:
    findings = _texts(Iam(**changes))
    assert any(found is problem and said in text for found, text in findings)


@pytest.mark.parametrize("name", VALUES)
def test_a_policy_names_places_and_no_more(name: str) -> None:
    document = execution_policy(configuration(name), PLACE)
    for statement in document["Statement"]:
        if statement["Sid"] in ("Read", "Write", "Image", "List"):
            assert "*" not in json.dumps(statement["Resource"]).replace("/*", "")
    assert len(json.dumps(document)) < 10240


def test_who_deploys_may_do_what_cloudformation_does_for_them_on_their_own_stacks() -> None:
    statements = {each["Sid"]: each for each in caller_policy(ROLE, REGION, ACCOUNT)["Statement"]}
    assert statements["Stack"]["Resource"] == f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/slipway-*/*"
    allowed = {action for each in statements.values() for action in each["Action"]}
    for name in ("real_time", "asynchronous", "adapters"):
        for resource in template(configuration(name))["Resources"].values():
            schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema(REGION, resource["Type"]).schema
            for handler in ("create", "read", "update", "delete"):
                needed = set(schema["handlers"][handler]["permissions"])
                assert {each for each in needed if each.startswith("sagemaker:")} <= allowed


@pytest.mark.parametrize("name", VALUES)
def test_the_policy_of_a_stack_is_that_of_the_place_where_it_is_made(name: str) -> None:
    of_stack = json.dumps(execution_policy(configuration(name), OF_STACK))
    for key, value in (("Partition", "aws"), ("Region", REGION), ("AccountId", ACCOUNT)):
        of_stack = of_stack.replace(f"${{AWS::{key}}}", value)
    assert json.loads(of_stack) == execution_policy(configuration(name), PLACE)


def test_a_policy_is_of_its_roles_partition() -> None:
    role = f"arn:aws-cn:iam::{ACCOUNT}:role/models"
    documents = [
        caller_policy(role, "cn-north-1", ACCOUNT),
        push_policy(role, "cn-north-1", ACCOUNT, "slipway"),
        execution_policy(configuration("private"), Place.of_role(role, "cn-north-1")),
    ]
    assert set(re.findall(r"arn:(aws[a-z-]*):", json.dumps(documents))) == {"aws-cn"}


def test_the_docs_have_the_policies_of_the_execution_role() -> None:
    page = (Path(__file__).parents[4] / "docs/deploy.md").read_text()
    for document in (
        execution_policy(configuration("scale_to_zero"), PLACE),
        trust_policy(),
    ):
        assert json.dumps(document, indent=2) in page
