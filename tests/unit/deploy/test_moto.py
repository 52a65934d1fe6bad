"""Deploying with boto3 against moto's AWS: whatever of a plan moto has."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.aws import AwsCloud
from deploy.sagemaker.destroy import destroy
from deploy.sagemaker.executor import Conflict, Executor, Failed
from deploy.sagemaker.naming import tag_list
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.progress import Progress
from deploy.sagemaker.status import NoEndpoint, lines, status
from tests.unit.deploy.cloud import TurnedClock, error
from tests.unit.deploy.configurations import planned

SESSION = boto3.Session("testing", "testing", region_name="eu-west-1")
"""One for all tests: a session reads the services' models anew, which takes seconds."""
OF_MOTO = {"instance_type": "ml.g4dn.xlarge"}


class MotoCloud(AwsCloud):
    """moto has no tags of scalable targets and no inference components: these two calls are answered here."""

    def __init__(self) -> None:
        super().__init__("eu-west-1")
        self._session = SESSION
        self.target_tags: dict[str, str] = {}
        self.refused = ""

    def call(self, call: ApiCall) -> dict[str, Any]:
        if call.operation == self.refused:
            raise error(call.operation, "no", "AccessDeniedException")
        if call.operation == "register_scalable_target":
            self.target_tags |= call.parameters.get("Tags", {})
        if call.service == "application-autoscaling" and call.operation == "list_tags_for_resource":
            return {"Tags": self.target_tags}
        if str(call.parameters.get("ScalableDimension")).startswith("sagemaker:inference-component"):
            return {"ScalableTargets": []}
        if call.operation == "list_inference_components":
            return {"InferenceComponents": []}
        if call.operation == "describe_inference_component":
            raise error(call.operation, "Could not find inference component")
        return super().call(call)


@pytest.fixture
def aws() -> Iterator[MotoCloud]:
    with mock_aws():
        yield MotoCloud()


@pytest.fixture
def surroundings(aws: MotoCloud) -> Surroundings:
    clock = TurnedClock()
    return Surroundings(aws, Progress(io.StringIO(), clock), clock)


def _there() -> dict[str, int]:
    sagemaker = SESSION.client("sagemaker")
    scaling = SESSION.client("application-autoscaling")
    return {
        "models": len(sagemaker.list_models()["Models"]),
        "configurations": len(sagemaker.list_endpoint_configs()["EndpointConfigs"]),
        "endpoints": len(sagemaker.list_endpoints()["Endpoints"]),
        "targets": len(scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]),
        "policies": len(scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]),
        "alarms": len(SESSION.client("cloudwatch").describe_alarms(AlarmNamePrefix="my-llm")["MetricAlarms"]),
        "roles": len(SESSION.client("iam").list_roles()["Roles"]),
        "repositories": len(SESSION.client("ecr").describe_repositories()["repositories"]),
    }


NOTHING = dict.fromkeys(
    ("models", "configurations", "endpoints", "targets", "policies", "alarms", "roles", "repositories"), 0
)
MADE = {"create_role": True, "role": None, "push": "slipway:gpu", "image": None, "account": "123456789012"}


@pytest.mark.parametrize("name", ["real_time", "asynchronous", "private"])
def test_a_deployment_is_made_kept_and_removed(name: str, surroundings: Surroundings) -> None:
    plan = planned(name, **OF_MOTO, **MADE)
    Executor(surroundings).deploy(plan)
    there = _there()
    assert (there["models"], there["endpoints"], there["roles"], there["repositories"]) == (1, 1, 1, 1)
    outcome = Executor(surroundings).deploy(plan)
    assert outcome.created == ()
    assert _there() == there
    assert destroy(surroundings, "my-llm", repository="slipway").left == ()
    assert _there() == NOTHING


def test_what_sagemaker_has_is_what_was_planned(surroundings: Surroundings) -> None:
    plan = planned("private", **OF_MOTO)
    Executor(surroundings).deploy(plan)
    sagemaker: Any = SESSION.client("sagemaker")
    model, config, endpoint = plan.resources[:3]
    found = sagemaker.describe_endpoint_config(EndpointConfigName=config.name)
    assert found["ProductionVariants"][0].items() >= config.create.parameters["ProductionVariants"][0].items()
    assert (
        sagemaker.describe_model(ModelName=model.name)["PrimaryContainer"]
        == model.create.parameters["PrimaryContainer"]
    )
    tags = sagemaker.list_tags(ResourceArn=sagemaker.describe_endpoint(EndpointName="my-llm")["EndpointArn"])["Tags"]
    assert tags == endpoint.create.parameters["Tags"]


@pytest.mark.parametrize("index", range(9))
def test_whichever_call_fails_nothing_is_left(index: int, aws: MotoCloud, surroundings: Surroundings) -> None:
    plan = planned("real_time", **OF_MOTO, **MADE)
    operations = list(dict.fromkeys(call.operation for call in plan.calls))
    aws.refused = operations[index % len(operations)]
    with pytest.raises(Failed) as raised:
        Executor(surroundings).deploy(plan)
    assert raised.value.left == ()
    assert _there() == NOTHING


def test_an_endpoint_that_someone_else_made_stays(aws: MotoCloud, surroundings: Surroundings) -> None:
    sagemaker: Any = SESSION.client("sagemaker")
    plan = planned("private", **OF_MOTO)
    for resource in plan.resources:
        parameters = {**resource.create.parameters, "Tags": tag_list({"owner": "someone"})}
        getattr(sagemaker, resource.create.operation)(**parameters)
    before = _there()
    with pytest.raises(Conflict, match="does not belong"):
        Executor(surroundings).deploy(plan)
    assert len(destroy(surroundings, "my-llm").foreign) == 3
    assert _there() == before


def test_status_shows_endpoint_variants_scaling_and_alarms(aws: MotoCloud, surroundings: Surroundings) -> None:
    Executor(surroundings).deploy(planned("asynchronous", **OF_MOTO))
    found = status(aws, "my-llm")
    assert found["status"] == "InService"
    assert sorted(found["scaling"][0]["policies"]) == ["my-llm-from-zero", "my-llm-tracking"]
    shown = "\n".join(lines(found))
    assert "scaling        endpoint/my-llm/variant/AllTraffic: 0 to 2" in shown
    assert "alarm          my-llm-no-capacity" in shown
    with pytest.raises(NoEndpoint, match="there is no endpoint other"):
        status(aws, "other")


def test_the_alarm_calls_the_policy_that_was_made(surroundings: Surroundings) -> None:
    Executor(surroundings).deploy(planned("asynchronous", **OF_MOTO))
    alarm = SESSION.client("cloudwatch").describe_alarms(AlarmNames=["my-llm-no-capacity"])
    scaling = SESSION.client("application-autoscaling")
    policies = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    step = next(policy for policy in policies if policy["PolicyName"] == "my-llm-from-zero")
    assert alarm["MetricAlarms"][0]["AlarmActions"] == [step["PolicyARN"]]
