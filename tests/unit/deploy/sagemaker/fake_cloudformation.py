"""CloudFormation in memory, behind boto3's own client. The client checks the parameters of each call first.

moto has no failures, no inference components and no scaling. `test_moto.py` deploys what moto supports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3
import moto.core.models  # noqa: F401  # Sessions that are created after this import can use moto.
from botocore.exceptions import ClientError

# One session for all tests: each new session reads the services' models, which takes seconds.
SESSION = boto3.Session("testing", "testing", region_name="eu-west-1")
STACK = "AWS::CloudFormation::Stack"

Event = tuple[str, str, str, str]  # Logical id, type, status, reason.


class FakeCloudFormation:
    """One stack. Its changes succeed, except for those of `next_change`."""

    def __init__(self) -> None:
        self.status: str | None = None
        self.id = ""
        self.template: dict[str, Any] = {}
        self.parameters: dict[str, str] = {}
        self.tags: list[dict[str, str]] = []
        self.events: list[dict[str, Any]] = []
        self._outcomes: list[list[Event]] = []
        self.coming: list[str | None] = []  # The next statuses of the stack. Each look at the stack takes one.
        self.proposal_fails = ""
        self.others: list[str] = []  # Change sets of other users.
        self.proposed: dict[str, Any] | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refused: set[str] = set()  # Operations for which the user has no permission.
        self.after: Callable[[str], None] = lambda operation: None
        self.client: Any = SESSION.client("cloudformation")
        # The client checks the parameters between these two events.
        self.client.meta.events.register("before-parameter-build.cloudformation", self._remember)
        self.client.meta.events.register("before-call.cloudformation", self._answer)

    @property
    def changes(self) -> list[str]:
        """The operations that were called and that change something."""
        return [name for name, _ in self.calls if not name.startswith(("Describe", "Get", "List"))]

    def called(self, operation: str) -> list[dict[str, Any]]:
        return [parameters for name, parameters in self.calls if name == operation]

    def next_change(self, *events: Event) -> None:
        """Set the events of the next change. The last one is the stack's own event."""
        self._outcomes.append(list(events))

    def there(self, status: str, template: dict[str, Any] | None = None, endpoint: str = "my-llm") -> None:
        """Add a stack that was created before."""
        self._new()
        self.status, self.template = status, template or {"Resources": {}, "Parameters": {}}
        self.tags = [{"Key": "slipway:endpoint", "Value": endpoint}]

    def _remember(self, params: dict[str, Any], model: Any, **more: Any) -> None:
        self.calls.append((model.name, params))

    def _answer(self, model: Any, **more: Any) -> tuple[Any, Any]:
        parameters = self.calls[-1][1]
        if model.name in self.refused:
            return SimpleNamespace(status_code=403), {"Error": {"Code": "AccessDenied", "Message": "no"}}
        try:
            answer = getattr(self, f"_{model.name}")(parameters)
        except ClientError as error:
            return SimpleNamespace(status_code=400), error.response
        self.after(model.name)
        return SimpleNamespace(status_code=200), answer or {}

    def _new(self) -> None:
        self.id = f"arn:aws:cloudformation:eu-west-1:111122223333:stack/slipway-my-llm/{len(self.events)}"
        self.events.append(self._event("slipway-my-llm", STACK, "REVIEW_IN_PROGRESS", ""))

    def _event(self, name: str, kind: str, status: str, reason: str) -> dict[str, Any]:
        physical = self.id if kind == STACK else name.lower()
        event = {"LogicalResourceId": name, "ResourceType": kind, "ResourceStatus": status, "StackId": self.id}
        more = {"ResourceStatusReason": reason} if reason else {}
        return {**event, "EventId": f"event-{len(self.events)}", "PhysicalResourceId": physical, **more}

    def _happens(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(self._event(*event))
        self.status = events[-1][2]
        if self.status == "DELETE_COMPLETE":
            self.status, self.template, self.parameters = None, {}, {}

    def _DescribeStacks(self, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        if self.coming:
            self.status = self.coming.pop(0)
        if self.status is None:
            name = parameters["StackName"]
            raise _error(f"Stack with id {name} does not exist")
        return {"Stacks": [{"StackId": self.id, "StackStatus": self.status, "Tags": self.tags}]}

    def _DescribeStackEvents(self, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"StackEvents": self.events[::-1]}

    def _CreateChangeSet(self, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        assert (self.status in (None, "REVIEW_IN_PROGRESS")) is (parameters["ChangeSetType"] == "CREATE")
        if self.status is None:
            self._new()
            self.status = "REVIEW_IN_PROGRESS"
        self.proposed = parameters
        return {"Id": "change", "StackId": self.id}

    def _wanted(self) -> tuple[dict[str, Any], dict[str, str]]:
        assert self.proposed is not None
        values = {each["ParameterKey"]: each["ParameterValue"] for each in self.proposed["Parameters"]}
        return json.loads(self.proposed["TemplateBody"]), values

    def _DescribeChangeSet(self, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        template, values = self._wanted()
        failed = self.proposal_fails
        if (template, values) == (self.template, self.parameters):
            failed = "The submitted information didn't contain changes. Submit different information to create one."
        old, new = self.template.get("Resources", {}), template["Resources"]
        actions = {name: "Modify" if name in old else "Add" for name in new if new[name] != old.get(name)}
        actions |= {name: "Remove" for name in old if name not in new}
        changes = [
            {"ResourceChange": {"Action": action, "LogicalResourceId": name, "ResourceType": (new | old)[name]["Type"]}}
            for name, action in actions.items()
        ]
        status = {"Status": "FAILED", "StatusReason": failed} if failed else {"Status": "CREATE_COMPLETE"}
        return {**status, "Changes": changes}

    def _DeleteChangeSet(self, parameters: dict[str, Any]) -> None:  # noqa: N802
        self.proposed = None

    def _ListChangeSets(self, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        ids = ["change"] if self.proposed is not None else []
        return {"Summaries": [{"ChangeSetId": each, "Status": "CREATE_COMPLETE"} for each in (*ids, *self.others)]}

    def _ExecuteChangeSet(self, parameters: dict[str, Any]) -> None:  # noqa: N802
        assert self.proposed is not None
        template, values = self._wanted()
        verb = self.proposed["ChangeSetType"]
        self.events.append(self._event("slipway-my-llm", STACK, f"{verb}_IN_PROGRESS", "User Initiated"))
        whole = [(name, each["Type"], f"{verb}_COMPLETE", "") for name, each in template["Resources"].items()]
        events = self._outcomes.pop(0) if self._outcomes else [*whole, stack_event(f"{verb}_COMPLETE")]
        self.tags = self.proposed["Tags"]
        if events[-1][2] == f"{verb}_COMPLETE" or verb == "CREATE":
            self.template, self.parameters = template, values
        self._happens(events)

    def _DeleteStack(self, parameters: dict[str, Any]) -> None:  # noqa: N802
        if self.status == "REVIEW_IN_PROGRESS":
            self.status = None
            return
        self._happens(self._outcomes.pop(0) if self._outcomes else [stack_event("DELETE_COMPLETE")])


def stack_event(status: str, reason: str = "") -> Event:
    """Return an event of the stack itself."""
    return "slipway-my-llm", STACK, status, reason


def _error(message: str) -> ClientError:
    return ClientError({"Error": {"Code": "ValidationError", "Message": message}}, "DescribeStacks")
