"""Calls a deployed endpoint, and shows its state and its logs.

`runtime` and `logs` are boto3's clients for the SageMaker runtime and for CloudWatch Logs. All functions raise
botocore's ClientError if AWS, the endpoint or the model refuses a call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deploy.sagemaker.aws import Aws, is_missing
from deploy.sagemaker.template import scaled_target

_JSON = "application/json"
INLINE_BYTES = 128_000  # The largest request inside an asynchronous call. A larger one has to be an S3 object.
_POLL_SECONDS = 2.0


class StreamBroken(Exception):
    """The connection broke."""


class NoAnswer(Exception):
    """An asynchronous call failed, or did not finish in time."""


class NoLog(Exception):
    """The log group does not exist, because nothing was logged yet."""


@dataclass(frozen=True, slots=True)
class Places:
    """The S3 objects of an asynchronous call. One of them exists once the call has finished."""

    output: str
    failure: str | None  # None: the endpoint stores no failures.
    s3: str | None = None  # The URL that replaces S3 for a local endpoint.


def body(prompt: str, *, max_new_tokens: int, chat: bool, stream: bool) -> bytes:
    """Return a request in LMI's schema, or a chat."""
    request: dict[str, Any]
    if chat:
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_new_tokens}
    else:
        request = {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens}}
    if stream:
        request["stream"] = True
    return json.dumps(request).encode()


def invoke(
    runtime: Any, endpoint: str, request: bytes, component: str | None = None, route: str | None = None
) -> bytes:
    """Send a request, and return the answer.

    Args:
        endpoint: The name of the endpoint.
        route: The container's route that answers, such as `/generate`. None: `/invocations`.
    """
    answer = runtime.invoke_endpoint(**_parameters(endpoint, request, component, route))
    with answer["Body"] as stream:
        return bytes(stream.read())


def invoke_stream(
    runtime: Any, endpoint: str, request: bytes, component: str | None = None, route: str | None = None
) -> Iterator[bytes]:
    """Send a request, and yield the parts of the answer as they arrive. For the arguments, see `invoke`.

    Raises:
        StreamBroken: The connection broke.
    """
    from urllib3.exceptions import HTTPError

    parameters = _parameters(endpoint, request, component, route)
    stream = runtime.invoke_endpoint_with_response_stream(**parameters)["Body"]
    try:
        for event in stream:
            if "PayloadPart" in event:
                yield bytes(event["PayloadPart"]["Bytes"])
    except HTTPError as error:  # botocore does not convert this error while a stream is read.
        raise StreamBroken(f"the connection broke: {error}") from error
    finally:
        stream.close()


def invoke_asynchronously(
    runtime: Any, endpoint: str, *, request: bytes | None = None, location: str | None = None, route: str | None = None
) -> Places:
    """Send a request to an asynchronous endpoint. Return the locations of the answer.

    Args:
        endpoint: The name of the endpoint.
        request: The request, of at most `INLINE_BYTES`. None: the request is at `location`.
        location: The S3 object that contains the request.
        route: The container's route that answers. None: `/invocations`.
    """
    content = {"Body": request} if location is None else {"InputLocation": location}
    answer = runtime.invoke_endpoint_async(EndpointName=endpoint, ContentType=_JSON, **content, **_attributes(route))
    s3 = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-slipway-objects")
    url = runtime.meta.endpoint_url.rstrip("/") + s3 if s3 else None
    return Places(str(answer["OutputLocation"]), answer.get("FailureLocation"), url)


def wait_for_answer(s3: Any, places: Places, seconds: float) -> bytes:
    """Wait for the answer of an asynchronous call, and return it.

    Raises:
        NoAnswer: The call failed, or did not finish in time.
    """
    end = time.monotonic() + seconds
    while True:
        if (answer := _object(s3, places.output)) is not None:
            return answer
        if places.failure and (failure := _object(s3, places.failure)) is not None:
            raise NoAnswer(f"the request failed: {failure.decode(errors='replace')} ({places.failure})")
        if time.monotonic() >= end:
            raise NoAnswer(f"no answer in {seconds:g} s; it will be in {places.output}")
        time.sleep(_POLL_SECONDS)


def _object(s3: Any, location: str) -> bytes | None:
    bucket, _, key = location.removeprefix("s3://").partition("/")
    try:
        with s3.get_object(Bucket=bucket, Key=key)["Body"] as stream:
            return bytes(stream.read())
    except s3.exceptions.NoSuchKey:
        return None


def _parameters(endpoint: str, request: bytes, component: str | None, route: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"EndpointName": endpoint, "Body": request, "ContentType": _JSON}
    return parameters | ({"InferenceComponentName": component} if component else {}) | _attributes(route)


def _attributes(route: str | None) -> dict[str, str]:
    return {} if route is None else {"CustomAttributes": f"route={route}"}


def status(aws: Aws, name: str, stack: str | None) -> dict[str, Any]:
    """Return the state of the endpoint, of its components and of its scaling.

    Args:
        name: The name of the endpoint.
        stack: The status of the endpoint's stack.
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


def log_group(endpoint: str, component: str | None = None) -> str:
    """Return the log group for the containers of an endpoint, or for the copies of an inference component."""
    return f"/aws/sagemaker/InferenceComponents/{component}" if component else f"/aws/sagemaker/Endpoints/{endpoint}"


def log_lines(logs: Any, group: str, since: int) -> Iterator[tuple[int, str]]:
    """Yield the time and the text of each log record.

    Args:
        since: The time of the first record, in milliseconds since 1970.

    Raises:
        NoLog: The log group does not exist.
    """
    from botocore.exceptions import ClientError

    pages = logs.get_paginator("filter_log_events").paginate(logGroupName=group, startTime=max(since, 0))
    try:
        for event in (event for page in pages for event in page["events"]):
            when = datetime.fromtimestamp(event["timestamp"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
            yield event["timestamp"], f"{when} {event['message'].rstrip()}"
    except ClientError as error:
        if is_missing(error):
            raise NoLog(f"the log group {group} does not exist: nothing was logged there yet") from None
        raise
