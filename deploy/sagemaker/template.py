"""A CloudFormation template made of the same plan, so that the two cannot drift.

What a template's user changes most is a parameter: name, model, image, role, instance type. Names that CloudFormation
can give itself are left to it, as it replaces what cannot be changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from container.settings.properties import masked
from deploy.sagemaker.api_call import Reference
from deploy.sagemaker.autoscaling import (
    alarm_description,
    alarm_name,
    component_target,
    policy_names,
    variant_target,
)
from deploy.sagemaker.configuration import Configuration, Rollout
from deploy.sagemaker.naming import (
    ENDPOINT_TAG,
    FINGERPRINT_TAG,
    adapter_component,
    role_description,
    role_name,
)
from deploy.sagemaker.plan import Plan
from deploy.sagemaker.resource import (
    ALARM,
    COMPONENT,
    ENDPOINT,
    ENDPOINT_CONFIG,
    MODEL,
    ROLE,
    ROLE_POLICY,
    SCALABLE_TARGET,
    SCALING_POLICY,
    Resource,
)
from deploy.sagemaker.rollout import component_deployment_config, deployment_config, retained_properties
from deploy.sagemaker.yaml_text import to_yaml

_TYPES = {
    MODEL.title: "AWS::SageMaker::Model",
    ENDPOINT_CONFIG.title: "AWS::SageMaker::EndpointConfig",
    ENDPOINT.title: "AWS::SageMaker::Endpoint",
    COMPONENT.title: "AWS::SageMaker::InferenceComponent",
    SCALABLE_TARGET.title: "AWS::ApplicationAutoScaling::ScalableTarget",
    SCALING_POLICY.title: "AWS::ApplicationAutoScaling::ScalingPolicy",
    ALARM.title: "AWS::CloudWatch::Alarm",
    ROLE.title: "AWS::IAM::Role",
}
_BASE = "base component"
_OURS = frozenset({ENDPOINT_TAG, FINGERPRINT_TAG})
_UNKNOWN_ROUTING = frozenset({"KV_AWARE"})
_DEFAULT_METRICS = ("/metrics", 60)
_PARAMETER_OF_KEY = {
    "EndpointName": "Name",
    "InferenceComponentName": "Name",
    "BaseInferenceComponentName": "Name",
    "Value": "Name",  # of a dimension
    "HF_MODEL_ID": "ModelSource",
    "S3Uri": "ModelSource",
    "Image": "Image",
    "ExecutionRoleArn": "RoleArn",
    "InstanceType": "InstanceType",
}
_NAMED_AFTER_ENDPOINT = frozenset({"AlarmDescription", "AlarmName", "Description", "PolicyName", "ResourceId"}) | {
    "InferenceComponentName",
    "RoleName",
}
_NAME = "${Name}"


class NotInTemplates(ValueError):
    """The configuration has something that CloudFormation has no word for."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    description: str
    value: str | None
    """The default; None: it is a credential and has none."""


def template_yaml(plan: Plan, configuration: Configuration) -> str:
    """The template as YAML.

    Raises:
        NotInTemplates: the configuration cannot be a template.
    """
    return to_yaml(template(plan, configuration))


def template(plan: Plan, configuration: Configuration) -> dict[str, Any]:
    """The template, as JSON's values.

    Raises:
        NotInTemplates: the configuration cannot be a template.
    """
    _refuse(configuration)
    ids = _logical_ids(plan)
    parameters = _parameters(plan, configuration)
    links = _links(plan, configuration, ids, parameters)
    resources: dict[str, Any] = {}
    previous: dict[str, str] = {}
    for resource in plan.resources:
        if resource.kind is ROLE_POLICY:
            continue
        title = resource.kind.title
        entry: dict[str, Any] = {"Type": _TYPES[title]}
        needed = _needed(title, previous)
        if needed:
            entry["DependsOn"] = needed
        entry["Properties"] = _replaced(_properties(resource, plan, configuration), links)
        resources[ids[resource.key]] = entry
        previous[title] = ids[resource.key]
        if resource.kind is COMPONENT:
            previous.setdefault(_BASE, ids[resource.key])
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "A language model on Amazon SageMaker, served by Slipway",
        "Parameters": {name: _declaration(each) for name, each in parameters.items()},
        "Resources": resources,
        "Outputs": {"EndpointName": {"Value": {"Fn::GetAtt": [ids[plan.of(ENDPOINT)[0].key], "EndpointName"]}}},
    }


