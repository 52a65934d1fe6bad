"""The CloudFormation stack of an endpoint: its state, its changes and its deletion."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.aws import is_missing
from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.template import secrets, template

ENDPOINT_TAG = "slipway:endpoint"
POLL = 5  # The seconds between two checks of a running operation.

_ONLY_PROPOSED = "REVIEW_IN_PROGRESS"  # A change set was created but not executed.
# A stack with one of these statuses can only be deleted.
_DEAD = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"})
# Resources that run containers. If such a resource fails, the containers' log may show the reason.
_STARTING = frozenset({"AWS::SageMaker::Endpoint", "AWS::SageMaker::InferenceComponent"})


class StackConflict(Exception):
    """The state of the stack does not allow the command. Nothing was changed."""


class StackFailed(Exception):
    """CloudFormation failed. The message states CloudFormation's reasons."""

    def __init__(self, reason: str, *, started: bool = False) -> None:
        """Describe the failure.

        Args:
            reason: CloudFormation's reasons.
            started: Whether containers were started. Their log may show why they failed.
        """
        super().__init__(reason)
        self.started = started


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """A change that CloudFormation has checked and can carry out."""

    id: str
    stack: str  # The id of the stack.
    changes: list[dict[str, Any]]  # CloudFormation's `ResourceChange` for each resource.
    creates: bool  # Whether the stack is new.


