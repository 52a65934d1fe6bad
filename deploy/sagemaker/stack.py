"""The CloudFormation stack of an endpoint: looked at, proposed as a change set, carried out, followed and deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.aws import error_in_words, is_missing
from deploy.sagemaker.template import SCALING_TYPES

ENDPOINT_TAG = "slipway:endpoint"
LONGEST_TEMPLATE = 51_200
"""Bytes that CloudFormation takes with a call."""
POLL = 5.0
"""Seconds between two looks at what takes minutes."""

_STACK = "AWS::CloudFormation::Stack"
_NOT_MADE = "REVIEW_IN_PROGRESS"
"""A change set was proposed, and nothing has been made of it yet."""
_DEAD = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"})
"""A stack that can only be deleted."""
_STARTING = frozenset({"AWS::SageMaker::Endpoint", "AWS::SageMaker::InferenceComponent"})
"""What has containers in it, which log."""


class Conflict(Exception):
    """The stack is not in a state in which the command can do its work; nothing was changed."""


class Failed(Exception):
    """CloudFormation did not carry out what was asked; the message has its reasons."""

    def __init__(self, reason: str, *, interrupted: bool = False, started: bool = False) -> None:
        """`started`: containers were to start, and their log may say why they did not."""
        super().__init__(reason)
        self.interrupted = interrupted
        self.started = started


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the stack is to be."""

    template: Mapping[str, Any]
    parameters: Mapping[str, str | None]
    """None: the value that the stack has already."""
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """What a change set does to one resource."""

    action: str
    """"Add", "Modify" or "Remove"."""
    resource: str
    """Its logical id."""
    kind: str
    """"AWS::SageMaker::Endpoint"."""
    replacement: str
    """"True", "False" or "Conditional"; empty where nothing is modified."""


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """A change that CloudFormation has checked and can carry out."""

    id: str
    stack: str
    """Id of the stack."""
    changes: tuple[Change, ...]
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

    @property
    def name(self) -> str:
        """Its name; an endpoint's may begin with a digit, a stack's may not."""
        return f"slipway-{self._endpoint}"

    def description(self) -> dict[str, Any] | None:
        """What CloudFormation says of it; None if it is not there.

        Raises:
            Conflict: a stack of the name is there that Slipway has not made.
        """
        found = self._described()
        if found is None:
            return None
        tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
        if found["StackStatus"] != _NOT_MADE and tags.get(ENDPOINT_TAG) != self._endpoint:
            raise Conflict(
                f"the stack {self.name} exists and was not made by Slipway (it has no tag {ENDPOINT_TAG}); choose "
                "another name for the endpoint"
            )
        return found

    def status(self) -> str | None:
        """Such as "CREATE_COMPLETE"; None if there is no stack, or nothing has been made of it."""
        found = self.description()
        return None if found is None or found["StackStatus"] == _NOT_MADE else str(found["StackStatus"])

    def resources(self) -> list[str]:
        """What belongs to it: "AWS::SageMaker::Endpoint my-llm"."""
        pages = self._client.get_paginator("list_stack_resources").paginate(StackName=self.name)
        found = [each for page in pages for each in page["StackResourceSummaries"]]
        return [f"{each['ResourceType']} {each.get('PhysicalResourceId', each['LogicalResourceId'])}" for each in found]

    def ready_to_create(self) -> bool:
        """Wait for what goes on, and delete what an earlier creation has left; False if the stack is there, whole.

        Raises:
            Failed: what was left cannot be deleted.
        """
        self.settle()
        status = self.status()
        if status in _DEAD:
            self._tell(f"the stack {self.name} is {status}: deleting it first")
            self.delete()
            return True
        return status is None

    def check_updatable(self) -> None:
        """See whether it is there and at rest.

        Raises:
            Conflict: it is not, and the message says what to do.
        """
        status = self.status()
        if status is None:
            raise Conflict(f"there is no stack {self.name}; `slipway deploy` creates it")
        if status in _DEAD:
            raise Conflict(f"the stack {self.name} is {status} and cannot be updated; `slipway deploy` creates it anew")
        if status == "UPDATE_ROLLBACK_FAILED":
            raise Conflict(
                f"the stack {self.name} is {status}: put right what its events name, then run "
                f"`aws cloudformation continue-update-rollback --stack-name {self.name}`"
            )
        if status.endswith("_IN_PROGRESS"):
            raise Conflict(f"the stack {self.name} is {status}; it can be updated once that has ended")

    def settle(self) -> None:
        """Wait until what goes on with the stack has ended."""
        told = ""
        while (status := self.status()) and status.endswith("_IN_PROGRESS"):
            if status != told:
                self._tell(f"the stack {self.name} is {status}: waiting")
                told = status
            self._sleep(POLL)

    def propose(self, wanted: Wanted, *, rollback: bool = True) -> ChangeSet | None:
        """Have CloudFormation work out what would change; None if nothing would.

        Without `rollback`, what a failed creation has made stays.

        Raises:
            Failed: CloudFormation cannot do it.
            botocore.exceptions.ClientError: it refused.
        """
        from botocore.exceptions import ClientError

        creates = self.status() is None
        on_failure = {"OnStackFailure": "DELETE" if rollback else "DO_NOTHING"} if creates else {}
        try:
            made = self._client.create_change_set(
                StackName=self.name,
                ChangeSetName=f"slipway-{time.time_ns()}",
                TemplateBody=_body(wanted.template),
                Parameters=[_parameter(name, value) for name, value in wanted.parameters.items()],
                Capabilities=["CAPABILITY_IAM"],
                Tags=[{"Key": key, "Value": value} for key, value in wanted.tags.items()],
                ChangeSetType="CREATE" if creates else "UPDATE",
                **on_failure,
            )
        except ClientError as error:
            if _is_no_change(str(error)):
                return None
            raise
        change = ChangeSet(made["Id"], made["StackId"], (), creates)
        while True:
            found = self._client.describe_change_set(ChangeSetName=change.id)
            if found["Status"] not in ("CREATE_PENDING", "CREATE_IN_PROGRESS"):
                break
            self._sleep(POLL)
        if found["Status"] != "CREATE_COMPLETE":
            self.discard(change)
            reason = str(found.get("StatusReason", "no reason was given"))
            if _is_no_change(reason):
                return None
            raise Failed(f"CloudFormation cannot make this change: {reason}")
        return ChangeSet(change.id, change.stack, tuple(self._changes(change.id)), creates)

    def discard(self, change: ChangeSet) -> None:
        """Forget a proposal; the stack that it was to make goes with it."""
        if change.creates:
            self._client.delete_stack(StackName=change.stack)
        else:
            self._client.delete_change_set(ChangeSetName=change.id)

    def create(self, change: ChangeSet, *, rollback: bool = True) -> None:
        """Carry out the first change; CloudFormation deletes what it made if it fails.

        Raises:
            Failed: it failed or was interrupted.
        """
        try:
            self._carry_out(change)
        except KeyboardInterrupt:
            if not rollback:
                raise Failed(
                    f"interrupted; CloudFormation goes on creating {self.name}: `slipway status` shows it",
                    interrupted=True,
                ) from None
            self._tell("interrupted: deleting the stack")
            self.delete()
            raise Failed("interrupted; what was made is deleted", interrupted=True) from None

    def update(self, change: ChangeSet, wanted: Wanted) -> tuple[str, ...]:
        """Carry out a change of what runs; gives what is no longer needed and could not be deleted.

        CloudFormation goes back to what was if it fails. As SageMaker does not change the type of instances that are
        scaled, the scaling is released before such a change, and set again with it.

        Raises:
            Failed: it failed or was interrupted.
        """
        body = self._client.get_template(StackName=self.name, TemplateStage="Original")["TemplateBody"]
        running: dict[str, Any] = json.loads(body) if isinstance(body, str) else body
        if not _changes_scaled_instances(running, wanted.template):
            return self._update(change)
        self.discard(change)
        self._tell("releasing the scaling while the instance type changes")
        kept = {name: each for name, each in running["Resources"].items() if not each["Type"].startswith(SCALING_TYPES)}
        try:
            self._update_to({**running, "Resources": kept})
            again = self.propose(wanted)
            return self._update(again) if again else ()
        except Failed as error:
            if error.interrupted:
                raise Failed(
                    "interrupted; run `slipway update` again when CloudFormation has ended, to have it scaled",
                    interrupted=True,
                ) from None
            self._set_scaling_again(running, error)
            raise

    def delete(self) -> None:
        """Delete the stack with all that is in it, and wait until it is gone.

        Raises:
            Failed: something could not be deleted.
        """
        if self.status() != "CREATE_IN_PROGRESS":  # which can be deleted; the rest has to end first
            self.settle()
        found = self._described()
        if found is None:
            return
        self._new_events(found["StackId"])  # what has happened so far is not told
        self._client.delete_stack(StackName=found["StackId"])
        if found["StackStatus"] != _NOT_MADE:
            self._follow(found["StackId"], "DELETE_COMPLETE")

    def _described(self) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        try:
            found: dict[str, Any] = self._client.describe_stacks(StackName=self.name)["Stacks"][0]
        except ClientError as error:
            if is_missing(error):
                return None
            raise
        return found

    def _update_to(self, template: Mapping[str, Any]) -> None:
        """Update the stack to a template of the same parameters and tags."""
        found = self._described()
        assert found is not None
        tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
        change = self.propose(Wanted(template, dict.fromkeys(template["Parameters"]), tags))
        if change:
            self._update(change)

    def _set_scaling_again(self, running: Mapping[str, Any], error: Failed) -> None:
        from botocore.exceptions import ClientError

        self._tell("setting the scaling again")
        try:
            self._update_to(running)
        except (Failed, ClientError) as again:
            text = f"{error}; and the scaling could not be set again: {error_in_words(again)}"
            raise Failed(text, started=error.started) from again

    def _update(self, change: ChangeSet) -> tuple[str, ...]:
        try:
            return self._carry_out(change)
        except KeyboardInterrupt:
            raise Failed(
                "interrupted; CloudFormation goes on with the update: `slipway status` shows it", interrupted=True
            ) from None

    def _changes(self, id: str) -> Iterator[Change]:
        pages = self._client.get_paginator("describe_change_set").paginate(ChangeSetName=id)
        for each in (entry["ResourceChange"] for page in pages for entry in page["Changes"]):
            yield Change(each["Action"], each["LogicalResourceId"], each["ResourceType"], each.get("Replacement", ""))

    def _carry_out(self, change: ChangeSet) -> tuple[str, ...]:
        self._new_events(change.stack)  # what has happened so far is not told
        self._client.execute_change_set(ChangeSetName=change.id)
        return self._follow(change.stack, "CREATE_COMPLETE", "UPDATE_COMPLETE")

    def _follow(self, stack: str, *wanted: str) -> tuple[str, ...]:
        """Tell of each event until the stack is at rest; gives what failed although the stack is as wanted.

        Raises:
            Failed: it did not come to a wanted status; the reasons are those of its events.
        """
        problems: list[str] = []
        started = False
        while True:
            for event in self._new_events(stack):
                status, kind, name = event["ResourceStatus"], event["ResourceType"], event["LogicalResourceId"]
                reason = event.get("ResourceStatusReason", "")
                self._tell(f"{name} {status}" + (f": {reason}" if reason else ""))
                if kind == _STACK and event.get("PhysicalResourceId") == stack:
                    if status in wanted:
                        return tuple(problems)
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


