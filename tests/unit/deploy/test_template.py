from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.sagemaker.options import overrides
from deploy.sagemaker.preparation import prepare
from deploy.sagemaker.template import NotInTemplates, template, template_yaml
from deploy.sagemaker.yaml_text import to_yaml
from tests.unit.deploy.configurations import REGION, VALUES, configuration, planned

ROOT = Path(__file__).parents[3]
_LINT = ManualArgs(regions=["eu-west-1", "us-east-1"])
IN_TEMPLATES = [name for name in VALUES if name != "everything"]


@pytest.mark.parametrize("name", IN_TEMPLATES)
def test_a_template_is_what_cloudformation_allows(name: str) -> None:
    made = template_yaml(planned(name), configuration(name))
    assert lint(made, config=_LINT) == []


@pytest.mark.parametrize("name", IN_TEMPLATES)
def test_a_template_has_a_resource_for_each_of_the_plans(name: str) -> None:
    made = template(planned(name), configuration(name))
    assert len(made["Resources"]) == len(planned(name).resources)
    assert yaml.safe_load(template_yaml(planned(name), configuration(name))) == made


def test_a_template_can_make_the_role() -> None:
    changes = {"create_role": True, "role": None}
    made = template(planned("private", **changes), configuration("private", **changes))
    role = next(each for each in made["Resources"].values() if each["Type"] == "AWS::IAM::Role")
    assert role["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    assert lint(to_yaml(made), config=_LINT) == []


def test_a_template_says_the_variants_settings_as_the_plan_does() -> None:
    config = next(call for call in planned("private").calls if call.operation == "create_endpoint_config")
    made = template(planned("private"), configuration("private"))["Resources"]["EndpointConfiguration"]["Properties"]
    planned_variant = dict(config.parameters["ProductionVariants"][0])
    variant = dict(made["ProductionVariants"][0])
    for key in ("ModelName", "InstanceType"):
        del planned_variant[key], variant[key]
    assert variant == planned_variant
    assert made["DataCaptureConfig"] == config.parameters["DataCaptureConfig"]


def test_a_template_holds_no_credentials() -> None:
    made = template_yaml(planned("real_time"), configuration("real_time"))
    assert "hf_abcdefghijklmnop" not in made
    assert yaml.safe_load(made)["Parameters"]["EnvHfToken"]["NoEcho"] is True


@pytest.mark.parametrize(
    "changes", [{"metrics": {"path": "/other"}}, {"metrics": {"period": 30}}, {"push": "a:b", "image": None}]
)
def test_what_cloudformation_has_no_word_for_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotInTemplates):
        template(planned("real_time", **changes), configuration("real_time", **changes))


def test_the_template_in_the_repository_is_that_of_the_example() -> None:
    prepared = prepare(ROOT / "examples/deploy/real_time.toml", overrides({}), REGION, None)
    written = (ROOT / "deploy/templates/endpoint.yaml").read_text()
    assert written == template_yaml(prepared.plan, prepared.configuration)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8).filter(lambda key: key != "<<"), _JSON, min_size=1, max_size=4))
def test_yaml_says_what_json_says(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value
