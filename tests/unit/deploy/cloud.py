"""AWS in memory: what deploying calls of it, with the rules that decide in which order things can be made and removed.

moto has no inference components, no update of endpoints and no scaling of components; where it has what is called,
`test_moto.py` deploys against it. Every call is held against botocore's model of the service first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from deploy.sagemaker.api_call import ApiCall, Reference
from deploy.sagemaker.call_checks import violations
from deploy.sagemaker.naming import tag_list, tag_map
from deploy.sagemaker.resource import (
    ALARM,
    COMPONENT,
    ENDPOINT,
    ENDPOINT_CONFIG,
    MODEL,
    REPOSITORY,
    ROLE,
    ROLE_POLICY,
    SCALABLE_TARGET,
    SCALING_POLICY,
    Kind,
)

_CREATING = {
    "create_model": MODEL,
    "create_endpoint_config": ENDPOINT_CONFIG,
    "create_endpoint": ENDPOINT,
    "create_inference_component": COMPONENT,
    "register_scalable_target": SCALABLE_TARGET,
    "put_scaling_policy": SCALING_POLICY,
    "put_metric_alarm": ALARM,
    "create_repository": REPOSITORY,
    "create_role": ROLE,
    "put_role_policy": ROLE_POLICY,
}
_LOOKING = {
    "describe_model": (MODEL, "ModelName"),
    "describe_endpoint_config": (ENDPOINT_CONFIG, "EndpointConfigName"),
    "describe_endpoint": (ENDPOINT, "EndpointName"),
    "describe_inference_component": (COMPONENT, "InferenceComponentName"),
    "get_role": (ROLE, "RoleName"),
    "get_role_policy": (ROLE_POLICY, "PolicyName"),
}
_LOOKING_IN_LISTS = {
    "describe_scalable_targets": (SCALABLE_TARGET, "ResourceIds"),
    "describe_scaling_policies": (SCALING_POLICY, "PolicyNames"),
    "describe_alarms": (ALARM, "AlarmNames"),
    "describe_repositories": (REPOSITORY, "repositoryNames"),
}
_REMOVING = {
    "delete_model": (MODEL, "ModelName"),
    "delete_endpoint_config": (ENDPOINT_CONFIG, "EndpointConfigName"),
    "delete_endpoint": (ENDPOINT, "EndpointName"),
    "delete_inference_component": (COMPONENT, "InferenceComponentName"),
    "deregister_scalable_target": (SCALABLE_TARGET, "ResourceId"),
    "delete_scaling_policy": (SCALING_POLICY, "PolicyName"),
    "delete_alarms": (ALARM, "AlarmNames"),
    "delete_repository": (REPOSITORY, "repositoryName"),
    "delete_role": (ROLE, "RoleName"),
    "delete_role_policy": (ROLE_POLICY, "PolicyName"),
}
_LISTING = {
    "list_models": (MODEL, "Models", "ModelName"),
    "list_endpoint_configs": (ENDPOINT_CONFIG, "EndpointConfigs", "EndpointConfigName"),
}
_ARNS = {MODEL: "ModelArn", ENDPOINT_CONFIG: "EndpointConfigArn", ENDPOINT: "EndpointArn"} | {
    COMPONENT: "InferenceComponentArn",
    SCALABLE_TARGET: "ScalableTargetARN",
    SCALING_POLICY: "PolicyARN",
    ALARM: "AlarmArn",
    REPOSITORY: "repositoryArn",
}


def error(operation: str, message: str, code: str = "ValidationException") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


class Thing:
    def __init__(self, kind: Kind, parameters: dict[str, Any]) -> None:
        self.kind = kind
        self.parameters = parameters
        self.tags = tag_map(parameters.get("Tags", parameters.get("tags")))
        self.status = "Creating" if kind.status else "InService"
        self.polls = 2
        self.reason = ""
        self.next_config: str | None = None


class MemoryCloud:
    """A `Cloud` without a network."""

    def __init__(self) -> None:
        self.things: dict[tuple[Kind, str], Thing] = {}
        self.calls: list[ApiCall] = []
        self.failing: set[str] = set()
        """Names of endpoints and components that fail to start."""
        self.rolls_back = False
        """Whether updates of endpoints end where they began."""
        self.before: Callable[[ApiCall], None] = lambda call: None
        self.after: Callable[[ApiCall], None] = lambda call: None

    @property
    def names(self) -> list[str]:
        return sorted(f"{kind.title} {name}" for kind, name in self.things)

    @property
    def changes(self) -> list[str]:
        """Operations that were called and change something."""
        reading = ("describe_", "list_", "get_", "filter_", "simulate_")
        return [call.operation for call in self.calls if not call.operation.startswith(reading)]

    def call(self, call: ApiCall) -> dict[str, Any]:
        assert not _has_reference(call.parameters)
        assert violations(call) == ()
        self.calls.append(call)
        self.before(call)
        answer = self._answer(call)
        self.after(call)
        return answer

    def add(self, kind: Kind, name: str, parameters: dict[str, Any]) -> Thing:
        """Put something there that no deployment made."""
        thing = self.things[kind, name] = Thing(kind, parameters)
        thing.status, thing.polls = "InService", 0
        return thing

    def _answer(self, call: ApiCall) -> dict[str, Any]:
        operation, parameters = call.operation, dict(call.parameters)
        if operation in _CREATING:
            return self._create(operation, _CREATING[operation], parameters)
        if operation in _LOOKING:
            kind, key = _LOOKING[operation]
            description = self._description(self._thing(operation, kind, parameters[key]))
            return {"Role": description} if kind is ROLE else description
        if operation in _LOOKING_IN_LISTS:
            return self._listed_lookup(operation, parameters)
        if operation in _REMOVING:
            kind, key = _REMOVING[operation]
            name = parameters[key][0] if isinstance(parameters[key], list) else parameters[key]
            return self._remove(operation, self._thing(operation, kind, name), name)
        if operation in _LISTING:
            kind, entries, key = _LISTING[operation]
            contained = parameters["NameContains"]
            return {entries: [{key: name} for each, name in self.things if each is kind and contained in name]}
        if operation == "list_role_policies":
            return {"PolicyNames": [name for each, name in self.things if each is ROLE_POLICY]}
        if operation == "list_inference_components":
            found = [name for each, name in self.things if each is COMPONENT]
            return {"InferenceComponents": [{"InferenceComponentName": name} for name in found]}
        if operation in ("list_tags", "list_tags_for_resource", "list_role_tags"):
            return {"Tags": tag_list(self._by_arn(next(iter(parameters.values()))).tags)}
        if operation == "add_tags":
            self._by_arn(parameters["ResourceArn"]).tags.update(tag_map(parameters["Tags"]))
            return {}
        if operation == "update_endpoint":
            return self._update_endpoint(parameters)
        if operation == "update_inference_component":
            thing = self._thing(operation, COMPONENT, parameters["InferenceComponentName"])
            thing.parameters["Specification"] = parameters["Specification"]
            thing.status, thing.polls = "Updating", 2
            return {}
        if operation == "filter_log_events":
            event = {"eventId": "1", "timestamp": 1000, "logStreamName": "s", "message": "CUDA out of memory\n"}
            return {"events": [event]}
        raise AssertionError(operation)

    def _create(self, operation: str, kind: Kind, parameters: dict[str, Any]) -> dict[str, Any]:
        name = kind.name(parameters)
        there = self.things.get((kind, name))
        if there is not None and not kind.replaces:
            raise error(operation, f'Cannot create already existing {kind.title} "{name}"')
        if there is not None and "Tags" in parameters and kind is SCALABLE_TARGET:
            raise error(operation, "Tags cannot be changed by this call")
        self._require(operation, kind, parameters)
        thing = Thing(kind, parameters)
        if there is not None:
            thing.tags = there.tags
        if name in self.failing:
            thing.reason = "The primary container did not pass the ping health check."
        self.things[kind, name] = thing
        return {_ARNS.get(kind, "Arn"): self._arn(kind, name)}

    def _require(self, operation: str, kind: Kind, parameters: dict[str, Any]) -> None:
        needed: list[tuple[Kind, str]] = []
        if kind is ENDPOINT_CONFIG:
            needed = [(MODEL, each["ModelName"]) for each in parameters["ProductionVariants"] if "ModelName" in each]
        if kind is ENDPOINT:
            needed = [(ENDPOINT_CONFIG, parameters["EndpointConfigName"])]
        if kind is COMPONENT:
            needed = [(ENDPOINT, parameters["EndpointName"])]
            base = parameters["Specification"].get("BaseInferenceComponentName")
            needed += [(COMPONENT, base)] if base else [(MODEL, parameters["Specification"]["ModelName"])]
        if kind is SCALABLE_TARGET:
            what, name = parameters["ResourceId"].split("/")[:2]
            needed = [(ENDPOINT if what == "endpoint" else COMPONENT, name)]
        if kind is SCALING_POLICY:
            needed = [(SCALABLE_TARGET, parameters["ResourceId"])]
        if kind is ROLE_POLICY:
            needed = [(ROLE, parameters["RoleName"])]
        for each, name in needed:
            if self._thing(operation, each, name).status != "InService":
                raise error(operation, f"{each.title} {name} is not InService")

    def _remove(self, operation: str, thing: Thing, name: str) -> dict[str, Any]:
        kind = thing.kind
        if kind.status and thing.status in ("Creating", "Updating"):
            self._progress(thing)
            raise error(operation, f'Cannot update in-progress {kind.title} "{name}".')
        others = [each.parameters for (each_kind, _), each in self.things.items() if each_kind is COMPONENT]
        if kind is ENDPOINT and others:
            raise error(operation, f"Endpoint {name} has inference components")
        if kind is COMPONENT and any(
            each["Specification"].get("BaseInferenceComponentName") == name for each in others
        ):
            raise error(operation, f"{name} is in use by an adapter")
        if kind is ROLE and any(each is ROLE_POLICY for each, _ in self.things):
            raise error(operation, "Cannot delete entity, must delete policies first.", "DeleteConflict")
        if kind is SCALABLE_TARGET:
            for key, other in list(self.things.items()):
                if key[0] is SCALING_POLICY and other.parameters["ResourceId"] == name:
                    del self.things[key]
        if kind.status:
            thing.status, thing.polls = "Deleting", 2
        else:
            del self.things[kind, name]
        return {}

    def _update_endpoint(self, parameters: dict[str, Any]) -> dict[str, Any]:
        thing = self._thing("update_endpoint", ENDPOINT, parameters["EndpointName"])
        wanted = self._thing("update_endpoint", ENDPOINT_CONFIG, parameters["EndpointConfigName"])
        current = self.things[ENDPOINT_CONFIG, thing.parameters["EndpointConfigName"]]
        types = [_instance_types(each.parameters["ProductionVariants"][0]) for each in (wanted, current)]
        if types[0] != types[1] and any(
            kind is SCALABLE_TARGET and name.startswith("endpoint/") for kind, name in self.things
        ):
            raise error("update_endpoint", "The variant is a scalable target; deregister it first")
        thing.status, thing.polls = "Updating", 2
        thing.next_config = None if self.rolls_back else parameters["EndpointConfigName"]
        return {}

    def _listed_lookup(self, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        kind, key = _LOOKING_IN_LISTS[operation]
        wanted = parameters.get(key)
        found = [
            self._description(thing)
            for (each, name), thing in self.things.items()
            if each is kind and (wanted is None or name in wanted)
        ]
        if kind is REPOSITORY and not found:
            raise error(operation, "no such repository", "RepositoryNotFoundException")
        return {str(kind.listed): found}

    def _description(self, thing: Thing) -> dict[str, Any]:
        self._progress(thing)
        kind, name = thing.kind, thing.kind.name(thing.parameters)
        if (kind, name) not in self.things:
            raise error("describe", f"Could not find {kind.title} {name}")
        description = {**thing.parameters, _ARNS.get(kind, "Arn"): self._arn(kind, name)}
        if kind.status:
            description[kind.status] = thing.status
            description["FailureReason"] = thing.reason
        if kind is ALARM:
            description["StateValue"] = "INSUFFICIENT_DATA"
        return description

    def _progress(self, thing: Thing) -> None:
        if thing.kind.status is None or thing.polls == 0:
            return
        thing.polls -= 1
        if thing.polls:
            return
        if thing.status == "Deleting":
            del self.things[thing.kind, thing.kind.name(thing.parameters)]
            return
        if thing.next_config:
            thing.parameters["EndpointConfigName"], thing.next_config = thing.next_config, None
        thing.status = "Failed" if thing.reason else "InService"

    def _thing(self, operation: str, kind: Kind, name: str) -> Thing:
        if (kind, name) not in self.things:
            code = "NoSuchEntity" if kind in (ROLE, ROLE_POLICY) else "ValidationException"
            raise error(operation, f'Could not find {kind.title} "{name}".', code)
        return self.things[kind, name]

    def _by_arn(self, arn: str) -> Thing:
        found = [thing for (kind, name), thing in self.things.items() if arn in (self._arn(kind, name), name)]
        return found[0]

    def _arn(self, kind: Kind, name: str) -> str:
        if kind is SCALABLE_TARGET:
            return f"arn:aws:application-autoscaling:eu-west-1:111122223333:scalable-target/{name.encode().hex()}"
        return f"arn:aws:sagemaker:eu-west-1:111122223333:{kind.title.replace(' ', '-')}/{name}"


def _instance_types(variant: dict[str, Any]) -> list[str]:
    return [variant.get("InstanceType", ""), *(pool["InstanceType"] for pool in variant.get("InstancePools", ()))]


class TurnedClock:
    """Time that passes only when someone waits."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_reference(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_reference(item) for item in value)
    return isinstance(value, Reference)
