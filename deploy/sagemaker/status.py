"""What a deployment is and does at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.sagemaker.aws import Aws, is_missing
from deploy.sagemaker.template import alarm_name, scaled_target


class NoEndpoint(Exception):
    """There is no endpoint of this name in the region."""


def status(aws: Aws, name: str, stack: str | None) -> dict[str, Any]:
    """The endpoint, its variants, components, scaling and alarms; `stack` is the status of its stack.

    Raises:
        NoEndpoint: neither it nor a stack is there.
        botocore.exceptions.ClientError: something could not be looked up.
    """
    from botocore.exceptions import ClientError

    try:
        endpoint = aws.client("sagemaker").describe_endpoint(EndpointName=name)
    except ClientError as error:
        if not is_missing(error):
            raise
        if stack is None:
            raise NoEndpoint(f"there is no endpoint {name} in {aws.region}") from None
        return {"endpoint": name, "stack": stack, "status": "not there"}
    components = list(_components(aws, name))
    alarms = aws.client("cloudwatch").describe_alarms(AlarmNames=[alarm_name(name)])
    return _known(
        endpoint=name,
        stack=stack,
        status=endpoint["EndpointStatus"],
        reason=endpoint.get("FailureReason"),
        configuration=endpoint.get("EndpointConfigName"),
        variants=[
            _known(
                name=variant["VariantName"],
                instances=variant.get("CurrentInstanceCount"),
                wanted=variant.get("DesiredInstanceCount"),
                weight=variant.get("CurrentWeight"),
            )
            for variant in endpoint.get("ProductionVariants", ())
        ],
        components=components,
        scaling=list(_scaling(aws, name, [component["name"] for component in components])),
        alarms=[{"name": alarm["AlarmName"], "state": alarm["StateValue"]} for alarm in alarms.get("MetricAlarms", ())],
    )


def _known(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, [])}


def _components(aws: Aws, endpoint: str) -> Iterator[dict[str, Any]]:
    sagemaker = aws.client("sagemaker")
    pages = sagemaker.get_paginator("list_inference_components").paginate(EndpointNameEquals=endpoint)
    for entry in (entry for page in pages for entry in page["InferenceComponents"]):
        name = entry["InferenceComponentName"]
        answer = sagemaker.describe_inference_component(InferenceComponentName=name)
        runtime = answer.get("RuntimeConfig", {})
        yield _known(
            name=name,
            status=answer["InferenceComponentStatus"],
            reason=answer.get("FailureReason"),
            base=answer.get("Specification", {}).get("BaseInferenceComponentName"),
            copies=runtime.get("CurrentCopyCount"),
            wanted=runtime.get("DesiredCopyCount"),
        )


def _scaling(aws: Aws, name: str, components: list[str]) -> Iterator[dict[str, Any]]:
    scaling = aws.client("application-autoscaling")
    scaled = [(name, False), *((component, True) for component in components)]
    for target in (scaled_target(each, component=component) for each, component in scaled):
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
