"""What a deployment is and does at the moment, as data and as lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Cloud
from deploy.sagemaker.autoscaling import alarm_name, component_target, variant_target
from deploy.sagemaker.destroy import component_names
from deploy.sagemaker.resource import CLOUDWATCH, SAGEMAKER, SCALING
from deploy.sagemaker.service_errors import is_missing


class NoEndpoint(Exception):
    """There is no endpoint of this name in the region."""


def status(cloud: Cloud, name: str) -> dict[str, Any]:
    """The endpoint, its variants, components, scaling and alarms.

    Raises:
        NoEndpoint: it is not there.
        botocore.exceptions.ClientError: something could not be looked up.
    """
    from botocore.exceptions import ClientError

    try:
        endpoint = cloud.call(ApiCall(SAGEMAKER, "describe_endpoint", {"EndpointName": name}))
    except ClientError as error:
        if is_missing(error):
            raise NoEndpoint(f"there is no endpoint {name}") from None
        raise
    components = [_component(cloud, component) for component in component_names(cloud, name)]
    found = {
        "endpoint": name,
        "status": endpoint["EndpointStatus"],
        "reason": endpoint.get("FailureReason"),
        "configuration": endpoint.get("EndpointConfigName"),
        "variants": [_variant(variant) for variant in endpoint.get("ProductionVariants", ())],
        "components": components,
        "scaling": _scaling(cloud, name, [component["name"] for component in components]),
        "alarms": _alarms(cloud, name),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield f"endpoint       {found['endpoint']}: {found['status']}"
    if "reason" in found:
        yield f"  reason       {found['reason']}"
    if "configuration" in found:
        yield f"configuration  {found['configuration']}"
    for variant in found.get("variants", ()):
        counts = f"{variant.get('instances', 0)} of {variant.get('wanted', 0)} instances"
        yield f"variant        {variant['name']}: {counts}"
    for component in found.get("components", ()):
        copies = f", {component['copies']} of {component['wanted']} copies" if "copies" in component else ""
        base = f", on {component['base']}" if "base" in component else ""
        yield f"component      {component['name']}: {component['status']}{copies}{base}"
        if "reason" in component:
            yield f"  reason       {component['reason']}"
    for target in found.get("scaling", ()):
        yield f"scaling        {target['target']}: {target['min']} to {target['max']}"
        for policy in target["policies"]:
            yield f"  policy       {policy}"
    for alarm in found.get("alarms", ()):
        yield f"alarm          {alarm['name']}: {alarm['state']}"


def _variant(variant: dict[str, Any]) -> dict[str, Any]:
    found = {
        "name": variant["VariantName"],
        "instances": variant.get("CurrentInstanceCount"),
        "wanted": variant.get("DesiredInstanceCount"),
        "weight": variant.get("CurrentWeight"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _component(cloud: Cloud, name: str) -> dict[str, Any]:
    answer = cloud.call(ApiCall(SAGEMAKER, "describe_inference_component", {"InferenceComponentName": name}))
    runtime = answer.get("RuntimeConfig", {})
    found = {
        "name": name,
        "status": answer["InferenceComponentStatus"],
        "reason": answer.get("FailureReason"),
        "base": answer.get("Specification", {}).get("BaseInferenceComponentName"),
        "copies": runtime.get("CurrentCopyCount"),
        "wanted": runtime.get("DesiredCopyCount"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _scaling(cloud: Cloud, name: str, components: list[str]) -> list[dict[str, Any]]:
    found = []
    for target in (variant_target(name), *(component_target(component) for component in components)):
        lookup = {
            "ServiceNamespace": "sagemaker",
            "ResourceIds": [target.resource_id],
            "ScalableDimension": target.dimension,
        }
        entries = cloud.call(ApiCall(SCALING, "describe_scalable_targets", lookup)).get("ScalableTargets", ())
        if not entries:
            continue
        policies = cloud.call(ApiCall(SCALING, "describe_scaling_policies", target.parameters))
        found.append(
            {
                "target": target.resource_id,
                "min": entries[0]["MinCapacity"],
                "max": entries[0]["MaxCapacity"],
                "policies": [policy["PolicyName"] for policy in policies.get("ScalingPolicies", ())],
            }
        )
    return found


def _alarms(cloud: Cloud, name: str) -> list[dict[str, Any]]:
    answer = cloud.call(ApiCall(CLOUDWATCH, "describe_alarms", {"AlarmNames": [alarm_name(name)]}))
    return [{"name": alarm["AlarmName"], "state": alarm["StateValue"]} for alarm in answer.get("MetricAlarms", ())]
