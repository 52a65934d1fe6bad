"""What a deployment is and does at the moment, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deploy.sagemaker.aws import Aws, is_missing
from deploy.sagemaker.template import alarm_name, component_target, variant_target

if TYPE_CHECKING:
    from rich.table import Table


class NoEndpoint(Exception):
    """There is no endpoint of this name in the region."""


def status(aws: Aws, name: str, stack: str | None) -> dict[str, Any]:
    """The endpoint, its variants, components, scaling and alarms; `stack` is the status of its stack.

    Raises:
        NoEndpoint: neither it nor a stack is there.
        botocore.exceptions.ClientError: something could not be looked up.
    """
    from botocore.exceptions import ClientError

    found: dict[str, Any] = {"endpoint": name, "stack": stack}
    try:
        endpoint = aws.client("sagemaker").describe_endpoint(EndpointName=name)
    except ClientError as error:
        if not is_missing(error):
            raise
        if stack is None:
            raise NoEndpoint(f"there is no endpoint {name}") from None
        return {**found, "status": "not there"}
    components = list(_components(aws, name))
    found |= {
        "status": endpoint["EndpointStatus"],
        "reason": endpoint.get("FailureReason"),
        "configuration": endpoint.get("EndpointConfigName"),
        "variants": [_variant(variant) for variant in endpoint.get("ProductionVariants", ())],
        "components": components,
        "scaling": list(_scaling(aws, name, [component["name"] for component in components])),
        "alarms": _alarms(aws, name),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def table(found: dict[str, Any]) -> Table:
    """The same for people."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    for cells in _rows(found):
        made.add_row(*cells)
    return made


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if found.get("stack"):
        yield "stack", found["stack"]
    yield "endpoint", f"{found['endpoint']}: {found['status']}"
    if "reason" in found:
        yield "  reason", found["reason"]
    if "configuration" in found:
        yield "configuration", found["configuration"]
    for variant in found.get("variants", ()):
        yield "variant", f"{variant['name']}: {variant.get('instances', 0)} of {variant.get('wanted', 0)} instances"
    for component in found.get("components", ()):
        copies = f", {component['copies']} of {component['wanted']} copies" if "copies" in component else ""
        base = f", on {component['base']}" if "base" in component else ""
        yield "component", f"{component['name']}: {component['status']}{copies}{base}"
        if "reason" in component:
            yield "  reason", component["reason"]
    for target in found.get("scaling", ()):
        yield "scaling", f"{target['target']}: {target['min']} to {target['max']}"
        for policy in target["policies"]:
            yield "  policy", policy
    for alarm in found.get("alarms", ()):
        yield "alarm", f"{alarm['name']}: {alarm['state']}"


def _variant(variant: dict[str, Any]) -> dict[str, Any]:
    found = {
        "name": variant["VariantName"],
        "instances": variant.get("CurrentInstanceCount"),
        "wanted": variant.get("DesiredInstanceCount"),
        "weight": variant.get("CurrentWeight"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _components(aws: Aws, endpoint: str) -> Iterator[dict[str, Any]]:
    sagemaker = aws.client("sagemaker")
    pages = sagemaker.get_paginator("list_inference_components").paginate(EndpointNameEquals=endpoint)
    for page in pages:
        for entry in page["InferenceComponents"]:
            name = entry["InferenceComponentName"]
            answer = sagemaker.describe_inference_component(InferenceComponentName=name)
            runtime = answer.get("RuntimeConfig", {})
            found = {
                "name": name,
                "status": answer["InferenceComponentStatus"],
                "reason": answer.get("FailureReason"),
                "base": answer.get("Specification", {}).get("BaseInferenceComponentName"),
                "copies": runtime.get("CurrentCopyCount"),
                "wanted": runtime.get("DesiredCopyCount"),
            }
            yield {key: value for key, value in found.items() if value is not None}


def _scaling(aws: Aws, name: str, components: list[str]) -> Iterator[dict[str, Any]]:
    scaling = aws.client("application-autoscaling")
    for target in (variant_target(name), *(component_target(component) for component in components)):
        entries = scaling.describe_scalable_targets(
            ServiceNamespace=target["ServiceNamespace"],
            ResourceIds=[target["ResourceId"]],
            ScalableDimension=target["ScalableDimension"],
        )["ScalableTargets"]
        if entries:
            policies = scaling.describe_scaling_policies(**target)["ScalingPolicies"]
            yield {
                "target": target["ResourceId"],
                "min": entries[0]["MinCapacity"],
                "max": entries[0]["MaxCapacity"],
                "policies": [policy["PolicyName"] for policy in policies],
            }


def _alarms(aws: Aws, name: str) -> list[dict[str, Any]]:
    answer = aws.client("cloudwatch").describe_alarms(AlarmNames=[alarm_name(name)])
    return [{"name": alarm["AlarmName"], "state": alarm["StateValue"]} for alarm in answer.get("MetricAlarms", ())]
