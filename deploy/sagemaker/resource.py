"""A resource of a deployment: how it is made, found, and removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.naming import FINGERPRINT_TAG, fingerprint

Parameters = Mapping[str, Any]
Answer = Mapping[str, Any]

SAGEMAKER, SCALING, CLOUDWATCH, ECR, IAM = "sagemaker", "application-autoscaling", "cloudwatch", "ecr", "iam"


def _tag_is_the_same(parameters: Parameters, found: Answer, tags: Mapping[str, str]) -> bool:
    return tags.get(FINGERPRINT_TAG) == fingerprint_of(parameters)


def _always(parameters: Parameters, found: Answer, tags: Mapping[str, str]) -> bool:
    return True


def _runs_the_configuration(parameters: Parameters, found: Answer, tags: Mapping[str, str]) -> bool:
    # An update changes it, and the tag of the creation stays.
    return bool(parameters["EndpointConfigName"] == found["EndpointConfigName"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all resources of one kind have in common. Parameters are those of the creating call."""

    title: str
    name: Callable[[Parameters], str]
    lookup: Callable[[Parameters], ApiCall]
    """Describes the one resource; either its answer, or the only entry of its list `listed`, is the description."""
    removal: Callable[[Parameters], ApiCall]
    tags: Callable[[Answer], ApiCall] | None = None
    """Reads its tags, given its description; None: it has none and belongs to another resource."""
    listed: str | None = None
    status: str | None = None
    """Key of the description that says how far it is; None: it is there at once."""
    replaces: bool = False
    """Creating it again replaces it."""
    same: Callable[[Parameters, Answer, Mapping[str, str]], bool] = _tag_is_the_same
    """Whether what was found is what the parameters ask for."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource: its kind and the call that makes it."""

    kind: Kind
    create: ApiCall

    @property
    def name(self) -> str:
        """Its name in AWS."""
        return self.kind.name(self.create.parameters)

    @property
    def key(self) -> str:
        """What references to it name: unique in a plan."""
        return f"{self.kind.title} {self.name}"

    @property
    def lookup(self) -> ApiCall:
        """The call that describes it."""
        return self.kind.lookup(self.create.parameters)

    @property
    def removal(self) -> ApiCall:
        """The call that removes it."""
        return self.kind.removal(self.create.parameters)


def fingerprint_of(parameters: Parameters) -> str:
    """Fingerprint of a creating call, its tags aside."""
    return fingerprint({key: value for key, value in parameters.items() if key.lower() != "tags"})


def _by(key: str) -> Callable[[Parameters], str]:
    return lambda parameters: str(parameters[key])


def _sagemaker(operation: str, key: str) -> Callable[[Parameters], ApiCall]:
    return lambda parameters: ApiCall(SAGEMAKER, operation, {key: parameters[key]})


def _sagemaker_tags(arn: str) -> Callable[[Answer], ApiCall]:
    return lambda found: ApiCall(SAGEMAKER, "list_tags", {"ResourceArn": found[arn]})


def _sagemaker_kind(title: str, noun: str, resource: str, status: str | None = None) -> Kind:
    key = f"{resource}Name"
    return Kind(
        title=title,
        name=_by(key),
        lookup=_sagemaker(f"describe_{noun}", key),
        removal=_sagemaker(f"delete_{noun}", key),
        tags=_sagemaker_tags(f"{resource}Arn"),
        status=status,
        same=_runs_the_configuration if noun == "endpoint" else _tag_is_the_same,
    )


MODEL = _sagemaker_kind("model", "model", "Model")
ENDPOINT_CONFIG = _sagemaker_kind("endpoint configuration", "endpoint_config", "EndpointConfig")
ENDPOINT = _sagemaker_kind("endpoint", "endpoint", "Endpoint", status="EndpointStatus")
COMPONENT = _sagemaker_kind(
    "inference component", "inference_component", "InferenceComponent", status="InferenceComponentStatus"
)


def _target(parameters: Parameters) -> dict[str, Any]:
    return {key: parameters[key] for key in ("ServiceNamespace", "ResourceId", "ScalableDimension")}


SCALABLE_TARGET = Kind(
    title="scalable target",
    name=_by("ResourceId"),
    lookup=lambda parameters: ApiCall(
        SCALING,
        "describe_scalable_targets",
        {
            "ServiceNamespace": parameters["ServiceNamespace"],
            "ResourceIds": [parameters["ResourceId"]],
            "ScalableDimension": parameters["ScalableDimension"],
        },
    ),
    listed="ScalableTargets",
    tags=lambda found: ApiCall(SCALING, "list_tags_for_resource", {"ResourceARN": found["ScalableTargetARN"]}),
    removal=lambda parameters: ApiCall(SCALING, "deregister_scalable_target", _target(parameters)),
    replaces=True,
    same=_always,
)
SCALING_POLICY = Kind(
    title="scaling policy",
    name=_by("PolicyName"),
    lookup=lambda parameters: ApiCall(
        SCALING, "describe_scaling_policies", {"PolicyNames": [parameters["PolicyName"]], **_target(parameters)}
    ),
    listed="ScalingPolicies",
    removal=lambda parameters: ApiCall(
        SCALING, "delete_scaling_policy", {"PolicyName": parameters["PolicyName"], **_target(parameters)}
    ),
    replaces=True,
    same=_always,
)
ALARM = Kind(
    title="alarm",
    name=_by("AlarmName"),
    lookup=lambda parameters: ApiCall(CLOUDWATCH, "describe_alarms", {"AlarmNames": [parameters["AlarmName"]]}),
    listed="MetricAlarms",
    removal=lambda parameters: ApiCall(CLOUDWATCH, "delete_alarms", {"AlarmNames": [parameters["AlarmName"]]}),
    tags=lambda found: ApiCall(CLOUDWATCH, "list_tags_for_resource", {"ResourceARN": found["AlarmArn"]}),
    replaces=True,
    same=_always,
)
REPOSITORY = Kind(
    title="image repository",
    name=_by("repositoryName"),
    lookup=lambda parameters: ApiCall(
        ECR, "describe_repositories", {"repositoryNames": [parameters["repositoryName"]]}
    ),
    listed="repositories",
    removal=lambda parameters: ApiCall(
        ECR, "delete_repository", {"repositoryName": parameters["repositoryName"], "force": True}
    ),
    tags=lambda found: ApiCall(ECR, "list_tags_for_resource", {"resourceArn": found["repositoryArn"]}),
    same=_always,
)
ROLE = Kind(
    title="role",
    name=_by("RoleName"),
    lookup=lambda parameters: ApiCall(IAM, "get_role", {"RoleName": parameters["RoleName"]}),
    removal=lambda parameters: ApiCall(IAM, "delete_role", {"RoleName": parameters["RoleName"]}),
    tags=lambda found: ApiCall(IAM, "list_role_tags", {"RoleName": found["Role"]["RoleName"]}),
)
ROLE_POLICY = Kind(
    title="role policy",
    name=_by("PolicyName"),
    lookup=lambda parameters: ApiCall(
        IAM, "get_role_policy", {"RoleName": parameters["RoleName"], "PolicyName": parameters["PolicyName"]}
    ),
    removal=lambda parameters: ApiCall(
        IAM, "delete_role_policy", {"RoleName": parameters["RoleName"], "PolicyName": parameters["PolicyName"]}
    ),
    replaces=True,
    same=_always,
)
