from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deploy.sagemaker.configuration import Configuration, Rollout, made_role_arn
from deploy.sagemaker.options import overrides
from deploy.sagemaker.plan import plan
from deploy.sagemaker.preparation import prepare
from deploy.sagemaker.template import NotInTemplates, template, template_yaml
from deploy.sagemaker.yaml_text import to_yaml
from tests.unit.deploy.configurations import IMAGE, REGION, VALUES, configuration, planned
from tests.unit.deploy.matrix import configurations

ROOT = Path(__file__).parents[3]
_LINT = ManualArgs(regions=["eu-west-1", "us-east-1"])
_IN_TEMPLATES = configurations().filter(lambda read: read.routing != "KV_AWARE")
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


def _resolved(made: dict[str, Any], **parameters: str) -> dict[str, Any]:
    """A template's properties with its parameters put in; what refers to other resources stays."""
    values = {name: each.get("Default") for name, each in made["Parameters"].items()} | parameters

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"Ref"}:
            return values.get(value["Ref"], value)
        if set(value) == {"Fn::Sub"}:
            return value["Fn::Sub"].replace("${Name}", values["Name"])
        return {key: walk(item) for key, item in value.items()}

    return {key: walk(each["Properties"]) for key, each in made["Resources"].items()}


def _expected(read: Configuration) -> list[dict[str, Any]]:
    """What CloudFormation is to make, told by the plan's calls."""
    calls, found = plan(read).calls, []
    for call in calls:
        wanted = {key: value for key, value in call.parameters.items() if key != "Tags"}
        if call.operation == "put_role_policy":
            document = json.loads(wanted["PolicyDocument"])
            found[-1]["Policies"] = [{"PolicyName": wanted["PolicyName"], "PolicyDocument": document}]
            continue
        if call.operation == "create_role":
            wanted["AssumeRolePolicyDocument"] = json.loads(wanted["AssumeRolePolicyDocument"])
        if call.operation == "create_model":
            container = {key: each for key, each in wanted["PrimaryContainer"].items() if "Metrics" not in key}
            wanted["PrimaryContainer"] = container
        if read.tags:
            wanted["Tags"] = [{"Key": key, "Value": value} for key, value in read.tags.items()]
        if call.operation == "put_scaling_policy":
            wanted.pop("Tags", None)
        found.append(wanted)
    return found


_REFERENCES = ("ModelName", "EndpointConfigName", "AlarmActions", "ExecutionRoleArn")


def _without_references(value: Any) -> Any:
    """Without what a template says by a reference, and a plan by a name."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in _REFERENCES}
        return {key: _without_references(each) for key, each in kept.items()}
    return [_without_references(each) for each in value] if isinstance(value, list) else value


@settings(deadline=None, max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(_IN_TEMPLATES)
def test_a_template_of_any_configuration_is_what_cloudformation_allows(read: Configuration) -> None:
    assert lint(template_yaml(plan(read), read), config=_LINT) == []


@settings(deadline=None, max_examples=200)
@given(_IN_TEMPLATES)
def test_a_template_says_all_that_the_plan_says_and_how_updates_roll_out(read: Configuration) -> None:
    made = template(plan(read), read)
    secrets = {f"Env{''.join(map(str.capitalize, name.split('_')))}": value for name, value in read.env.items()}
    found = _resolved(made, **{name: secrets[name] for name in secrets.keys() & made["Parameters"].keys()})
    for each in found.values():
        assert ("DeploymentConfig" in each) is (
            read.rollout != Rollout() and ("EndpointConfigName" in each or "ModelName" in each.get("Specification", {}))
        )
    rollout = {"DeploymentConfig", "RetainAllVariantProperties", "ExcludeRetainedVariantProperties"}
    bare = [{key: value for key, value in each.items() if key not in rollout} for each in found.values()]
    assert [_without_references(each) for each in bare] == [_without_references(each) for each in _expected(read)]


@settings(deadline=None, max_examples=200)
@given(_IN_TEMPLATES, _IN_TEMPLATES)
def test_a_templates_name_can_be_any(read: Configuration, other: Configuration) -> None:
    renamed = replace(read, name=other.name)
    if read.create_role:
        renamed = replace(renamed, role=made_role_arn(read.account, read.region, other.name))
    made, wanted = template(plan(read), read), template(plan(renamed), renamed)
    assert list(_resolved(made, Name=other.name).values()) == list(_resolved(wanted).values())


def test_a_template_of_several_instance_types_and_everything_is_what_cloudformation_allows() -> None:
    changes = {
        "push": None,
        "image": IMAGE,
        "component": {"placement": None},
        "rollout": {"strategy": "rolling", "alarms": ["errors"]},
    }
    made = template_yaml(planned("everything", **changes), configuration("everything", **changes))
    assert lint(made, config=_LINT) == []


def test_a_template_that_makes_the_role_has_no_parameters_that_the_roles_policy_would_not_follow() -> None:
    changes = {"create_role": True, "role": None}
    made = template(planned("private", **changes), configuration("private", **changes))
    assert list(made["Parameters"]) == ["Name", "InstanceType"]


def test_an_alarm_of_ones_own_keeps_its_name() -> None:
    changes = {"rollout": {"alarms": ["my-llm-errors"]}}
    made = template(planned("real_time", **changes), configuration("real_time", **changes))
    config = made["Resources"]["Endpoint"]["Properties"]["DeploymentConfig"]
    assert config["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "my-llm-errors"}]}


def test_a_template_holds_no_credentials() -> None:
    made = template_yaml(planned("real_time"), configuration("real_time"))
    assert "hf_abcdefghijklmnop" not in made
    assert yaml.safe_load(made)["Parameters"]["EnvHfToken"]["NoEcho"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"path": "/other"}},
        {"metrics": {"period": 30}},
        {"push": "a:b", "image": None},
        {"component": {"placement": "SPREAD"}},
        {"routing": "KV_AWARE"},
    ],
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
