"""Scaling with the load: target tracking, and a step out of zero.

Target tracking cannot leave zero, as nothing is measured where nothing runs. So where zero is allowed, an alarm on the
requests that found no capacity drives a step policy (SageMaker's guide, "Scale an endpoint to zero instances").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Reference
from deploy.sagemaker.configuration import Autoscaling, Configuration
from deploy.sagemaker.naming import VARIANT, tag_list
from deploy.sagemaker.resource import ALARM, CLOUDWATCH, SCALABLE_TARGET, SCALING, SCALING_POLICY, Resource

_STEP_COOLDOWN = 60
_ALARM_PERIOD = 60


@dataclass(frozen=True, slots=True)
class Target:
    """What is scaled."""

    resource_id: str
    dimension: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The three parameters by which Application Auto Scaling knows it."""
        return {
            "ServiceNamespace": "sagemaker",
            "ResourceId": self.resource_id,
            "ScalableDimension": self.dimension,
        }


def variant_target(endpoint: str, variant: str = VARIANT) -> Target:
    """The instances of an endpoint's variant."""
    return Target(f"endpoint/{endpoint}/variant/{variant}", "sagemaker:variant:DesiredInstanceCount")


def component_target(component: str) -> Target:
    """The copies of an inference component."""
    return Target(f"inference-component/{component}", "sagemaker:inference-component:DesiredCopyCount")


def policy_names(name: str) -> tuple[str, str]:
    """Names of the tracking policy and of the step out of zero."""
    return f"{name}-tracking", f"{name}-from-zero"


def alarm_name(name: str) -> str:
    """The alarm on requests that found no capacity."""
    return f"{name}-no-capacity"


def alarm_description(name: str) -> str:
    """What that alarm is about."""
    return f"Requests find {name} scaled to zero"


def scaling_resources(
    configuration: Configuration, scaling: Autoscaling, tags: Mapping[str, str]
) -> tuple[Resource, ...]:
    """The scalable target, its policies and its alarm."""
    name = configuration.name
    target = component_target(name) if configuration.component else variant_target(name)
    register = ApiCall(
        SCALING,
        "register_scalable_target",
        {**target.parameters, "MinCapacity": scaling.minimum, "MaxCapacity": scaling.maximum, "Tags": dict(tags)},
    )
    resources = [
        Resource(SCALABLE_TARGET, register),
        Resource(SCALING_POLICY, _tracking(configuration, scaling, target)),
    ]
    if scaling.minimum == 0:
        step = Resource(SCALING_POLICY, _step(name, target))
        resources += [step, Resource(ALARM, _alarm(configuration, step.key, tags))]
    return tuple(resources)


def _tracking(configuration: Configuration, scaling: Autoscaling, target: Target) -> ApiCall:
    return ApiCall(
        SCALING,
        "put_scaling_policy",
        {
            "PolicyName": policy_names(configuration.name)[0],
            **target.parameters,
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": scaling.target,
                **_metric(configuration),
                "ScaleInCooldown": scaling.scale_in_cooldown,
                "ScaleOutCooldown": scaling.scale_out_cooldown,
            },
        },
    )


def _metric(configuration: Configuration) -> dict[str, Any]:
    if configuration.asynchronous:
        return {
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": [{"Name": "EndpointName", "Value": configuration.name}],
                "Statistic": "Average",
            }
        }
    metric = (
        "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
        if configuration.component
        else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    )
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": metric}}


def _step(name: str, target: Target) -> ApiCall:
    return ApiCall(
        SCALING,
        "put_scaling_policy",
        {
            "PolicyName": policy_names(name)[1],
            **target.parameters,
            "PolicyType": "StepScaling",
            "StepScalingPolicyConfiguration": {
                "AdjustmentType": "ChangeInCapacity",
                "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
                "Cooldown": _STEP_COOLDOWN,
                "MetricAggregationType": "Maximum",
            },
        },
    )


def _alarm(configuration: Configuration, policy: str, tags: Mapping[str, str]) -> ApiCall:
    name = configuration.name
    if configuration.asynchronous:
        metric, dimension = "HasBacklogWithoutCapacity", "EndpointName"
    else:
        metric, dimension = "NoCapacityInvocationFailures", "InferenceComponentName"
    return ApiCall(
        CLOUDWATCH,
        "put_metric_alarm",
        {
            "AlarmName": alarm_name(name),
            "AlarmDescription": alarm_description(name),
            "AlarmActions": [Reference(policy, "PolicyARN")],
            "Namespace": "AWS/SageMaker",
            "MetricName": metric,
            "Dimensions": [{"Name": dimension, "Value": name}],
            "Statistic": "Maximum",
            "Period": _ALARM_PERIOD,
            "EvaluationPeriods": 1,
            "DatapointsToAlarm": 1,
            "Threshold": 1.0,
            "ComparisonOperator": "GreaterThanOrEqualToThreshold",
            "TreatMissingData": "missing",
            "Tags": tag_list(tags),
        },
    )