def _is_no_change(reason: str) -> bool:
    return "didn't contain changes" in reason or "No updates are to be performed" in reason


def _parameter(name: str, value: str | None) -> dict[str, Any]:
    return {"ParameterKey": name, **({"UsePreviousValue": True} if value is None else {"ParameterValue": value})}


def _changes_scaled_instances(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    kinds = {each["Type"] for each in running["Resources"].values()}
    copies_are_scaled = "AWS::SageMaker::InferenceComponent" in kinds
    scaled = any(kind.startswith(SCALING_TYPES) for kind in kinds)
    return scaled and not copies_are_scaled and _instances(running) != _instances(wanted)


def _instances(template: Mapping[str, Any]) -> tuple[Any, Any]:
    variant = template["Resources"]["EndpointConfiguration"]["Properties"]["ProductionVariants"][0]
    return template["Parameters"].get("InstanceType", {}).get("Default"), variant.get("InstancePools")


def _body(template: Mapping[str, Any]) -> str:
    """The template as CloudFormation takes it, as short as it can be.

    Raises:
        Failed: it is too long.
    """
    body = json.dumps(template, separators=(",", ":"))
    length = len(body.encode())
    if length > LONGEST_TEMPLATE:
        raise Failed(
            f"the template has {length} bytes, and CloudFormation takes {LONGEST_TEMPLATE}: deploy fewer adapters, or "
            "put long settings into a serving.properties beside the model"
        )
    return body