def _refuse(configuration: Configuration) -> None:
    if configuration.push:
        raise NotInTemplates("push is set; a template needs an image that is in ECR already")
    if configuration.routing in _UNKNOWN_ROUTING:
        raise NotInTemplates(f'routing is "{configuration.routing}", which CloudFormation does not know')
    if configuration.component and configuration.component.placement:
        raise NotInTemplates(
            f'component.placement is "{configuration.component.placement}"; CloudFormation has it only together with '
            "a balance of availability zones"
        )
    metrics = configuration.metrics
    if metrics.detailed and (metrics.path, metrics.period) != _DEFAULT_METRICS:
        raise NotInTemplates(
            f'metrics has the path "{metrics.path}" and the period {metrics.period}; CloudFormation knows only '
            "SageMaker's defaults, /metrics and 60"
        )


def _logical_ids(plan: Plan) -> dict[str, str]:
    ids: dict[str, str] = {}
    for resource in plan.resources:
        title = "".join(word.capitalize() for word in resource.kind.title.split())
        rest = resource.name.removeprefix(plan.name) if resource.kind in (COMPONENT, SCALING_POLICY) else ""
        suffix = "".join(word.capitalize() for word in rest.split("-"))
        ids[resource.key] = "Adapter" + suffix if resource.kind is COMPONENT and suffix else title + suffix
    return ids


def _parameters(plan: Plan, configuration: Configuration) -> dict[str, _Parameter]:
    found = {
        "Name": _Parameter("Name of the endpoint", configuration.name),
    }
    # The policy of a role that is made is for this model and this image.
    if not (configuration.create_role and configuration.from_s3):
        found["ModelSource"] = _Parameter("Hub id or S3 location of the model", _model(plan))
    if not configuration.create_role:
        found["Image"] = _Parameter("Image in ECR", configuration.image)
        found["RoleArn"] = _Parameter("Execution role of the containers", configuration.role)
    if configuration.instance_type:
        found["InstanceType"] = _Parameter("Instance type", configuration.instance_type)
    for variable, value in configuration.env.items():
        if masked(variable, value) != value:
            found[_secret_parameter(variable)] = _Parameter(f"Environment variable {variable}", None)
    return found


def _model(plan: Plan) -> str:
    container = plan.of(MODEL)[0].create.parameters["PrimaryContainer"]
    if "ModelDataSource" in container:
        return str(container["ModelDataSource"]["S3DataSource"]["S3Uri"])
    return str(container["Environment"]["HF_MODEL_ID"])


def _secret_parameter(variable: str) -> str:
    return "Env" + "".join(word.capitalize() for word in variable.split("_"))


def _declaration(parameter: _Parameter) -> dict[str, Any]:
    if parameter.value is None:
        return {"Type": "String", "NoEcho": True, "Description": parameter.description}
    return {"Type": "String", "Default": parameter.value, "Description": parameter.description}


def _links(
    plan: Plan, configuration: Configuration, ids: Mapping[str, str], parameters: Mapping[str, _Parameter]
) -> Callable[[str, Any], Any]:
    """What stands for a value in a template, given its key; None if the value itself does."""
    attributes = {
        "ModelName": (plan.of(MODEL)[0], "ModelName"),
        "EndpointConfigName": (plan.of(ENDPOINT_CONFIG)[0], "EndpointConfigName"),
    }

    named = _named_after_endpoint(plan, configuration)

    def link(key: str, value: Any) -> Any:
        if isinstance(value, Reference):
            return {"Ref": ids[value.resource]}
        if key in attributes:
            resource, attribute = attributes[key]
            return {"Fn::GetAtt": [ids[resource.key], attribute]}
        if key == "ExecutionRoleArn" and configuration.create_role:
            return {"Fn::GetAtt": [ids[plan.of(ROLE)[0].key], "Arn"]}
        if _secret_parameter(key) in parameters and masked(key, str(value)) != value:
            return {"Ref": _secret_parameter(key)}
        name = _PARAMETER_OF_KEY.get(key, "")
        if name in parameters and parameters[name].value == value:
            return {"Ref": name}
        return {"Fn::Sub": named[value]} if key in _NAMED_AFTER_ENDPOINT and value in named else None

    return link


