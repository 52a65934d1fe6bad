from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_the_docs_have_the_policies_of_the_execution_role() -> None:
    page = (Path(__file__).parents[4] / "docs/deploy.md").read_text()
    for document in (_document("scale_to_zero"), trust_policy()):
        assert json.dumps(document, indent=2) in page
