from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.stack import ENDPOINT_TAG, POLL, Conflict, Failed, Stack, Wanted
from deploy.sagemaker.template import parameter_values, template
from tests.unit.deploy.sagemaker.configurations import configuration
from tests.unit.deploy.sagemaker.formation import Formation, of_stack

ENDPOINT = "AWS::SageMaker::Endpoint"
NOT_HEALTHY = "The primary container for production variant AllTraffic did not pass the ping health check."


def _wanted(read: Configuration) -> Wanted:
    return Wanted(template(read), parameter_values(read), {**read.tags, ENDPOINT_TAG: read.name})


WANTED = _wanted(configuration("real_time"))
OTHER = _wanted(configuration("real_time", env={"OPTION_MAX_MODEL_LEN": 4096}))
LARGER = _wanted(configuration("real_time", instance_type="ml.g6e.12xlarge"))


@pytest.fixture
def formation() -> Formation:
    return Formation()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def stack(formation: Formation, told: list[str]) -> Stack:
    def sleep(seconds: float) -> None:
        assert seconds == POLL
        assert len(told) < 100, "it waits for ever"
        told.append("slept")

    return Stack(formation.client, "my-llm", told.append, sleep)


def _create(stack: Stack, wanted: Wanted = WANTED, *, rollback: bool = True) -> None:
    change = stack.propose(wanted, rollback=rollback)
    assert change is not None
    stack.create(change, rollback=rollback)


def _interrupting(formation: Formation, operation: str) -> Callable[[str], None]:
    def interrupt(called: str) -> None:
        if called == operation:
            formation.after = lambda operation: None
            raise KeyboardInterrupt

    return interrupt


def test_a_stack_is_made_updated_and_deleted(formation: Formation, stack: Stack, told: list[str]) -> None:
    assert stack.ready_to_create()
    _create(stack)
    assert formation.status == "CREATE_COMPLETE"
    assert "Endpoint CREATE_COMPLETE" in told
    made = formation.called("CreateChangeSet")[0]
    assert (made["StackName"], made["Capabilities"]) == ("slipway-my-llm", ["CAPABILITY_IAM"])
    assert {"Key": "slipway:endpoint", "Value": "my-llm"} in made["Tags"]
    assert {"ParameterKey": "EnvHfToken", "ParameterValue": "hf_abcdefghijklmnop"} in made["Parameters"]
    assert not stack.ready_to_create()
    stack.check_updatable()
    change = stack.propose(OTHER)
    assert change is not None
    assert [(each.action, each.resource) for each in change.changes] == [("Modify", "Model")]
    assert stack.update(change, OTHER) == ()
    assert formation.template == OTHER.template
    assert f"{ENDPOINT} endpoint" in stack.resources()
    stack.delete()
    assert formation.status is None
    stack.delete()
    assert formation.changes.count("DeleteStack") == 1


def test_where_nothing_changes_nothing_is_proposed(formation: Formation, stack: Stack) -> None:
    _create(stack)
    assert stack.propose(WANTED) is None
    assert formation.changes[-1] == "DeleteChangeSet"
    assert formation.status == "CREATE_COMPLETE"


def test_a_proposal_that_is_forgotten_leaves_no_stack(formation: Formation, stack: Stack) -> None:
    change = stack.propose(WANTED)
    assert change is not None
    assert change.creates
    assert stack.status() is None
    stack.discard(change)
    assert formation.status is None


def test_what_cloudformation_cannot_do_is_said_with_its_reason(formation: Formation, stack: Stack) -> None:
    formation.proposal_fails = "No export named x found."
    with pytest.raises(Failed, match=r"cannot make this change: No export named x found\."):
        stack.propose(WANTED)
    assert formation.status is None


@pytest.mark.parametrize(("rollback", "on_failure"), [(True, "DELETE"), (False, "DO_NOTHING")])
def test_a_creation_that_fails_says_the_reasons_of_its_events(
    rollback: bool, on_failure: str, formation: Formation, stack: Stack, told: list[str]
) -> None:
    last = "DELETE_COMPLETE" if rollback else "CREATE_FAILED"
    formation.outcomes = [
        [
            ("Model", "AWS::SageMaker::Model", "CREATE_COMPLETE", ""),
            ("Endpoint", ENDPOINT, "CREATE_FAILED", NOT_HEALTHY),
            ("Alarm", "AWS::CloudWatch::Alarm", "CREATE_FAILED", "Resource creation cancelled"),
            of_stack("DELETE_IN_PROGRESS", "The following resource(s) failed to create: [Endpoint]."),
            of_stack(last),
        ]
    ]
    with pytest.raises(Failed) as raised:
        _create(stack, rollback=rollback)
    assert str(raised.value) == f"the stack slipway-my-llm is {last}: Endpoint ({ENDPOINT}): {NOT_HEALTHY}"
    assert raised.value.started
    assert f"Endpoint CREATE_FAILED: {NOT_HEALTHY}" in told
    assert formation.called("CreateChangeSet")[0]["OnStackFailure"] == on_failure


