from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import get_session
from cfnlint.api import lint
from cfnlint.config import ManualArgs
from hypothesis import Phase, given, settings

from deploy.sagemaker.configuration import (
    Configuration,
    ConfigurationError,
    merge_tables,
    read_configuration,
    read_file,
)
from deploy.sagemaker.template import MACHINE_IMAGE, secrets, template
from deploy.yaml_text import as_yaml
from tests.unit.deploy.sagemaker.configurations import REGION, VALUES, configuration
from tests.unit.deploy.sagemaker.random_configurations import configurations

ROOT = Path(__file__).parents[4]
_LINT = ManualArgs(regions=["eu-west-1", "us-east-1"])


@pytest.mark.parametrize("name", VALUES)
def test_a_template_is_what_cloudformation_allows(name: str) -> None:
    assert lint(as_yaml(template(configuration(name))), config=_LINT) == []


@settings(deadline=None, max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(configurations())
def test_a_template_of_any_configuration_is_what_cloudformation_allows(read: Configuration) -> None:
    assert lint(as_yaml(template(read)), config=_LINT) == []


@pytest.mark.parametrize(
    "rollout",
    [
        {"strategy": strategy, "step_percent": 25, "alarms": ["errors"]}
        for strategy in ("blue-green", "canary", "linear", "rolling")
    ],
    ids=lambda rollout: rollout["strategy"],
)
@pytest.mark.parametrize("name", ["real_time", "adapters"])
def test_every_rollout_is_what_cloudformation_allows(name: str, rollout: dict[str, Any]) -> None:
    made = template(configuration(name, rollout=rollout))
    assert lint(as_yaml(made), config=_LINT) == []
    config = made["Resources"]["Endpoint"]["Properties"]["DeploymentConfig"]
    assert config["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "errors"}]}


RESOURCES = {
    "real_time": ["Model", "EndpointConfiguration", "Endpoint", "ScalableTarget", "ScalingPolicyTracking"],
    "asynchronous": [
        *("Model", "EndpointConfiguration", "Endpoint", "ScalableTarget"),
        *("ScalingPolicyTracking", "ScalingPolicyFromZero", "Alarm"),
    ],
    "scale_to_zero": [
        *("Model", "EndpointConfiguration", "Endpoint", "InferenceComponent", "ScalableTarget"),
        *("ScalingPolicyTracking", "ScalingPolicyFromZero", "Alarm"),
    ],
    "adapters": [
        *("Model", "EndpointConfiguration", "Endpoint", "InferenceComponent", "AdapterFrench", "AdapterGerman"),
    ],
    "private": ["Model", "EndpointConfiguration", "Endpoint"],
}


@pytest.mark.parametrize("name", RESOURCES)
def test_a_template_has_all_of_a_deployment(name: str) -> None:
    made = template(configuration(name))
    assert list(made["Resources"]) == RESOURCES[name]
    assert yaml.safe_load(as_yaml(made)) == made
    assert "&id" not in as_yaml(made)


def test_a_role_that_is_made_has_its_policy_and_no_name() -> None:
    made = template(configuration("everything"))["Resources"]
    assert "RoleName" not in made["Role"]["Properties"]
    assert len(made["Role"]["Properties"]["Policies"]) == 1
    for name in ("Model", "EndpointConfiguration"):
        assert made[name]["Properties"]["ExecutionRoleArn"] == {"Fn::GetAtt": ["Role", "Arn"]}


def test_nothing_that_is_replaced_has_a_name_of_its_own() -> None:
    for name in VALUES:
        made = template(configuration(name))["Resources"]
        for resource, key in (("Model", "ModelName"), ("EndpointConfiguration", "EndpointConfigName")):
            assert key not in made[resource]["Properties"]


def test_scaling_comes_after_what_is_scaled_and_adapters_after_the_model() -> None:
    made = template(configuration("everything"))["Resources"]
    after = {name: each.get("DependsOn") for name, each in made.items()}
    assert after["InferenceComponent"] == "Endpoint"
    assert after["AdapterFrench"] == after["ScalableTarget"] == "InferenceComponent"
    assert after["ScalingPolicyTracking"] == after["ScalingPolicyFromZero"] == "ScalableTarget"
    assert made["Alarm"]["Properties"]["AlarmActions"] == [{"Ref": "ScalingPolicyFromZero"}]
    assert template(configuration("real_time"))["Resources"]["ScalableTarget"]["DependsOn"] == "Endpoint"


@settings(deadline=None, max_examples=100)
@given(configurations())
def test_a_rollout_is_how_an_update_replaces_what_runs(read: Configuration) -> None:
    for each in template(read)["Resources"].values():
        rolls = each["Type"] == "AWS::SageMaker::Endpoint" or "ModelName" in each["Properties"].get("Specification", {})
        assert ("DeploymentConfig" in each["Properties"]) is (rolls and read.rollout is not None)


@settings(deadline=None, max_examples=100)
@given(configurations())
def test_every_arn_and_image_is_of_the_regions_partition(read: Configuration) -> None:
    text = json.dumps(template(read))
    aws = {"cn-north-1": "aws-cn", "us-gov-west-1": "aws-us-gov", "eusc-de-east-1": "aws-eusc"}.get(read.region, "aws")
    assert set(re.findall(r"arn:(aws[a-z-]*|\$\{AWS::Partition\}):", text)) <= {aws, "${AWS::Partition}"}
    assert (".amazonaws.com.cn/" in text) is (aws == "aws-cn")


def _environment(read: Configuration) -> dict[str, str]:
    """Return the environment of the container, with the values of the parameters."""
    container = template(read)["Resources"]["Model"]["Properties"]["PrimaryContainer"]
    values = {parameter: read.environment[variable] for variable, parameter in secrets(read).items()}
    return {
        name: values[value["Ref"]] if isinstance(value, dict) else value
        for name, value in container.get("Environment", {}).items()
    }


@settings(deadline=None, max_examples=100)
@given(configurations())
def test_the_container_gets_its_environment(read: Configuration) -> None:
    hub = {} if read.from_s3 else {"HF_MODEL_ID": read.model}
    assert _environment(read) == hub | read.environment


def test_the_machine_image_is_one_of_sagemakers_with_a_driver_for_the_gpu_images_cuda() -> None:
    known: Any = get_session().get_service_model("sagemaker").shape_for("ProductionVariantInferenceAmiVersion")
    assert MACHINE_IMAGE in known.enum
    lock = (ROOT / "requirements/gpu.txt").read_text()
    assert re.search(r"^nvidia-cuda-runtime==13\.", lock, re.M)


@pytest.mark.parametrize(
    ("changes", "machine_image"),
    [
        ({"instance_type": "ml.g6e.xlarge"}, MACHINE_IMAGE),
        ({"instance_type": "ml.p5.48xlarge"}, MACHINE_IMAGE),
        ({"instance_type": "ml.c7i.xlarge"}, None),
    ],
)
def test_the_machine_image_is_stated_for_gpus(changes: dict[str, str], machine_image: str | None) -> None:
    made = template(configuration("private", **changes))["Resources"]
    variant = made["EndpointConfiguration"]["Properties"]["ProductionVariants"][0]
    assert variant.get("InferenceAmiVersion") == machine_image


def test_properties_go_before_those_of_the_template() -> None:
    made = template(configuration("private"))["Resources"]["EndpointConfiguration"]["Properties"]
    (variant,) = made["ProductionVariants"]
    assert (variant["VolumeSizeInGB"], variant["InstanceType"]) == (200, "ml.g6e.xlarge")
    assert variant["RoutingConfig"]["RoutingStrategy"] == "PREFIX_AWARE"


def test_properties_of_a_resource_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"properties.Role: the template has no such resource; expected one of Model, "
    ):
        template(configuration("private", properties={"Role": {"Path": "/"}}))


def test_secrets_of_similar_names_stay_apart() -> None:
    env = {"HF_TOKEN": "first", "HF__TOKEN": "second"}
    assert _environment(configuration("private", env=env)) == env


def test_a_hundred_adapters_are_short_enough() -> None:
    adapters = [{"name": f"adapter-{index}", "source": f"s3://adapters/{index}.tar.gz"} for index in range(100)]
    made = json.dumps(template(configuration("adapters", adapters=adapters)), separators=(",", ":"))
    assert len(made) < 51_200


def test_a_template_holds_no_credentials() -> None:
    made = template(configuration("real_time"))
    assert "hf_abcdefghijklmnop" not in as_yaml(made)
    assert made["Parameters"]["Secret1"]["NoEcho"] is True
    assert secrets(configuration("real_time")) == {"HF_TOKEN": "Secret1"}


def test_the_template_in_the_repository_is_that_of_the_example() -> None:
    values = merge_tables(read_file(ROOT / "examples/deploy/real_time.toml"), {"region": REGION})
    written = (ROOT / "deploy/templates/endpoint.yaml").read_text()
    assert written == as_yaml(template(read_configuration(values)))
