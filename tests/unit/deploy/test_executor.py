from __future__ import annotations

import io
import time

import pytest
from botocore.exceptions import ConnectTimeoutError

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.destroy import destroy
from deploy.sagemaker.executor import Conflict, Executor, Failed
from deploy.sagemaker.naming import ENDPOINT_TAG, FINGERPRINT_TAG
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.resource import COMPONENT, ENDPOINT, ENDPOINT_CONFIG, MODEL, SCALABLE_TARGET
from deploy.sagemaker.update import update
from tests.unit.deploy.cloud import MemoryCloud, error
from tests.unit.deploy.configurations import VALUES, configuration, planned

EVERY_CALL = [(name, index) for name in VALUES for index in range(len(planned(name).calls))]
FAILURES = {
    "refused": lambda operation: error(operation, "no", "AccessDeniedException"),
    "unreachable": lambda operation: ConnectTimeoutError(endpoint_url="https://aws"),
    "interrupted": lambda operation: KeyboardInterrupt(),
}


def _fail_at(cloud: MemoryCloud, target: ApiCall, failure: str, *, after: bool) -> None:
    """Let one call of a plan fail, once: before it takes effect, or after."""
    done: list[ApiCall] = []

    def fail(call: ApiCall) -> None:
        same = call.operation == target.operation and _identity(call) == _identity(target)
        if same and not done:
            done.append(call)
            raise FAILURES[failure](call.operation)

    if after:
        cloud.after = fail
    else:
        cloud.before = fail


def _identity(call: ApiCall) -> list[str]:
    names = ("PolicyName", "ResourceId", "RoleName", "InferenceComponentName", "AlarmName")
    return [str(call.parameters.get(name)) for name in names]