class Stack:
    """The stack of one endpoint."""

    def __init__(
        self,
        client: Any,
        endpoint: str,
        report: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Prepare to manage the stack of an endpoint.

        Args:
            client: boto3's client for CloudFormation.
            endpoint: The name of the endpoint.
            report: Called with a line for each event.
            sleep: Waits for some seconds.
        """
        self._client = client
        self._endpoint = endpoint
        self._report = report
        self._sleep = sleep
        self._last_event = ""
        # An endpoint's name may begin with a digit, but a stack's name may not.
        self.name = f"slipway-{endpoint}"

    def status(self) -> str | None:
        """Return the status, such as "CREATE_COMPLETE".

        Returns:
            The status. None if the stack does not exist, or if it consists only of a change set.

        Raises:
            StackConflict: A stack has this name, but Slipway did not create it.
        """
        from botocore.exceptions import ClientError

        try:
            found = self._client.describe_stacks(StackName=self.name)["Stacks"][0]
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        if found["StackStatus"] == _ONLY_PROPOSED:
            return None
        if {"Key": ENDPOINT_TAG, "Value": self._endpoint} not in found.get("Tags", ()):
            raise StackConflict(
                f"the stack {self.name} exists, and Slipway did not create it (it has no tag {ENDPOINT_TAG}); choose "
                "another name for the endpoint"
            )
        return str(found["StackStatus"])

    def ready_to_create(self) -> bool:
        """Prepare to create the stack.

        Wait for a running operation, and delete the remains of a failed creation.

        Returns:
            False if the stack exists and is complete.

        Raises:
            StackFailed: The remains cannot be deleted.
            StackConflict: The stack cannot be updated.
        """
        self._settle()
        status = self.status()
        if status in _DEAD:
            self._report(f"the stack {self.name} is {status}: deleting it first")
            self.delete()
            return True
        if status is None:
            return True
        self._check_complete(status)
        return False

    def check_updatable(self) -> None:
        """Check that the stack exists and that no operation is running.

        Raises:
            StackConflict: The stack cannot be updated.
        """
        status = self.status()
        if status is None or status in _DEAD:
            there = f"the stack {self.name} is {status}" if status else f"the stack {self.name} does not exist"
            raise StackConflict(f"{there}; `slipway deploy` creates it")
        self._check_complete(status)

    def _check_complete(self, status: str) -> None:
        if not status.endswith("_COMPLETE"):
            raise StackConflict(f"the stack {self.name} is {status} and cannot be updated now")

    def propose(self, configuration: Configuration) -> ChangeSet | None:
        """Let CloudFormation compute the changes.

        Returns:
            The changes, or None if the configuration changes nothing.

        Raises:
            StackFailed: CloudFormation cannot make the changes.
            botocore.exceptions.ClientError: CloudFormation refused the call.
        """
        from botocore.exceptions import ClientError, WaiterError

        creates = self.status() is None
        on_failure = {"OnStackFailure": "DELETE"} if creates else {}
        tags = {**configuration.labels, ENDPOINT_TAG: self._endpoint}
        made = self._client.create_change_set(
            StackName=self.name,
            ChangeSetName=f"slipway-{time.time_ns()}",
            TemplateBody=json.dumps(
                template(configuration), separators=(",", ":"), default=str
            ),  # CloudFormation accepts at most 51,200 bytes.
            Parameters=[
                {"ParameterKey": parameter, "ParameterValue": configuration.environment[variable]}
                for variable, parameter in secrets(configuration).items()
            ],
            Capabilities=["CAPABILITY_IAM"],
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
            ChangeSetType="CREATE" if creates else "UPDATE",
            **on_failure,
        )
        change = ChangeSet(made["Id"], made["StackId"], [], creates)
        waiter = self._client.get_waiter("change_set_create_complete")
        try:
            waiter.wait(ChangeSetName=change.id, WaiterConfig={"Delay": POLL})
            pages = self._client.get_paginator("describe_change_set").paginate(ChangeSetName=change.id)
            change.changes.extend(each["ResourceChange"] for page in pages for each in page["Changes"])
        except WaiterError as error:
            self.discard(change)
            reason = str(error.last_response.get("StatusReason", error))
            if "didn't contain changes" in reason or "No updates are to be performed" in reason:
                return None
            raise StackFailed(f"CloudFormation cannot make this change: {reason}") from None
        except BaseException:  # The user pressed Ctrl-C, or AWS refused a call during the wait.
            try:
                self.discard(change)
            except ClientError as refusal:  # AWS does not delete a change set that is still being computed.
                self._report(f"the change set {change.id} is left: {refusal}")
            raise
        return change

    def discard(self, change: ChangeSet) -> None:
        """Delete a change set. If the stack consists only of this change set, delete the stack."""
        if change.creates:
            found = self._client.describe_stacks(StackName=change.stack)["Stacks"][0]
            pages = self._client.get_paginator("list_change_sets").paginate(StackName=change.stack)
            sets = [each for page in pages for each in page["Summaries"] if each["Status"] != "FAILED"]
            if found["StackStatus"] == _ONLY_PROPOSED and all(each["ChangeSetId"] == change.id for each in sets):
                self._client.delete_stack(StackName=change.stack)
                return
        self._client.delete_change_set(ChangeSetName=change.id)

    def carry_out(self, change: ChangeSet) -> None:
        """Create or change the stack. CloudFormation rolls back a change that fails.

        If the user interrupts the command while the stack is being created, the stack is deleted. If the user
        interrupts any other change, CloudFormation continues with it.

        Raises:
            StackFailed: The change failed.
            botocore.exceptions.ClientError: CloudFormation refused the call.
        """
        from botocore.exceptions import ClientError

        try:
            self._new_events(change.stack)  # Skips earlier events.
            try:
                self._client.execute_change_set(ChangeSetName=change.id)
            except ClientError:  # For example, the user lacks the permission to execute it.
                self.discard(change)
                raise
            self._follow(change.stack, "CREATE_COMPLETE", "UPDATE_COMPLETE")
        except KeyboardInterrupt:
            if change.creates:
                self._report("interrupted: deleting the stack")
                if not self.delete():  # The change has not begun.
                    self.discard(change)
            else:
                self._report("interrupted; CloudFormation continues: `slipway status` shows its progress")
            raise

    def delete(self) -> bool:
        """Delete the stack with all its resources, and wait until this is done.

        Returns:
            False if the stack does not exist.

        Raises:
            StackFailed: A resource cannot be deleted.
        """
        before = self.status()
        if before != "CREATE_IN_PROGRESS":  # Such a stack can be deleted. Any other operation has to finish first.
            self._settle()
        if self.status() is None:
            return before is not None  # The stack was already being deleted.
        stack = self._client.describe_stacks(StackName=self.name)["Stacks"][0]["StackId"]
        self._new_events(stack)  # Skips earlier events.
        self._client.delete_stack(StackName=stack)
        self._follow(stack, "DELETE_COMPLETE")
        return True

    def _settle(self) -> None:
        reported = ""
        while (status := self.status()) and status.endswith("_IN_PROGRESS"):
            if status != reported:
                self._report(f"the stack {self.name} is {status}: waiting")
                reported = status
            self._sleep(POLL)

    def _follow(self, stack: str, *wanted: str) -> None:
        """Report each event until no operation is running. An exception lists the reasons of failed events."""
        problems: list[str] = []
        started = False
        while True:
            for event in self._new_events(stack):
                status, kind, name = event["ResourceStatus"], event["ResourceType"], event["LogicalResourceId"]
                reason = event.get("ResourceStatusReason", "")
                self._report(f"{name} {status}" + (f": {reason}" if reason else ""))
                if event.get("PhysicalResourceId") == stack:
                    if status in wanted:
                        return
                    if not status.endswith("_IN_PROGRESS"):
                        why = "; ".join(problems) or reason or "no reason was given"
                        raise StackFailed(f"the stack {self.name} is {status}: {why}", started=started)
                elif status.endswith("_FAILED") and not reason.endswith("cancelled"):
                    problems.append(f"{name} ({kind}): {reason or status}")
                    started = started or kind in _STARTING
            self._sleep(POLL)

    def _new_events(self, stack: str) -> list[dict[str, Any]]:
        """Return the events since the last call, oldest first. CloudFormation returns the newest event first."""
        found: list[dict[str, Any]] = []
        pages = self._client.get_paginator("describe_stack_events").paginate(StackName=stack)
        for event in (event for page in pages for event in page["StackEvents"]):
            if event["EventId"] == self._last_event:
                break
            found.append(event)
        if found:
            self._last_event = found[0]["EventId"]
        return found[::-1]
