"""What a deployment is and does at the moment, in AWS's own words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.sagemaker.aws import Aws, is_missing
from deploy.sagemaker.template import scaled_target


def status(aws: Aws, name: str, stack: str | None) -> dict[str, Any]:
    """The endpoint, its components and its scaling; `stack` is the status of its stack.

    Raises botocore's ClientError where something cannot be looked up, or neither it nor a stack is there.
    """
    from botocore.exceptions import ClientError

    try:
        endpoint = aws.client("sagemaker").describe_endpoint(EndpointName=name)
    except ClientError as error:
        if stack is None or not is_missing(error):
            raise
        return {"stack": stack, "endpoint": None}
    components = list(_components(aws, name))
    targets = [scaled_target(name, component=False)]
    targets += [scaled_target(each["InferenceComponentName"], component=True) for each in components]
    return {
        "stack": stack,
        "endpoint": _described(endpoint),
        "components": components,
        "scaling": list(_scaling(aws, targets)),
    }


def _components(aws: Aws, endpoint: str) -> Iterator[dict[str, Any]]:
    sagemaker = aws.client("sagemaker")
    pages = sagemaker.get_paginator("list_inference_components").paginate(EndpointNameEquals=endpoint)
    for entry in (entry for page in pages for entry in page["InferenceComponents"]):
        name = entry["InferenceComponentName"]
        yield _described(sagemaker.describe_inference_component(InferenceComponentName=name))


def _scaling(aws: Aws, targets: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    scaling = aws.client("application-autoscaling")
    for target in targets:
        yield from scaling.describe_scalable_targets(
            ServiceNamespace=target["ServiceNamespace"],
            ResourceIds=[target["ResourceId"]],
            ScalableDimension=target["ScalableDimension"],
        )["ScalableTargets"]


def _described(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "ResponseMetadata"}