@pytest.mark.parametrize("name", VALUES)
def test_a_plan_makes_everything_and_nothing_else(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    plan = planned(name)
    outcome = Executor(around).deploy(plan)
    assert sorted(outcome.created) == cloud.names == sorted(resource.key for resource in plan.resources)
    assert outcome.kept == ()


@pytest.mark.parametrize("name", VALUES)
def test_a_second_run_makes_nothing_anew(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned(name))
    before = cloud.names
    cloud.calls.clear()
    outcome = Executor(around).deploy(planned(name))
    assert cloud.names == before
    assert outcome.created == ()
    assert not [operation for operation in cloud.changes if operation.startswith("create_")]


@pytest.mark.parametrize("after", [False, True], ids=["before it takes effect", "after it has taken effect"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("name", "index"), EVERY_CALL)
def test_whichever_call_fails_the_rollback_leaves_nothing(
    name: str, index: int, failure: str, after: bool, cloud: MemoryCloud, around: Surroundings
) -> None:
    _fail_at(cloud, planned(name).calls[index], failure, after=after)
    with pytest.raises(Failed) as raised:
        Executor(around).deploy(planned(name))
    assert raised.value.left == ()
    assert raised.value.interrupted is (failure == "interrupted")
    assert cloud.names == []


@pytest.mark.parametrize("after", [False, True], ids=["before it takes effect", "after it has taken effect"])
@pytest.mark.parametrize(("name", "index"), EVERY_CALL)
def test_whichever_call_fails_another_run_goes_on_and_destroy_leaves_nothing(
    name: str, index: int, after: bool, cloud: MemoryCloud, around: Surroundings
) -> None:
    _fail_at(cloud, planned(name).calls[index], "refused", after=after)
    with pytest.raises(Failed):
        Executor(around, rollback=False).deploy(planned(name))
    half = cloud.names
    Executor(around).deploy(planned(name))
    assert cloud.names == sorted(resource.key for resource in planned(name).resources)
    assert set(half) <= set(cloud.names)
    repository = "slipway" if "push" in VALUES[name] else None
    assert destroy(around, "my-llm", repository=repository).left == ()
    assert cloud.names == []


@pytest.mark.parametrize("name", VALUES)
def test_whichever_call_of_the_rollback_fails_too_it_is_said_and_destroy_does_the_rest(
    name: str, cloud: MemoryCloud, around: Surroundings
) -> None:
    plan = planned(name)

    def fail(call: ApiCall) -> None:
        if call.operation == plan.calls[-1].operation or call.operation == "delete_model":
            raise error(call.operation, "no", "AccessDeniedException")

    cloud.before = fail
    with pytest.raises(Failed) as raised:
        Executor(around).deploy(plan)
    assert raised.value.left == (plan.of(MODEL)[0].key,)
    cloud.before = lambda call: None
    destroy(around, "my-llm", repository="slipway")
    assert cloud.names == []


def test_an_endpoint_that_cannot_be_removed_keeps_all_that_it_needs(cloud: MemoryCloud, around: Surroundings) -> None:
    plan = planned("real_time")

    def fail(call: ApiCall) -> None:
        if call.operation in ("put_scaling_policy", "delete_endpoint"):
            raise error(call.operation, "no", "AccessDeniedException")

    cloud.before = fail
    with pytest.raises(Failed) as raised:
        Executor(around).deploy(plan)
    assert sorted(raised.value.left) == cloud.names
    assert {kind for kind, _ in cloud.things} == {ENDPOINT, ENDPOINT_CONFIG, MODEL}


def test_an_endpoint_that_was_never_made_keeps_nothing(cloud: MemoryCloud, around: Surroundings) -> None:
    def fail(call: ApiCall) -> None:
        if call.operation in ("create_endpoint", "delete_endpoint"):
            raise error(call.operation, "no", "AccessDeniedException")

    cloud.before = fail
    with pytest.raises(Failed):
        Executor(around).deploy(planned("real_time"))
    assert cloud.names == []


@pytest.mark.parametrize(("name", "failing"), [("real_time", "my-llm"), ("adapters", "my-llm-german")])
def test_what_does_not_start_fails_with_its_reason_and_its_log(
    name: str, failing: str, cloud: MemoryCloud, around: Surroundings, told: io.StringIO
) -> None:
    cloud.failing.add(failing)
    with pytest.raises(Failed, match="did not pass the ping health check"):
        Executor(around).deploy(planned(name))
    assert "CUDA out of memory" in told.getvalue()
    assert cloud.names == []


def test_the_log_of_an_earlier_endpoint_of_the_name_is_not_shown(cloud: MemoryCloud, around: Surroundings) -> None:
    cloud.failing.add("my-llm")
    begun = time.time()
    with pytest.raises(Failed):
        Executor(around).deploy(planned("real_time"))
    read = [call.parameters["startTime"] for call in cloud.calls if call.operation == "filter_log_events"]
    assert read[0] >= int(begun * 1000)


def test_an_endpoint_that_never_comes_is_given_up(cloud: MemoryCloud, around: Surroundings) -> None:
    def stall(call: ApiCall) -> None:
        thing = cloud.things.get((ENDPOINT, "my-llm"))
        if thing is not None and thing.status == "Creating" and around.clock.now() < 20000:
            thing.polls = 2

    cloud.before = stall
    plan = planned("real_time")
    with pytest.raises(Failed, match=f"still Creating after {plan.wait_limit:.0f} s"):
        Executor(around).deploy(plan)


def test_a_failed_endpoint_of_an_earlier_run_is_made_anew(cloud: MemoryCloud, around: Surroundings) -> None:
    cloud.failing.add("my-llm")
    with pytest.raises(Failed):
        Executor(around, rollback=False).deploy(planned("real_time"))
    assert cloud.things[ENDPOINT, "my-llm"].status == "Failed"
    cloud.failing.clear()
    assert "endpoint my-llm" in Executor(around).deploy(planned("real_time")).created


def test_what_is_there_and_differs_is_said_before_anything_is_changed(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))
    cloud.calls.clear()
    with pytest.raises(Conflict, match="slipway update"):
        Executor(around).deploy(planned("real_time", env={"OPTION_MAX_MODEL_LEN": 4096}))
    assert cloud.changes == []


def test_what_is_there_and_is_not_ours_is_left_alone(cloud: MemoryCloud, around: Surroundings) -> None:
    cloud.add(ENDPOINT, "my-llm", {"EndpointName": "my-llm", "EndpointConfigName": "theirs"})
    with pytest.raises(Conflict, match="does not belong to this deployment"):
        Executor(around).deploy(planned("real_time"))
    assert cloud.changes == []


def test_a_component_with_another_specification_is_a_conflict(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("adapters"))
    cloud.things[COMPONENT, "my-llm"].tags[FINGERPRINT_TAG] = "0123456789"
    with pytest.raises(Conflict, match="inference component my-llm is there and differs"):
        Executor(around).deploy(planned("adapters"))


def test_someone_elses_scalable_target_is_a_conflict(cloud: MemoryCloud, around: Surroundings) -> None:
    Executor(around).deploy(planned("real_time"))
    del cloud.things[SCALABLE_TARGET, "endpoint/my-llm/variant/AllTraffic"].tags[ENDPOINT_TAG]
    with pytest.raises(Conflict, match="scalable target"):
        Executor(around).deploy(planned("real_time"))


def test_a_role_that_sagemaker_does_not_see_yet_is_waited_for(
    cloud: MemoryCloud, around: Surroundings, told: io.StringIO
) -> None:
    refusals = [3]

    def refuse(call: ApiCall) -> None:
        if call.operation == "create_model" and refusals[0]:
            refusals[0] -= 1
            raise error("create_model", "Could not assume role arn:aws:iam::111122223333:role/slipway-my-llm")

    cloud.before = refuse
    Executor(around).deploy(planned("everything"))
    assert told.getvalue().count("does not see the new role yet") == 3


@pytest.mark.parametrize("name", VALUES)
def test_what_was_just_made_may_be_unseen_for_a_while(name: str, cloud: MemoryCloud, around: Surroundings) -> None:
    refused: set[int] = set()

    def refuse(call: ApiCall) -> None:
        makes = call.operation.startswith(("create_", "put_", "register_", "update_"))
        if makes and call.operation != "create_model" and id(call) not in refused:
            refused.add(id(call))
            kept.append(call)
            raise error(call.operation, "Could not find something that is there")

    kept: list[ApiCall] = []  # so that no two have the same id
    cloud.before = refuse
    plan = planned(name)
    assert len(Executor(around).deploy(plan).created) == len(plan.resources)
    changed = {"env": {"OPTION_MAX_MODEL_LEN": 4096}}
    update(around, planned(name, **changed), configuration(name, **changed))
    assert cloud.names == sorted(resource.key for resource in planned(name, **changed).resources)


def test_model_data_that_is_not_there_is_said_at_once(cloud: MemoryCloud, around: Surroundings) -> None:
    def refuse(call: ApiCall) -> None:
        if call.operation == "create_model":
            raise error("create_model", "Could not find model data at s3://models/llama/.")

    cloud.before = refuse
    with pytest.raises(Failed, match="Could not find model data"):
        Executor(around).deploy(planned("private"))
    assert around.clock.now() == 0


def test_a_role_that_sagemaker_never_sees_ends_the_deployment(cloud: MemoryCloud, around: Surroundings) -> None:
    def refuse(call: ApiCall) -> None:
        if call.operation == "create_model":
            raise error("create_model", "Could not assume role arn:aws:iam::111122223333:role/slipway-my-llm")

    cloud.before = refuse
    with pytest.raises(Failed, match="Could not assume role"):
        Executor(around).deploy(planned("everything"))
    assert cloud.names == []


def test_looks_that_fail_while_waiting_do_not_end_it(cloud: MemoryCloud, around: Surroundings) -> None:
    failures = [4]

    def fail(call: ApiCall) -> None:
        waiting = (ENDPOINT, "my-llm") in cloud.things and call.operation == "describe_endpoint"
        if waiting and failures[0]:
            failures[0] -= 1
            raise error(call.operation, "Rate exceeded", "ThrottlingException")

    cloud.before = fail
    Executor(around).deploy(planned("real_time"))
    assert failures == [0]


def test_a_hook_runs_once_its_resource_is_there(cloud: MemoryCloud, around: Surroundings) -> None:
    seen: list[list[str]] = []
    key = "image repository slipway"
    Executor(around, hooks={key: lambda: seen.append(cloud.names)}).deploy(planned("everything"))
    assert seen == [[key]]
