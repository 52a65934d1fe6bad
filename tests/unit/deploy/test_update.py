from __future__ import annotations

import io
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.call_checks import violations
from deploy.sagemaker.configuration import Rollout
from deploy.sagemaker.executor import Conflict, Executor, Failed
from deploy.sagemaker.naming import ENDPOINT_TAG
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.resource import COMPONENT, ENDPOINT, ENDPOINT_CONFIG, ROLE_POLICY
from deploy.sagemaker.rollout import deployment_config
from deploy.sagemaker.update import component_update, endpoint_update, update, update_calls
from tests.unit.deploy.cloud import MemoryCloud, error
from tests.unit.deploy.configurations import VALUES, configuration, planned

NEW = {"env": {"OPTION_MAX_MODEL_LEN": 4096}}


def _update(around: Surroundings, name: str, **changes: Any) -> Any:
    return update(around, planned(name, **changes), configuration(name, **changes))


@pytest.mark.parametrize("name", VALUES)
def test_an_update_ends_where_a_fresh_deployment_does(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))
    done = _update(around, name, **NEW)
    assert cloud.names == sorted(resource.key for resource in planned(name, **NEW).resources)
    assert (
        cloud.things[ENDPOINT, "my-llm"].parameters["EndpointConfigName"]
        == planned(name, **NEW).of(ENDPOINT_CONFIG)[0].name
    )
    assert done.left == ()
    # And the new state is what a second deployment of it keeps.
    assert Executor(around).deploy(planned(name, **NEW)).created == ()


@pytest.mark.parametrize("name", VALUES)
def test_nothing_new_changes_nothing(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))
    cloud.calls.clear()
    done = _update(around, name)
    assert (done.changed, done.removed) == ((), ())
    assert "update_endpoint" not in cloud.changes


@pytest.mark.parametrize("name", ["real_time", "adapters", "private"])
def test_a_rollout_that_sagemaker_takes_back_leaves_what_was_there(
    name: str, cloud: MemoryCloud, around: Surroundings, told: io.StringIO
) -> None:
    Executor(around).deploy(planned(name))
    before = cloud.names
    cloud.rolls_back = True
    with pytest.raises(Failed, match="went back to"):
        _update(around, name, instances=2, **NEW)
    assert cloud.names == before
    assert "log: 1970-01-01 00:00:01 CUDA out of memory" in told.getvalue()


@pytest.mark.parametrize("operation", ["create_model", "create_endpoint_config", "update_endpoint"])
@pytest.mark.parametrize("name", ["real_time", "asynchronous"])
def test_whichever_call_before_the_rollout_fails_what_was_there_stays(
    name: str, operation: str, cloud: MemoryCloud, around: Surroundings
) -> None:
    Executor(around).deploy(planned(name))
    before = cloud.names

    def refuse(call: ApiCall) -> None:
        if call.operation == operation:
            raise error(operation, "no", "AccessDeniedException")

    cloud.before = refuse
    with pytest.raises(Failed):
        _update(around, name, instance_type="ml.g6e.2xlarge", **NEW)
    assert cloud.names == before


def test_an_interrupted_update_goes_on_when_run_again(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("adapters"))

    def interrupt(call: ApiCall) -> None:
        if call.operation == "update_inference_component":
            raise KeyboardInterrupt

    cloud.before = interrupt
    with pytest.raises(Failed) as raised:
        _update(around, "adapters", **NEW)
    assert raised.value.interrupted
    cloud.before = lambda call: None
    _update(around, "adapters", **NEW)
    assert cloud.names == sorted(resource.key for resource in planned("adapters", **NEW).resources)


def test_the_old_model_can_be_read_until_the_rollout_has_ended(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("everything"))
    policies: list[int] = []

    def count(call: ApiCall) -> None:
        if call.operation == "update_inference_component":
            policies.append(sum(kind is ROLE_POLICY for kind, _ in cloud.things))

    cloud.before = count
    _update(around, "everything", model="s3://models/other/")
    assert policies[0] == 2
    assert sum(kind is ROLE_POLICY for kind, _ in cloud.things) == 1


def test_another_instance_type_lets_go_of_the_scaling_and_takes_it_up_again(
    cloud: MemoryCloud, around: Surroundings
) -> None:
    Executor(around).deploy(planned("real_time"))
    cloud.calls.clear()
    _update(around, "real_time", instance_type="ml.g6e.2xlarge")
    order = [each for each in cloud.changes if "scalable_target" in each or each == "update_endpoint"]
    assert order == ["deregister_scalable_target", "update_endpoint", "register_scalable_target"]


POOLS = [{"instance_type": "ml.g6e.xlarge", "priority": 1}, {"instance_type": "ml.g6e.2xlarge", "priority": 2}]


@pytest.mark.parametrize("types", [{"instance_type": "ml.g6e.2xlarge"}, {"instance_type": None, "pools": POOLS}])
def test_another_instance_type_lets_go_of_a_scaling_that_is_not_asked_for_any_more(
    types: dict[str, Any], cloud: MemoryCloud, around: Surroundings
) -> None:
    Executor(around).deploy(planned("real_time"))
    done = _update(around, "real_time", autoscaling=None, **types)
    assert not [name for name in cloud.names if "scal" in name]
    assert done.left == ()


