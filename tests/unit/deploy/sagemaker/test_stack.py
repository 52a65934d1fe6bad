from __future__ import annotations

from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.stack import POLL, ChangeSet, Stack, StackConflict, StackFailed
from deploy.sagemaker.template import template
from tests.unit.deploy.sagemaker.configurations import configuration
from tests.unit.deploy.sagemaker.fake_cloudformation import FakeCloudFormation, stack_event

ENDPOINT = "AWS::SageMaker::Endpoint"
NOT_HEALTHY = "The primary container for production variant AllTraffic did not pass the ping health check."


WANTED = configuration("real_time")
OTHER = configuration("real_time", env={"OPTION_MAX_MODEL_LEN": 4096})


@pytest.fixture
def cloudformation() -> FakeCloudFormation:
    return FakeCloudFormation()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def stack(cloudformation: FakeCloudFormation, told: list[str]) -> Stack:
    def sleep(seconds: float) -> None:
        assert seconds == POLL
        assert len(told) < 100, "it waits for ever"
        told.append("slept")

    return Stack(cloudformation.client, "my-llm", told.append, sleep)


def _proposed(stack: Stack, wanted: Configuration = WANTED) -> ChangeSet:
    change = stack.propose(wanted)
    assert change is not None
    return change


def _create(stack: Stack) -> None:
    stack.carry_out(_proposed(stack))


def _interrupting(cloudformation: FakeCloudFormation, operation: str) -> Callable[[str], None]:
    def interrupt(called: str) -> None:
        if called == operation:
            cloudformation.after = lambda operation: None
            raise KeyboardInterrupt

    return interrupt


def test_a_stack_is_made_updated_and_deleted(cloudformation: FakeCloudFormation, stack: Stack, told: list[str]) -> None:
    assert stack.ready_to_create()
    _create(stack)
    assert cloudformation.status == "CREATE_COMPLETE"
    assert "Endpoint CREATE_COMPLETE" in told
    made = cloudformation.called("CreateChangeSet")[0]
    assert (made["StackName"], made["Capabilities"]) == ("slipway-my-llm", ["CAPABILITY_IAM"])
    assert {"Key": "slipway:endpoint", "Value": "my-llm"} in made["Tags"]
    assert {"ParameterKey": "Secret1", "ParameterValue": "hf_abcdefghijklmnop"} in made["Parameters"]
    assert not stack.ready_to_create()
    stack.check_updatable()
    change = _proposed(stack, OTHER)
    assert [(each["Action"], each["LogicalResourceId"]) for each in change.changes] == [("Modify", "Model")]
    stack.carry_out(change)
    assert cloudformation.template == template(OTHER)
    assert stack.delete()
    assert cloudformation.status is None
    assert not stack.delete()
    assert cloudformation.changes.count("DeleteStack") == 1


def test_a_stack_that_somebody_else_is_about_to_create_is_kept(
    cloudformation: FakeCloudFormation, stack: Stack
) -> None:
    cloudformation.others = ["change of a colleague"]
    change = _proposed(stack)
    stack.discard(change)
    assert (cloudformation.changes[-1], cloudformation.status) == ("DeleteChangeSet", "REVIEW_IN_PROGRESS")
    cloudformation.others = []
    stack.discard(change)
    assert (cloudformation.changes[-1], cloudformation.status) == ("DeleteStack", None)


@pytest.mark.parametrize("look", [1, 2])
def test_an_interrupted_proposal_leaves_no_stack(cloudformation: FakeCloudFormation, stack: Stack, look: int) -> None:
    """The first call of DescribeChangeSet waits for the changes, and the second reads them."""

    def interrupt(called: str) -> None:
        if called == "DescribeChangeSet" and len(cloudformation.called(called)) == look:
            raise KeyboardInterrupt

    cloudformation.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        stack.propose(WANTED)
    assert cloudformation.status is None


def test_what_cloudformation_cannot_do_is_said_with_its_reason(
    cloudformation: FakeCloudFormation, stack: Stack
) -> None:
    cloudformation.proposal_fails = "No export named x found."
    with pytest.raises(StackFailed, match="No export named x found"):
        stack.propose(WANTED)
    assert cloudformation.status is None


def test_a_creation_that_fails_says_the_reasons_of_its_events(
    cloudformation: FakeCloudFormation, stack: Stack, told: list[str]
) -> None:
    cloudformation.next_change(
        ("Model", "AWS::SageMaker::Model", "CREATE_COMPLETE", ""),
        ("Endpoint", ENDPOINT, "CREATE_FAILED", NOT_HEALTHY),
        ("Alarm", "AWS::CloudWatch::Alarm", "CREATE_FAILED", "Resource creation cancelled"),
        stack_event("DELETE_IN_PROGRESS", "The following resource(s) failed to create: [Endpoint]."),
        stack_event("DELETE_COMPLETE"),
    )
    with pytest.raises(StackFailed) as raised:
        _create(stack)
    assert str(raised.value) == f"the stack slipway-my-llm is DELETE_COMPLETE: Endpoint ({ENDPOINT}): {NOT_HEALTHY}"
    assert raised.value.started
    assert f"Endpoint CREATE_FAILED: {NOT_HEALTHY}" in told
    assert cloudformation.called("CreateChangeSet")[0]["OnStackFailure"] == "DELETE"