def test_an_update_that_fails_leaves_what_was_there(formation: Formation, stack: Stack) -> None:
    _create(stack)
    formation.outcomes = [
        [
            ("Endpoint", ENDPOINT, "UPDATE_FAILED", "one of its alarms rang"),
            of_stack("UPDATE_ROLLBACK_IN_PROGRESS"),
            of_stack("UPDATE_ROLLBACK_COMPLETE"),
        ]
    ]
    change = stack.propose(OTHER)
    assert change is not None
    with pytest.raises(Failed, match=r"UPDATE_ROLLBACK_COMPLETE: Endpoint \(AWS::SageMaker::Endpoint\): one of its"):
        stack.update(change, OTHER)
    assert formation.template == WANTED.template
    stack.check_updatable()


def test_what_an_update_could_not_delete_is_given(formation: Formation, stack: Stack) -> None:
    _create(stack)
    formation.outcomes = [
        [
            of_stack("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS"),
            ("Model", "AWS::SageMaker::Model", "DELETE_FAILED", "no permission"),
            of_stack("UPDATE_COMPLETE"),
        ]
    ]
    change = stack.propose(OTHER)
    assert change is not None
    assert stack.update(change, OTHER) == ("Model (AWS::SageMaker::Model): no permission",)


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "CREATE_FAILED", "ROLLBACK_FAILED", "DELETE_FAILED"])
def test_what_a_failed_creation_has_left_goes_before_another(
    status: str, formation: Formation, stack: Stack, told: list[str]
) -> None:
    formation.there(status)
    with pytest.raises(Conflict, match=f"is {status} and cannot be updated; `slipway deploy` creates it anew"):
        stack.check_updatable()
    assert stack.ready_to_create()
    assert told[0] == f"the stack slipway-my-llm is {status}: deleting it first"
    _create(stack)
    assert formation.status == "CREATE_COMPLETE"


def test_what_goes_on_with_the_stack_is_waited_for(formation: Formation, stack: Stack, told: list[str]) -> None:
    formation.there("CREATE_IN_PROGRESS")
    formation.coming = ["CREATE_IN_PROGRESS", "CREATE_IN_PROGRESS", "CREATE_COMPLETE"]
    assert not stack.ready_to_create()
    assert told == ["the stack slipway-my-llm is CREATE_IN_PROGRESS: waiting", "slept", "slept"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "there is no stack slipway-my-llm; `slipway deploy` creates it"),
        ("UPDATE_IN_PROGRESS", "is UPDATE_IN_PROGRESS; it can be updated once that has ended"),
        ("UPDATE_ROLLBACK_FAILED", "aws cloudformation continue-update-rollback --stack-name slipway-my-llm"),
    ],
)
def test_a_stack_that_cannot_be_updated_says_what_to_do(
    status: str | None, said: str, formation: Formation, stack: Stack
) -> None:
    if status:
        formation.there(status)
    with pytest.raises(Conflict, match=said):
        stack.check_updatable()


def test_a_stack_that_someone_else_has_made_is_kept(formation: Formation, stack: Stack) -> None:
    formation.there("CREATE_COMPLETE", endpoint="theirs")
    for look in (stack.status, stack.check_updatable, stack.ready_to_create):
        with pytest.raises(Conflict, match="was not made by Slipway"):
            look()


def test_an_interrupted_creation_is_deleted(formation: Formation, stack: Stack) -> None:
    formation.outcomes = [[of_stack("CREATE_IN_PROGRESS")]]
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(Failed, match="interrupted; what was made is deleted") as raised:
        _create(stack)
    assert raised.value.interrupted
    assert formation.status is None


def test_an_interrupted_creation_goes_on_where_nothing_is_to_be_rolled_back(formation: Formation, stack: Stack) -> None:
    formation.outcomes = [[of_stack("CREATE_IN_PROGRESS")]]
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(Failed, match="CloudFormation goes on creating slipway-my-llm"):
        _create(stack, rollback=False)
    assert formation.status == "CREATE_IN_PROGRESS"


