from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.policies import caller_policy, execution_policy, push_policy, trust_policy
from deploy.sagemaker.role import check_role
from tests.unit.deploy.cloud import error
from tests.unit.deploy.configurations import ACCOUNT, REGION, ROLE, VALUES, configuration


class Iam:
    """IAM's answers to what a check asks."""

    def __init__(self, **changes: Any) -> None:
        self.trust: Any = changes.get("trust", trust_policy())
        self.denied: set[str] = changes.get("denied", set())
        self.caller: str = changes.get("caller", f"arn:aws:iam::{ACCOUNT}:user/someone")
        self.errors: dict[str, Any] = changes.get("errors", {})

    def call(self, call: ApiCall) -> dict[str, Any]:
        if call.operation in self.errors:
            raise self.errors[call.operation]
        if call.operation == "get_role":
            return {"Role": {"AssumeRolePolicyDocument": self.trust}}
        if call.operation == "get_caller_identity":
            return {"Arn": self.caller}
        assert call.operation == "simulate_principal_policy"
        return {
            "EvaluationResults": [
                {"EvalActionName": action, "EvalDecision": "implicitDeny" if action in self.denied else "allowed"}
                for action in call.parameters["ActionNames"]
            ]
        }


def _texts(iam: Iam, name: str = "private") -> list[tuple[bool, str]]:
    return [(each.problem, each.text) for each in check_role(iam, configuration(name))]


def test_a_right_role_gives_no_findings() -> None:
    assert _texts(Iam()) == []


def test_a_role_that_will_be_made_is_not_looked_up() -> None:
    assert check_role(Iam(errors={"get_role": AssertionError()}), configuration("everything")) == ()


@pytest.mark.parametrize(
    ("changes", "problem", "said"),
    [
        ({"errors": {"get_role": error("get_role", "no", "NoSuchEntity")}}, True, "there is no such role"),
        ({"errors": {"get_role": error("get_role", "no", "AccessDenied")}}, False, "could not be checked"),
        ({"trust": {"Statement": []}}, True, "its trust policy must let sagemaker.amazonaws.com"),
        ({"trust": json.dumps({"Statement": {"Effect": "Deny"}})}, True, "trust policy"),
        ({"denied": {"s3:GetObject"}}, True, "the role may not do s3:GetObject on arn:aws:s3:::models/llama/*"),
        ({"denied": {"ecr:BatchGetImage"}}, True, "the role may not do ecr:BatchGetImage on"),
        ({"denied": {"logs:PutLogEvents"}}, False, "the role may not do logs:PutLogEvents"),
        ({"denied": {"iam:PassRole"}}, True, "may not do iam:PassRole on"),
        ({"caller": f"arn:aws:sts::{ACCOUNT}:assumed-role/Admin/me"}, False, "not checked: that"),
        (
            {"errors": {"simulate_principal_policy": error("simulate", "no", "AccessDenied")}},
            False,
            "iam:SimulatePrincipalPolicy is not allowed",
        ),
        ({"errors": {"get_caller_identity": error("get", "no", "AccessDenied")}}, False, "who is calling"),
    ],
)
def test_what_is_wrong_with_a_role_is_said(changes: dict[str, Any], problem: bool, said: str) -> None:
    findings = _texts(Iam(**changes))
    assert any(found is problem and said in text for found, text in findings)


@pytest.mark.parametrize("name", VALUES)
def test_a_policy_names_places_and_no_more(name: str) -> None:
    document = execution_policy(configuration(name))
    for statement in document["Statement"]:
        if statement["Sid"] in ("Read", "Write", "Image", "List"):
            assert "*" not in json.dumps(statement["Resource"]).replace("/*", "")
    assert len(json.dumps(document)) < 10240


def test_the_docs_have_the_policies_that_the_code_makes() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[3] / "docs/deploy.md").read_text()
    for document in (
        caller_policy(ACCOUNT, REGION, ROLE),
        execution_policy(configuration("scale_to_zero")),
        trust_policy(),
        push_policy(ACCOUNT, REGION, "slipway"),
    ):
        assert json.dumps(document, indent=2) in page