def test_an_update_that_fails_leaves_what_was_there(cloudformation: FakeCloudFormation, stack: Stack) -> None:
    _create(stack)
    cloudformation.next_change(
        ("Endpoint", ENDPOINT, "UPDATE_FAILED", "one of its alarms rang"),
        stack_event("UPDATE_ROLLBACK_IN_PROGRESS"),
        stack_event("UPDATE_ROLLBACK_COMPLETE"),
    )
    change = _proposed(stack, OTHER)
    with pytest.raises(
        StackFailed, match=r"UPDATE_ROLLBACK_COMPLETE: Endpoint \(AWS::SageMaker::Endpoint\): one of its"
    ):
        stack.carry_out(change)
    assert cloudformation.template == template(WANTED)
    stack.check_updatable()


def test_what_an_update_could_not_delete_is_told(
    cloudformation: FakeCloudFormation, stack: Stack, told: list[str]
) -> None:
    _create(stack)
    cloudformation.next_change(
        stack_event("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS"),
        ("Model", "AWS::SageMaker::Model", "DELETE_FAILED", "no permission"),
        stack_event("UPDATE_COMPLETE"),
    )
    stack.carry_out(_proposed(stack, OTHER))
    assert "Model DELETE_FAILED: no permission" in told


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "CREATE_FAILED", "ROLLBACK_FAILED", "DELETE_FAILED"])
def test_what_a_failed_creation_has_left_goes_before_another(
    status: str, cloudformation: FakeCloudFormation, stack: Stack, told: list[str]
) -> None:
    cloudformation.there(status)
    with pytest.raises(StackConflict, match=status):
        stack.check_updatable()
    assert stack.ready_to_create()
    assert told[0] == f"the stack slipway-my-llm is {status}: deleting it first"
    _create(stack)
    assert cloudformation.status == "CREATE_COMPLETE"


def test_what_goes_on_with_the_stack_is_waited_for(
    cloudformation: FakeCloudFormation, stack: Stack, told: list[str]
) -> None:
    cloudformation.there("CREATE_IN_PROGRESS")
    cloudformation.coming = ["CREATE_IN_PROGRESS", "CREATE_IN_PROGRESS", "CREATE_COMPLETE"]
    assert not stack.ready_to_create()
    assert told == ["the stack slipway-my-llm is CREATE_IN_PROGRESS: waiting", "slept", "slept"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "the stack slipway-my-llm does not exist; `slipway deploy` creates it"),
        ("UPDATE_IN_PROGRESS", "is UPDATE_IN_PROGRESS and cannot be updated now"),
        ("UPDATE_ROLLBACK_FAILED", "is UPDATE_ROLLBACK_FAILED and cannot be updated now"),
    ],
)
def test_a_stack_that_cannot_be_updated_says_what_to_do(
    status: str | None, said: str, cloudformation: FakeCloudFormation, stack: Stack
) -> None:
    if status:
        cloudformation.there(status)
    with pytest.raises(StackConflict, match=said):
        stack.check_updatable()
    if status and "FAILED" in status:
        with pytest.raises(StackConflict, match=said):
            stack.ready_to_create()


def test_a_stack_that_someone_else_has_made_is_kept(cloudformation: FakeCloudFormation, stack: Stack) -> None:
    cloudformation.there("CREATE_COMPLETE", endpoint="theirs")
    for look in (stack.status, stack.check_updatable, stack.ready_to_create):
        with pytest.raises(StackConflict):
            look()


def test_a_creation_that_is_interrupted_before_it_begins_leaves_no_stack(
    cloudformation: FakeCloudFormation, stack: Stack
) -> None:
    change = _proposed(stack)
    cloudformation.after = _interrupting(cloudformation, "DescribeStackEvents")
    with pytest.raises(KeyboardInterrupt):
        stack.carry_out(change)
    assert cloudformation.status is None
    assert cloudformation.called("ExecuteChangeSet") == []


def test_a_refused_creation_leaves_no_stack(cloudformation: FakeCloudFormation, stack: Stack) -> None:
    change = _proposed(stack)

    cloudformation.refused = {"ExecuteChangeSet"}
    with pytest.raises(ClientError, match="AccessDenied"):
        stack.carry_out(change)
    assert cloudformation.status is None


def test_an_interrupted_update_goes_on(cloudformation: FakeCloudFormation, stack: Stack, told: list[str]) -> None:
    _create(stack)
    change = _proposed(stack, OTHER)
    cloudformation.after = _interrupting(cloudformation, "ExecuteChangeSet")
    with pytest.raises(KeyboardInterrupt):
        stack.carry_out(change)
    assert told[-1] == "interrupted; CloudFormation continues: `slipway status` shows its progress"
    assert "DeleteStack" not in cloudformation.changes


def test_a_deletion_that_fails_says_what_is_left(cloudformation: FakeCloudFormation, stack: Stack) -> None:
    _create(stack)
    cloudformation.next_change(
        ("Endpoint", ENDPOINT, "DELETE_FAILED", "Cannot delete: has inference components"),
        stack_event("DELETE_FAILED"),
    )
    with pytest.raises(StackFailed, match=r"DELETE_FAILED: Endpoint .*has inference components"):
        stack.delete()


def test_a_deletion_waits_until_an_update_has_ended(
    cloudformation: FakeCloudFormation, stack: Stack, told: list[str]
) -> None:
    cloudformation.there("UPDATE_IN_PROGRESS")
    cloudformation.coming = ["UPDATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_COMPLETE"]
    stack.delete()
    assert told[0] == "the stack slipway-my-llm is UPDATE_IN_PROGRESS: waiting"
    assert cloudformation.status is None
