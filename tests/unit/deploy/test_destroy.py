from __future__ import annotations

import pytest

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.destroy import destroy
from deploy.sagemaker.executor import Executor
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.resource import COMPONENT, ENDPOINT, ENDPOINT_CONFIG, MODEL, SCALABLE_TARGET, SCALING_POLICY
from tests.unit.deploy.cloud import MemoryCloud, error
from tests.unit.deploy.configurations import VALUES, planned


@pytest.mark.parametrize("name", VALUES)
def test_everything_goes_and_is_named(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))
    before = cloud.names
    done = destroy(around, "my-llm", repository="slipway")
    assert sorted(done.removed) == before
    assert (done.left, done.foreign, cloud.names) == ((), (), [])


@pytest.mark.parametrize(
    ("name", "missing"), [(name, resource.key) for name in VALUES for resource in planned(name).resources]
)
def test_whatever_is_missing_the_rest_goes(name: str, missing: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))
    gone = next(key for key in cloud.things if f"{key[0].title} {key[1]}" == missing)
    del cloud.things[gone]
    destroy(around, "my-llm", repository="slipway")
    remaining = set(cloud.names)
    # Without its role or its target, a policy does not exist in AWS either.
    assert all(name.startswith(("role policy", "scaling policy")) for name in remaining)


def test_without_the_tag_nothing_goes_unless_told(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))
    for thing in cloud.things.values():
        thing.tags.clear()
    before = cloud.names
    done = destroy(around, "my-llm")
    assert cloud.names == before
    assert done.removed == ()
    assert "endpoint my-llm" in done.foreign
    destroy(around, "my-llm", untagged=True)
    assert cloud.names == []


def test_a_neighbour_whose_name_begins_alike_is_left_alone(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))
    Executor(around).deploy(planned("real_time", name="my-llm-2"))
    destroy(around, "my-llm", untagged=True)
    assert cloud.names == sorted(resource.key for resource in planned("real_time", name="my-llm-2").resources)


def test_a_foreign_endpoints_scaling_is_left_alone(cloud: MemoryCloud, around: Surroundings) -> None:
    cloud.add(ENDPOINT, "my-llm", {"EndpointName": "my-llm", "EndpointConfigName": "c"})
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/my-llm/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    cloud.add(SCALABLE_TARGET, target["ResourceId"], target)
    cloud.add(SCALING_POLICY, "my-llm-tracking", {**target, "PolicyName": "my-llm-tracking"})
    destroy(around, "my-llm")
    assert len(cloud.names) == 3


def test_the_image_repository_stays_unless_told(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("everything"))
    destroy(around, "my-llm")
    assert cloud.names == ["image repository slipway"]


def test_an_image_repository_without_the_tag_stays_whatever_is_told(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("everything"))
    for thing in cloud.things.values():
        thing.tags.clear()
    done = destroy(around, "my-llm", untagged=True, repository="slipway")
    assert "image repository slipway" in cloud.names
    assert done.foreign == ("image repository slipway",)


def test_a_dry_run_removes_nothing_and_says_what_would_go(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("adapters"))
    cloud.calls.clear()
    done = destroy(around, "my-llm", dry_run=True)
    assert sorted(done.removed) == cloud.names
    assert cloud.changes == []


def test_what_cannot_be_removed_is_said_and_the_rest_goes(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))

    def refuse(call: ApiCall) -> None:
        if call.operation == "delete_endpoint_config":
            raise error(call.operation, "not now", "AccessDeniedException")

    cloud.before = refuse
    done = destroy(around, "my-llm")
    assert len(done.left) == 1
    assert "not now" in done.left[0]
    assert [kind for kind, _ in cloud.things] == [ENDPOINT_CONFIG]


def test_an_endpoint_that_is_being_created_is_waited_for(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))
    thing = cloud.things[ENDPOINT, "my-llm"]
    thing.status, thing.polls = "Creating", 20
    destroy(around, "my-llm")
    assert cloud.names == []
    assert around.clock.now() > 100


def test_of_nothing_nothing_is_left(cloud: MemoryCloud, around: Surroundings) -> None:
    cloud.add(MODEL, "other", {"ModelName": "other"})
    done = destroy(around, "my-llm")
    assert (done.removed, done.left, done.foreign) == ((), (), ())


def _theirs(cloud: MemoryCloud) -> str:
    specification = {"ModelName": "theirs"}
    name = "their-model"
    cloud.add(
        COMPONENT,
        name,
        {"InferenceComponentName": name, "EndpointName": "my-llm", "Specification": specification},
    )
    return f"{COMPONENT.title} {name}"


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_endpoint_with_someone_elses_component_stays_with_all_that_serves_it_and_at_once(
    dry_run: bool, cloud: MemoryCloud, around: Surroundings
) -> None:
    Executor(around).deploy(planned("scale_to_zero"))
    theirs, start = _theirs(cloud), around.clock.now()
    done = destroy(around, "my-llm", dry_run=dry_run)
    assert done.foreign == (theirs,)
    assert f"endpoint my-llm: kept, as {theirs} is still there" in done.left
    assert {kind for kind, _ in cloud.things} >= {ENDPOINT, ENDPOINT_CONFIG, MODEL}
    assert around.clock.now() - start < 60


@pytest.mark.parametrize("name", ["real_time", "adapters"])
def test_what_serves_keeps_its_configuration_and_model(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))

    def refuse(call: ApiCall) -> None:
        if call.operation in ("delete_endpoint", "delete_inference_component"):
            raise error(call.operation, "no", "AccessDeniedException")

    cloud.before = refuse
    left = [line.partition(":")[0] for line in destroy(around, "my-llm").left]
    assert sorted(left) == [key for key in cloud.names if not key.startswith("scal")]
    assert {kind for kind, _ in cloud.things} >= {ENDPOINT, ENDPOINT_CONFIG, MODEL}
    cloud.before = lambda call: None
    assert destroy(around, "my-llm").left == ()
    assert cloud.names == []