def _needed(title: str, previous: Mapping[str, str]) -> str | None:
    """What CloudFormation would not find out from references."""
    if title == COMPONENT.title:
        return previous.get(_BASE) or previous[ENDPOINT.title]
    if title == SCALABLE_TARGET.title:
        return previous.get(_BASE) or previous[ENDPOINT.title]
    return previous[SCALABLE_TARGET.title] if title == SCALING_POLICY.title else None


def _properties(resource: Resource, plan: Plan, configuration: Configuration) -> dict[str, Any]:
    properties = {**resource.create.parameters, **_rollout(resource, configuration)}
    if resource.kind in (MODEL, ENDPOINT_CONFIG):
        del properties[f"{'Model' if resource.kind is MODEL else 'EndpointConfig'}Name"]
    if resource.kind is MODEL:
        container = dict(properties["PrimaryContainer"])
        container.pop("ContainerMetricsConfig", None)
        properties["PrimaryContainer"] = container
    if resource.kind is ROLE:
        policy = plan.of(ROLE_POLICY)[0].create.parameters
        document = json.loads(policy["PolicyDocument"])
        properties["Policies"] = [{"PolicyName": policy["PolicyName"], "PolicyDocument": document}]
        properties["AssumeRolePolicyDocument"] = json.loads(properties["AssumeRolePolicyDocument"])
    # `slipway destroy` keeps off what belongs to a stack.
    tags = properties.pop("Tags", None)
    pairs = tags.items() if isinstance(tags, Mapping) else ((each["Key"], each["Value"]) for each in tags or ())
    kept = [{"Key": key, "Value": value} for key, value in pairs if key not in _OURS]
    return properties | ({"Tags": kept} if kept else {})


def _rollout(resource: Resource, configuration: Configuration) -> dict[str, Any]:
    """How an update of the stack replaces what runs, as `slipway update` does."""
    rollout = configuration.rollout
    if resource.kind is ENDPOINT:
        config = {} if rollout == Rollout() else {"DeploymentConfig": deployment_config(rollout)}
        return config | retained_properties(configuration)
    if resource.kind is COMPONENT and "ModelName" in resource.create.parameters["Specification"]:
        return {} if rollout == Rollout() else {"DeploymentConfig": component_deployment_config(rollout)}
    return {}


def _named_after_endpoint(plan: Plan, configuration: Configuration) -> dict[str, str]:
    """What is named after the endpoint, and the same for any name."""
    found = {}
    for make in (alarm_name, alarm_description, role_name, role_description):
        found[make(plan.name)] = make(_NAME)
    for target in (variant_target, component_target):
        found[target(plan.name).resource_id] = target(_NAME).resource_id
    found |= dict(zip(policy_names(plan.name), policy_names(_NAME), strict=True))
    for adapter in configuration.adapters:
        found[adapter_component(plan.name, adapter.name)] = adapter_component(_NAME, adapter.name)
    for policy in plan.of(ROLE_POLICY):
        found[policy.name] = _NAME + policy.name.removeprefix(plan.name)
    return found


def _replaced(value: Any, link: Callable[[str, Any], Any], key: str = "") -> Any:
    if key == "Tags":  # what somebody wrote, and not what it is like
        return value
    linked = link(key, value)
    if linked is not None:
        return linked
    if isinstance(value, Mapping):
        return {each: _replaced(item, link, each) for each, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, link) for item in value]
    return value
