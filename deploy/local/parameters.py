"""A call's parameters: the headers of the runtime API, checked as its service model says, and those of its replies.

The container gets some of them, and no other header of the client, as on the platform.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from deploy.local.errors import constraint_violation

Headers = list[tuple[bytes, bytes]]

_ANY = r"[\x20-\x7e]*"
_PRINTABLE = r"[\x21-\x7e][\x20-\x7e]*"
_NAME = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"


class Api(Enum):
    """An operation of the runtime API; the value is what the container gets in `X-Amzn-SageMaker-Forwarded-Api`."""

    INVOKE = "InvokeEndpoint"
    STREAM = "InvokeEndpointWithResponseStream"
    ASYNC = "InvokeEndpointAsync"


@dataclass(frozen=True, slots=True)
class _Parameter:
    field: str
    header: str
    pattern: str = _ANY
    least: int = 0
    most: int = 1024
    to_container: str | None = None
    """The header in which the container gets it; None: it does not."""

    def check(self, value: str) -> str:
        if not self.least <= len(value) <= self.most:
            short = len(value) < self.least
            bound = f"greater than or equal to {self.least}" if short else f"less than or equal to {self.most}"
            raise constraint_violation(self.field, value, f"Member must have length {bound}")
        if not re.fullmatch(self.pattern, value):
            raise constraint_violation(
                self.field, value, f"Member must satisfy regular expression pattern: {self.pattern}"
            )
        return value


def _sagemaker(field: str, name: str, pattern: str, least: int, most: int, forwarded: bool = False) -> _Parameter:
    header = f"x-amzn-sagemaker-{name}"
    return _Parameter(field, header, pattern, least, most, header if forwarded else None)


ENDPOINT_NAME = _Parameter("endpointName", "", _NAME, 0, 63)
_CONTENT_TYPE = _Parameter("contentType", "content-type", to_container="content-type")
_ACCEPT = _Parameter("accept", "accept", to_container="accept")
_SAGEMAKER_ACCEPT = _Parameter("accept", "x-amzn-sagemaker-accept", to_container="accept")
_COMMON = (
    _sagemaker("customAttributes", "custom-attributes", _ANY, 0, 1024, forwarded=True),
    _sagemaker("inferenceId", "inference-id", _PRINTABLE, 1, 64, forwarded=True),
)
_REAL_TIME = (
    *_COMMON,
    _sagemaker("targetVariant", "target-variant", _NAME, 0, 63),
    _sagemaker("targetContainerHostname", "target-container-hostname", _NAME, 0, 63),
    _sagemaker("inferenceComponentName", "inference-component", r"[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?", 0, 63),
    _sagemaker("prefixAwareId", "prefix-aware-id", _PRINTABLE, 1, 64),
)
_PARAMETERS = {
    Api.INVOKE: (
        _CONTENT_TYPE,
        _ACCEPT,
        *_REAL_TIME,
        _sagemaker("targetModel", "target-model", _PRINTABLE, 1, 1024, forwarded=True),
        _sagemaker("enableExplanations", "enable-explanations", r".*", 1, 64),
        _sagemaker("sessionId", "session-id", rf"(NEW_SESSION)|{_NAME}", 0, 256, forwarded=True),
    ),
    Api.STREAM: (
        _CONTENT_TYPE,
        _SAGEMAKER_ACCEPT,
        *_REAL_TIME,
        _sagemaker("sessionId", "session-id", _NAME, 0, 256, forwarded=True),
    ),
    Api.ASYNC: (
        _Parameter("contentType", "x-amzn-sagemaker-content-type", to_container="content-type"),
        _SAGEMAKER_ACCEPT,
        *_COMMON,
        _sagemaker("inputLocation", "inputlocation", r"(https|s3)://([^/]+)/?(.*)", 1, 1024),
        _sagemaker("s3OutputPathExtension", "s3outputpathextension", r"(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]+", 1, 512),
        _sagemaker("filename", "filename", r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9\-_.]*", 1, 32),
        _sagemaker("requestTTLSeconds", "requestttlseconds", r"[0-9]+", 1, 9),
        _sagemaker("invocationTimeoutSeconds", "invocationtimeoutseconds", r"[0-9]+", 1, 9),
    ),
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The checked parameters of one call."""

    api: Api
    values: Mapping[str, str]
    """Those that were given, by their names in AWS's messages, such as `targetModel`."""
    forwarded: tuple[tuple[str, str], ...]
    """Headers for the container."""

    def get(self, field: str) -> str | None:
        """A parameter's value, if it was given."""
        return self.values.get(field)

    def seconds(self, field: str, default: int, least: int, most: int) -> int:
        """A whole number of seconds.

        Raises:
            RuntimeApiError: ValidationError, it is not between `least` and `most`.
        """
        text = self.values.get(field)
        if text is None:
            return default
        if not least <= int(text) <= most:
            raise constraint_violation(field, text, f"Member must be between {least} and {most}")
        return int(text)


def read_parameters(api: Api, headers: Iterable[tuple[bytes, bytes]]) -> Parameters:
    """The parameters among a request's headers, whose names are in lower case.

    Raises:
        RuntimeApiError: ValidationError, one of them breaks a constraint of the service model.
    """
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    values: dict[str, str] = {}
    forwarded = [("X-Amzn-SageMaker-Forwarded-Api", api.value)]
    for parameter in _PARAMETERS[api]:
        value = given.get(parameter.header)
        if value is None:
            continue
        values[parameter.field] = parameter.check(value)
        if parameter.to_container is not None:
            forwarded.append((parameter.to_container, value))
    return Parameters(api, values, tuple(forwarded))


VARIANT = "AllTraffic"
"""The SDKs' name for an endpoint's only production variant."""

_SESSION = re.compile(rb"[a-zA-Z0-9](-*[a-zA-Z0-9])*;\sExpires=.+")
_RETURNED = {
    b"x-amzn-sagemaker-custom-attributes",
    b"x-amzn-sagemaker-new-session-id",
    b"x-amzn-sagemaker-closed-session-id",
}


def reply_headers(api: Api, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The caller's headers for a container's reply.

    LMI announces a new session in `X-Amzn-SageMaker-Session-Id`; the caller gets it in the platform's own header.
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