def test_a_failed_change_of_the_instance_type_says_that_the_old_scaling_is_gone(
    cloud: MemoryCloud, around: Surroundings, told: io.StringIO
) -> None:
    Executor(around).deploy(planned("real_time"))
    cloud.rolls_back = True
    with pytest.raises(Failed, match="went back to"):
        _update(around, "real_time", autoscaling=None, instance_type="ml.g6e.2xlarge")
    assert "endpoint my-llm is not scaled any more" in told.getvalue()


def test_an_interrupted_change_of_the_instance_type_says_that_nothing_scales(
    cloud: MemoryCloud, around: Surroundings
) -> None:
    Executor(around).deploy(planned("real_time"))

    def interrupt(call: ApiCall) -> None:
        if call.operation == "update_endpoint":
            raise KeyboardInterrupt

    cloud.before = interrupt
    with pytest.raises(Failed, match="nothing scales it until") as raised:
        _update(around, "real_time", instance_type="ml.g6e.2xlarge")
    assert raised.value.interrupted
    assert not any("scalable target" in name for name in cloud.names)
    cloud.before = lambda call: None
    _update(around, "real_time", instance_type="ml.g6e.2xlarge")
    assert any("scalable target" in name for name in cloud.names)


def test_adapters_come_and_go(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("adapters"))
    adapters = [
        {"name": "french", "source": "s3://adapters/french-2.tar.gz"},
        {"name": "dutch", "source": "s3://adapters/dutch.tar.gz"},
    ]
    done = _update(around, "adapters", adapters=adapters)
    assert done.removed == ("inference component my-llm-german",)
    assert sorted(name for kind, name in cloud.things if kind is COMPONENT) == [
        "my-llm",
        "my-llm-dutch",
        "my-llm-french",
    ]
    french = cloud.things[COMPONENT, "my-llm-french"].parameters["Specification"]
    assert french["Container"]["ArtifactUrl"] == "s3://adapters/french-2.tar.gz"


def test_scaling_that_is_not_asked_for_any_more_goes(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("scale_to_zero"))
    _update(around, "scale_to_zero", autoscaling={"min": 1, "max": 2, "target": 8})
    assert not [name for name in cloud.names if "from-zero" in name or name.startswith("alarm")]
    _update(around, "scale_to_zero", autoscaling=None)
    assert not [name for name in cloud.names if "scal" in name]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("none", "is not there"),
        ("theirs", "does not belong"),
        ("Updating", "Updating; it can be updated once it is InService"),
        ("Failed", "Failed and cannot be updated; `slipway deploy` makes it anew"),
    ],
)
def test_what_cannot_be_updated_is_said(state: str, said: str, cloud: MemoryCloud, around: Surroundings) -> None:
    if state != "none":
        Executor(around).deploy(planned("real_time"))
        thing = cloud.things[ENDPOINT, "my-llm"]
        if state == "theirs":
            del thing.tags[ENDPOINT_TAG]
        else:
            thing.status, thing.polls = state, 9
    cloud.calls.clear()
    with pytest.raises(Conflict, match=said):
        _update(around, "real_time")
    assert cloud.changes == []


@pytest.mark.parametrize("strategy", ["blue-green", "canary", "linear", "rolling"])
@pytest.mark.parametrize("name", VALUES)
def test_every_call_of_an_update_is_what_the_services_model_allows(name: str, strategy: str) -> None:
    changes = {"rollout": {"strategy": strategy, "alarms": ["errors"]}}
    calls = update_calls(planned(name, **changes), configuration(name, **changes))
    assert [violations(call) for call in calls] == [()] * len(calls)
    assert "update_endpoint" in [call.operation for call in calls]


def test_alarms_take_a_rollout_back() -> None:
    config = deployment_config(Rollout(strategy="linear", step_percent=10, wait=60, alarms=("errors",)))
    assert config == {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": {
                "Type": "LINEAR",
                "WaitIntervalInSeconds": 60,
                "LinearStepSize": {"Type": "CAPACITY_PERCENT", "Value": 10},
            },
            "TerminationWaitInSeconds": 0,
        },
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": "errors"}]},
    }


def test_boto3_takes_the_calls_that_moto_does_not_know() -> None:
    client = boto3.client("sagemaker")
    arn = "arn:aws:sagemaker:eu-west-1:111122223333:{}/my-llm"
    endpoint = endpoint_update(planned("real_time"), configuration("real_time"))
    base, adapter, _ = planned("adapters").of(COMPONENT)
    changed = component_update(base, Rollout())
    with Stubber(client) as stub:
        stub.add_response("update_endpoint", {"EndpointArn": arn.format("endpoint")}, dict(endpoint.parameters))
        answer = {"InferenceComponentArn": arn.format("inference-component")}
        for resource in (base, adapter):
            stub.add_response("create_inference_component", answer, dict(resource.create.parameters))
        stub.add_response("update_inference_component", answer, dict(changed.parameters))
        client.update_endpoint(**endpoint.parameters)
        client.create_inference_component(**base.create.parameters)
        client.create_inference_component(**adapter.create.parameters)
        client.update_inference_component(**changed.parameters)
        stub.assert_no_pending_responses()
