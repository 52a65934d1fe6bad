"""Asks an endpoint, with boto3's client of SageMaker's runtime (`runtime`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_JSON = "application/json"


class StreamBroken(Exception):
    """The connection broke."""


def body(prompt: str, *, max_new_tokens: int, chat: bool, stream: bool) -> bytes:
    """A request in LMI's schema, or a chat."""
    request: dict[str, Any]
    if chat:
        request = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_new_tokens}
    else:
        request = {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens}}
    if stream:
        request["stream"] = True
    return json.dumps(request).encode()


def invoke(runtime: Any, endpoint: str, request: bytes, component: str | None = None) -> bytes:
    """One request, one answer. Raises botocore's ClientError where the endpoint or the model refuses."""
    answer = runtime.invoke_endpoint(**_parameters(endpoint, request, component))
    with answer["Body"] as stream:
        return bytes(stream.read())


def invoke_stream(runtime: Any, endpoint: str, request: bytes, component: str | None = None) -> Iterator[bytes]:
    """The pieces of a streamed answer as they come.

    Raises StreamBroken, and botocore's ClientError where the endpoint refuses or the stream ends with an error.
    """
    from urllib3.exceptions import HTTPError

    stream = runtime.invoke_endpoint_with_response_stream(**_parameters(endpoint, request, component))["Body"]
    try:
        for event in stream:
            if "PayloadPart" in event:
                yield bytes(event["PayloadPart"]["Bytes"])
    except HTTPError as error:  # botocore lets it through while it reads a stream
        raise StreamBroken(f"the connection broke: {error}") from error
    finally:
        stream.close()


def invoke_asynchronously(runtime: Any, endpoint: str, location: str) -> str:
    """Ask an asynchronous endpoint about a request that lies in S3; gives where its answer will be."""
    answer = runtime.invoke_endpoint_async(EndpointName=endpoint, InputLocation=location, ContentType=_JSON)
    return str(answer["OutputLocation"])


def _parameters(endpoint: str, request: bytes, component: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"EndpointName": endpoint, "Body": request, "ContentType": _JSON}
    return parameters | ({"InferenceComponentName": component} if component else {})
