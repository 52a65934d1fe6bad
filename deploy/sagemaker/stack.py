"""The CloudFormation stack of an endpoint: looked at, proposed as a change set, carried out, followed and deleted."""

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
POLL = 5
"""Seconds between two looks at what takes minutes."""

_NOT_MADE = "REVIEW_IN_PROGRESS"
"""A change set was proposed, and nothing has been made of it yet."""
_DEAD = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"})
"""A stack that can only be deleted."""
_STARTING = frozenset({"AWS::SageMaker::Endpoint", "AWS::SageMaker::InferenceComponent"})
"""Resources that run containers, whose log may say why they did not start."""


class Conflict(Exception):
    """The stack is not in a state in which the command can do its work; nothing was changed."""


class Failed(Exception):
    """CloudFormation did not carry out what was asked; the message has its reasons."""

    def __init__(self, reason: str, *, started: bool = False) -> None:
        """`started`: containers were to start, and their log may say why they did not."""
        super().__init__(reason)
        self.started = started


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """A change that CloudFormation has checked and can carry out."""

    id: str
    stack: str
    """Id of the stack."""
    changes: list[dict[str, Any]]
    """CloudFormation's `ResourceChange` of each resource."""
    creates: bool
    """The stack is new."""


class Stack:
    """The stack of one endpoint."""

    def __init__(
        self,
        client: Any,
        endpoint: str,
        tell: Callable[[str], None] = lambda line: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`client` is boto3's of CloudFormation; `tell` is given a line for each event."""
        self._client = client
        self._endpoint = endpoint
        self._tell = tell
        self._sleep = sleep
        self._last_event = ""
        # An endpoint's name may begin with a digit, a stack's may not.
        self.name = f"slipway-{endpoint}"

    def status(self) -> str | None:
        """Such as "CREATE_COMPLETE"; None if there is no stack, or nothing has been made of it.

        Raises Conflict where a stack of the name is there that Slipway has not made.
        """
        from botocore.exceptions import ClientError

        try:
            found = self._client.describe_stacks(StackName=self.name)["Stacks"][0]
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        if found["StackStatus"] == _NOT_MADE:
            return None
        if {"Key": ENDPOINT_TAG, "Value": self._endpoint} not in found.get("Tags", ()):
            raise Conflict(
                f"the stack {self.name} exists and was not made by Slipway (it has no tag {ENDPOINT_TAG}); choose "
                "another name for the endpoint"
            )
        return str(found["StackStatus"])

    def ready_to_create(self) -> bool:
        """Wait for what goes on, and delete what an earlier creation has left; False if the stack is there, whole.

        Raises Failed where what was left cannot be deleted.
        """
        self._settle()
        status = self.status()
        if status in _DEAD:
            self._tell(f"the stack {self.name} is {status}: deleting it first")
            self.delete()
            return True
        return status is None

    def check_updatable(self) -> None:
        """Raise Conflict unless the stack is there and at rest."""
        status = self.status()
        if status is None or status in _DEAD:
            there = f"the stack {self.name} is {status}" if status else f"there is no stack {self.name}"
            raise Conflict(f"{there}; `slipway deploy` creates it")
        if not status.endswith("_COMPLETE"):
            raise Conflict(f"the stack {self.name} is {status} and cannot be updated now")

    def propose(self, configuration: Configuration) -> ChangeSet | None:
        """Have CloudFormation work out what would change; None if nothing would.

        Raises Failed where CloudFormation cannot do it, and botocore's ClientError where it refuses.
        """
        from botocore.exceptions import WaiterError

        creates = self.status() is None
        on_failure = {"OnStackFailure": "DELETE"} if creates else {}
        tags = {**configuration.labels, ENDPOINT_TAG: self._endpoint}
        made = self._client.create_change_set(
            StackName=self.name,
            ChangeSetName=f"slipway-{time.time_ns()}",
            TemplateBody=json.dumps(template(configuration), separators=(",", ":")),  # at most 51,200 bytes
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
        except WaiterError as error:
            self.discard(change)
            reason = str(error.last_response.get("StatusReason", error))
            if "didn't contain changes" in reason or "No updates are to be performed" in reason:
                return None
            raise Failed(f"CloudFormation cannot make this change: {reason}") from None
        pages = self._client.get_paginator("describe_change_set").paginate(ChangeSetName=change.id)
        change.changes.extend(each["ResourceChange"] for page in pages for each in page["Changes"])
        return change

    def discard(self, change: ChangeSet) -> None:
        """Forget a proposal; the stack that it was to make goes with it."""
        if change.creates:
            self._client.delete_stack(StackName=change.stack)
        else:
            self._client.delete_change_set(ChangeSetName=change.id)

    def carry_out(self, change: ChangeSet) -> None:
        """Make the stack, or change it; CloudFormation takes back what it made if it fails, and Failed is raised.

        An interruption deletes a stack that is being made, and leaves CloudFormation at work on another.
        """
        try:
            self._new_events(change.stack)  # what has happened so far is not told
            self._client.execute_change_set(ChangeSetName=change.id)
            self._follow(change.stack, "CREATE_COMPLETE", "UPDATE_COMPLETE")
        except KeyboardInterrupt:
            if change.creates:
                self._tell("interrupted: deleting the stack")
                self.delete()
            else:
                self._tell("interrupted; CloudFormation goes on: `slipway status` shows it")
            raise

    def delete(self) -> bool:
        """Delete the stack with all that is in it, and wait until it is gone; False if there is none.

        Raises Failed where something could not be deleted.
        """
        if self.status() != "CREATE_IN_PROGRESS":  # which can be deleted; the rest has to end first
            self._settle()
        if self.status() is None:
            return False
        stack = self._client.describe_stacks(StackName=self.name)["Stacks"][0]["StackId"]
        self._new_events(stack)  # what has happened so far is not told
        self._client.delete_stack(StackName=stack)
        self._follow(stack, "DELETE_COMPLETE")
        return True

    def _settle(self) -> None:
        told = ""
        while (status := self.status()) and status.endswith("_IN_PROGRESS"):
            if status != told:
                self._tell(f"the stack {self.name} is {status}: waiting")
                told = status
            self._sleep(POLL)

    def _follow(self, stack: str, *wanted: str) -> None:
        """Tell of each event until the stack is at rest; the reasons of a failure are those of its events."""
        problems: list[str] = []
        started = False
        while True:
            for event in self._new_events(stack):
                status, kind, name = event["ResourceStatus"], event["ResourceType"], event["LogicalResourceId"]
                reason = event.get("ResourceStatusReason", "")
                self._tell(f"{name} {status}" + (f": {reason}" if reason else ""))
                if event.get("PhysicalResourceId") == stack:
                    if status in wanted:
                        return
                    if not status.endswith("_IN_PROGRESS"):
                        why = "; ".join(problems) or reason or "no reason was given"
                        raise Failed(f"the stack {self.name} is {status}: {why}", started=started)
                elif status.endswith("_FAILED") and not reason.endswith("cancelled"):
                    problems.append(f"{name} ({kind}): {reason or status}")
                    started = started or kind in _STARTING
            self._sleep(POLL)

    def _new_events(self, stack: str) -> list[dict[str, Any]]:
        """The events since the last look, oldest first; CloudFormation gives the newest first."""
        found: list[dict[str, Any]] = []
        pages = self._client.get_paginator("describe_stack_events").paginate(StackName=stack)
        for event in (event for page in pages for event in page["StackEvents"]):
            if event["EventId"] == self._last_event:
                break
            found.append(event)
        if found:
            self._last_event = found[0]["EventId"]
        return found[::-1]
