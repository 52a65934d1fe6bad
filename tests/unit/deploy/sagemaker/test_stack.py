from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.stack import POLL, Conflict, Failed, Stack
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import configuration
from tests.unit.deploy.sagemaker.fake_cloudformation import Formation, of_stack

ENDPOINT = "AWS::SageMaker::Endpoint"
NOT_HEALTHY = "The primary container for production variant AllTraffic did not pass the ping health check."


WANTED = configuration("real_time")
OTHER = configuration("real_time", env={"OPTION_MAX_MODEL_LEN": 4096})


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


def _create(stack: Stack, wanted: Configuration = WANTED) -> None:
    change = stack.propose(wanted)
    assert change is not None
    stack.carry_out(change)


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
    assert {"ParameterKey": "Secret1", "ParameterValue": "hf_abcdefghijklmnop"} in made["Parameters"]
    assert not stack.ready_to_create()
    stack.check_updatable()
    change = stack.propose(OTHER)
    assert change is not None
    assert [(each["Action"], each["LogicalResourceId"]) for each in change.changes] == [("Modify", "Model")]
    stack.carry_out(change)
    assert formation.template == template(OTHER)
    assert stack.delete()
    assert formation.status is None
    assert not stack.delete()
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


def test_a_creation_that_fails_says_the_reasons_of_its_events(
    formation: Formation, stack: Stack, told: list[str]
) -> None:
    formation.outcomes = [
        [
            ("Model", "AWS::SageMaker::Model", "CREATE_COMPLETE", ""),
            ("Endpoint", ENDPOINT, "CREATE_FAILED", NOT_HEALTHY),
            ("Alarm", "AWS::CloudWatch::Alarm", "CREATE_FAILED", "Resource creation cancelled"),
            of_stack("DELETE_IN_PROGRESS", "The following resource(s) failed to create: [Endpoint]."),
            of_stack("DELETE_COMPLETE"),
        ]
    ]
    with pytest.raises(Failed) as raised:
        _create(stack)
    assert str(raised.value) == f"the stack slipway-my-llm is DELETE_COMPLETE: Endpoint ({ENDPOINT}): {NOT_HEALTHY}"
    assert raised.value.started
    assert f"Endpoint CREATE_FAILED: {NOT_HEALTHY}" in told
    assert formation.called("CreateChangeSet")[0]["OnStackFailure"] == "DELETE"


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
        stack.carry_out(change)
    assert formation.template == template(WANTED)
    stack.check_updatable()


def test_what_an_update_could_not_delete_is_told(formation: Formation, stack: Stack, told: list[str]) -> None:
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
    stack.carry_out(change)
    assert "Model DELETE_FAILED: no permission" in told


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "CREATE_FAILED", "ROLLBACK_FAILED", "DELETE_FAILED"])
def test_what_a_failed_creation_has_left_goes_before_another(
    status: str, formation: Formation, stack: Stack, told: list[str]
) -> None:
    formation.there(status)
    with pytest.raises(Conflict, match=f"is {status}; `slipway deploy` creates it"):
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
        ("UPDATE_IN_PROGRESS", "is UPDATE_IN_PROGRESS and cannot be updated now"),
        ("UPDATE_ROLLBACK_FAILED", "is UPDATE_ROLLBACK_FAILED and cannot be updated now"),
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


def test_an_interrupted_creation_is_deleted(formation: Formation, stack: Stack, told: list[str]) -> None:
    formation.outcomes = [[of_stack("CREATE_IN_PROGRESS")]]
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(KeyboardInterrupt):
        _create(stack)
    assert "interrupted: deleting the stack" in told
    assert formation.status is None


def test_an_interrupted_update_goes_on(formation: Formation, stack: Stack, told: list[str]) -> None:
    _create(stack)
    change = stack.propose(OTHER)
    assert change is not None
    formation.after = _interrupting(formation, "ExecuteChangeSet")
    with pytest.raises(KeyboardInterrupt):
        stack.carry_out(change)
    assert told[-1] == "interrupted; CloudFormation goes on: `slipway status` shows it"
    assert "DeleteStack" not in formation.changes


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
