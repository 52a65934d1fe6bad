from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.call_checks import violations
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.naming import ENDPOINT_TAG, tag_map
from deploy.sagemaker.plan import plan
from deploy.sagemaker.update import update_calls
from tests.unit.deploy.configurations import VALUES, planned
from tests.unit.deploy.matrix import configurations

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", VALUES)
def test_a_plan_is_the_recorded_one(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    shown = planned(name).shown() + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(shown)
    assert shown == path.read_text()


@pytest.mark.parametrize("name", VALUES)
def test_every_call_is_what_the_services_model_allows(name: str) -> None:
    assert [violations(call) for call in planned(name).calls] == [()] * len(planned(name).calls)


@settings(deadline=None, max_examples=300)
@given(configurations())
def test_every_call_of_any_configuration_is_what_the_services_model_allows(read: Configuration) -> None:
    made = plan(read)
    calls = [*made.calls, *update_calls(made, read)]
    assert [problem for call in calls for problem in violations(call)] == []


@settings(deadline=None, max_examples=100)
@given(configurations())
def test_every_arn_and_image_is_of_the_regions_partition(read: Configuration) -> None:
    aws = read.role.split(":")[1]
    text = json.dumps([call.shown() for call in plan(read).calls])
    assert set(re.findall(r"arn:(aws[a-z-]*):", text)) == {aws}
    assert (".amazonaws.com.cn/" in text) is (aws == "aws-cn")


@pytest.mark.parametrize("name", VALUES)
def test_whatever_can_have_tags_has_the_deployments(name: str) -> None:
    for resource in planned(name).resources:
        if resource.kind.tags is not None:
            parameters = resource.create.parameters
            assert tag_map(parameters.get("Tags", parameters.get("tags")))[ENDPOINT_TAG] == "my-llm"


def test_an_instance_without_disks_of_its_own_gets_a_volume_of_the_size_that_is_asked_for() -> None:
    calls = planned("private", instance_type="ml.c7i.4xlarge", volume_gb=200).calls
    config = next(call for call in calls if call.operation == "create_endpoint_config")
    assert config.parameters["ProductionVariants"][0]["VolumeSizeInGB"] == 200


def test_a_plan_shows_no_credentials() -> None:
    assert "hf_abcdefghijklmnop" not in planned("real_time").shown()


def test_another_content_gives_a_model_and_a_configuration_another_name() -> None:
    first, second = planned("real_time"), planned("real_time", env={"OPTION_MAX_MODEL_LEN": 4096})
    names = [[resource.name for resource in each.resources] for each in (first, second)]
    assert names[0][0] != names[1][0]
    assert names[0][1] != names[1][1]
    assert names[0][2] == names[1][2]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["ProductionVariants", 0, "InstanceType"], "ml.bogus.xlarge", "one of 277 values"),
        (["ProductionVariants", 0, "RoutingConfig", "RoutingStrategy"], "CLOSEST", "one of LEAST_OUTSTANDING"),
        (["ProductionVariants", 0, "ContainerStartupHealthCheckTimeoutInSeconds"], 10, "valid min value: 60"),
        (["EndpointConfigName"], "-no-", "does not match"),
        (["EndpointConfigName"], "x" * 64, "at most 63"),
        (["Tags", 0, "Key"], "a\x01{}", "does not match"),
        (["Unknown"], 1, "Unknown"),
    ],
)
def test_what_the_services_model_does_not_allow_is_said(path: list[Any], value: object, said: str) -> None:
    call = next(call for call in planned("real_time").calls if call.operation == "create_endpoint_config")
    parameters = json.loads(json.dumps(call.parameters))
    inner = parameters
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    found = violations(ApiCall(call.service, call.operation, parameters))
    assert any(said in each for each in found)
