"""Reads the parameters of a call from its headers, and creates the headers of replies.

The parameters are checked against botocore's copy of the runtime API's service model. As on SageMaker, the container
receives some of the parameters, and no other header of the client.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from deploy.local_endpoint.errors import constraint_violation

Headers = list[tuple[bytes, bytes]]


def value_of(headers: Headers, name: bytes) -> str:
    """Return the value of a header, or an empty string. `name` is in lower case."""
    return next((value.decode("latin-1") for given, value in headers if given.lower() == name), "")


class Api(Enum):
    """An operation of the runtime API.

    The container receives the operation's value in `X-Amzn-SageMaker-Forwarded-Api`, except for an asynchronous call.
    """

    INVOKE = "InvokeEndpoint"
    STREAM = "InvokeEndpointWithResponseStream"
    ASYNC = "InvokeEndpointAsync"


INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
# The parameters that the container receives, and their headers.
_TO_CONTAINER = {
    "ContentType": b"content-type",
    "Accept": b"accept",
    "CustomAttributes": b"x-amzn-sagemaker-custom-attributes",
    "InferenceId": INFERENCE_ID,
    "TargetModel": b"x-amzn-sagemaker-target-model",
    "SessionId": b"x-amzn-sagemaker-session-id",
}
_NUMBER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
# Parts of the service model's regular expressions that Python does not support, and their replacements.
_JAVA = {r"\p{ASCII}": r"[\x00-\x7f]", r"\p{Print}": r"\x20-\x7e", r"\z": r"\Z"}


@functools.cache
def _members(api: Api) -> Mapping[str, Any]:
    from botocore.session import get_session  # Importing it takes a while, and other commands do not need it.

    shape = get_session().get_service_model("sagemaker-runtime").operation_model(api.value).input_shape
    assert shape is not None
    return {name: member for name, member in shape.members.items() if name != "Body"}


def _check(name: str, member: Any, value: str) -> None:
    is_number, limits = member.type_name == "integer", member.metadata
    if is_number and not _NUMBER.fullmatch(value):
        raise constraint_violation(name, value, "Member must be an integer")
    measured, measure = (int(value), "value") if is_number else (len(value), "length")
    least, most, pattern = limits.get("min", 0), limits["max"], limits.get("pattern")
    if measured < least:
        raise constraint_violation(name, value, f"Member must have {measure} greater than or equal to {least}")
    if measured > most:
        raise constraint_violation(name, value, f"Member must have {measure} less than or equal to {most}")
    if pattern is None:
        return
    expression = functools.reduce(lambda text, java: text.replace(java, _JAVA[java]), _JAVA, pattern)
    if not re.fullmatch(expression, value):
        raise constraint_violation(name, value, f"Member must satisfy regular expression pattern: {pattern}")


def is_server_url(text: str) -> bool:
    """Return True if the text is the URL of an HTTP server."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not url.query + url.fragment
    except ValueError:
        return False


def check_endpoint_name(name: str) -> None:
    """Check the name of an endpoint or of an inference component.

    Raises:
        RuntimeApiError: The service model does not allow the name.
    """
    _check("EndpointName", _members(Api.INVOKE)["EndpointName"], name)


@dataclass(frozen=True, slots=True)
class Parameters:
    """A call's valid parameters, and the headers to send to the container."""

    values: Mapping[str, str]  # The given parameters, by their name in the service model, such as `TargetModel`.
    forwarded: Headers


def read_parameters(api: Api, headers: Iterable[tuple[bytes, bytes]]) -> Parameters:
    """Read the parameters from the headers of a request.

    Args:
        headers: The headers, with names in lower case.

    Raises:
        RuntimeApiError: A parameter violates a constraint of the service model.
    """
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    values: dict[str, str] = {}
    forwarded: Headers = [] if api is Api.ASYNC else [(b"x-amzn-sagemaker-forwarded-api", api.value.encode())]
    for name, member in _members(api).items():
        value = given.get(member.serialization["name"].lower())
        if value is None or member.serialization["location"] != "header":  # The endpoint's name is in the path.
            continue
        _check(name, member, value)
        values[name] = value
        if name in _TO_CONTAINER:
            forwarded.append((_TO_CONTAINER[name], value.encode("latin-1")))
    return Parameters(values, forwarded)


VARIANT = "AllTraffic"  # The SDKs' name for an endpoint's only production variant.

_SESSION = re.compile(rb"[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=.+")
_RETURNED = {
    b"x-amzn-sagemaker-custom-attributes",
    b"x-amzn-sagemaker-new-session-id",
    b"x-amzn-sagemaker-closed-session-id",
}


def reply_headers(api: Api, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers to send to the client with a reply of the container.

    LMI announces a new session in `X-Amzn-SageMaker-Session-Id`. The client receives it in SageMaker's header for new
    sessions, `X-Amzn-SageMaker-New-Session-Id`.
    """
    reply: Headers = [(b"x-amzn-invoked-production-variant", VARIANT.encode())]
    lmi_session: bytes | None = None
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == b"content-type":
            reply.append((b"x-amzn-sagemaker-content-type" if api is Api.STREAM else name, value))
        elif name in _RETURNED:
            reply.append((name, value))
        elif name == b"x-amzn-sagemaker-session-id" and _SESSION.fullmatch(value):
            lmi_session = value
    if lmi_session is not None and not any(name == b"x-amzn-sagemaker-new-session-id" for name, _ in reply):
        reply.append((b"x-amzn-sagemaker-new-session-id", lmi_session))
    return reply