def test_an_interrupted_update_goes_on(formation: Formation, stack: Stack) -> None:
    _create(stack)
    change = stack.propose(OTHER)
    assert change is not None
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(Failed, match="CloudFormation goes on with the update") as raised:
        stack.update(change, OTHER)
    assert raised.value.interrupted
    assert "DeleteStack" not in formation.changes


def _update(stack: Stack, wanted: Wanted) -> Any:
    change = stack.propose(wanted)
    assert change is not None
    return stack.update(change, wanted)


def _kinds(body: dict[str, Any]) -> set[str]:
    return {each["Type"].split("::")[1] for each in body["Resources"].values()}


def test_the_scaling_is_released_while_the_instance_type_changes(formation: Formation, stack: Stack) -> None:
    _create(stack)
    seen: list[set[str]] = []
    formation.after = lambda operation: (
        seen.append(_kinds(formation.template)) if operation == "ExecuteChangeSet" else None
    )
    assert _update(stack, LARGER) == ()
    assert seen == [{"SageMaker"}, {"SageMaker", "ApplicationAutoScaling"}]
    assert formation.template == LARGER.template
    released = formation.called("CreateChangeSet")[2]
    assert {"ParameterKey": "EnvHfToken", "UsePreviousValue": True} in released["Parameters"]


def test_the_scaling_is_set_again_if_the_instance_type_cannot_change(formation: Formation, stack: Stack) -> None:
    _create(stack)
    released = [of_stack("UPDATE_COMPLETE")]
    formation.outcomes = [released, [("Endpoint", ENDPOINT, "UPDATE_FAILED", "no capacity"), of_stack("UPDATE_FAILED")]]
    with pytest.raises(Failed, match="no capacity"):
        _update(stack, LARGER)
    assert formation.template == WANTED.template


def test_a_scaling_that_cannot_be_set_again_is_said(formation: Formation, stack: Stack) -> None:
    _create(stack)
    failed = [("Endpoint", ENDPOINT, "UPDATE_FAILED", "no capacity"), of_stack("UPDATE_ROLLBACK_FAILED")]
    again = [("ScalableTarget", "AWS::ApplicationAutoScaling::ScalableTarget", "CREATE_FAILED", "busy")]
    formation.outcomes = [[of_stack("UPDATE_COMPLETE")], failed, [*again, of_stack("UPDATE_ROLLBACK_COMPLETE")]]
    with pytest.raises(Failed, match=r"no capacity; and the scaling could not be set again: .*busy"):
        _update(stack, LARGER)


def test_an_interruption_between_says_that_nothing_scales(formation: Formation, stack: Stack) -> None:
    _create(stack)
    change = stack.propose(LARGER)
    assert change is not None
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(Failed, match="run `slipway update` again when CloudFormation has ended, to have it scaled"):
        stack.update(change, LARGER)


def test_copies_and_instances_that_nothing_scales_change_their_type_at_once(formation: Formation, stack: Stack) -> None:
    _create(stack, _wanted(configuration("scale_to_zero")))
    _update(stack, _wanted(configuration("scale_to_zero", instance_type="ml.g6e.12xlarge")))
    assert formation.changes.count("ExecuteChangeSet") == 2


def test_a_deletion_that_fails_says_what_is_left(formation: Formation, stack: Stack) -> None:
    _create(stack)
    formation.outcomes = [
        [("Endpoint", ENDPOINT, "DELETE_FAILED", "Cannot delete: has inference components"), of_stack("DELETE_FAILED")]
    ]
    with pytest.raises(Failed, match=r"DELETE_FAILED: Endpoint .*has inference components"):
        stack.delete()


def test_a_deletion_waits_until_an_update_has_ended(formation: Formation, stack: Stack, told: list[str]) -> None:
    formation.there("UPDATE_IN_PROGRESS")
    formation.coming = ["UPDATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"]
    stack.delete()
    assert told[0] == "the stack slipway-my-llm is UPDATE_IN_PROGRESS: waiting"
    assert formation.status is None


def test_a_template_that_is_too_long_is_refused_before_anything_is_called(formation: Formation, stack: Stack) -> None:
    env = {f"VARIABLE_{index}": "x" * 1000 for index in range(60)}
    with pytest.raises(Failed, match=r"has \d+ bytes, and CloudFormation takes 51200"):
        stack.propose(_wanted(configuration("real_time", env=env)))
    assert formation.changes == []
