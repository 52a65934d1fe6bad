"""The head of a request, parsed once: its parts, its id, and the `Call` that consists of the head and a body."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from container.http.custom_attributes import CUSTOM_ATTRIBUTES, attributes_of
from handlers.contract import EXPLAIN, Call, Running, asked_explanation, read_steering
from handlers.deadline import HEADER as DEADLINE_HEADER
from handlers.deadline import read_time_limit

Scope = dict[str, Any]

REQUEST_ID = b"x-request-id"
INFERENCE_ID = (
    b"x-amzn-sagemaker-inference-id"  # SageMaker's header for the request id. The configured header takes precedence.
)
KEY_SALT = "slipway.key_salt"  # The ASGI scope's key for the salt of the call's API key.
LONGEST_PATH = 1024  # The maximum length of a path in the log and in errors, in bytes.
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch


class RequestHead:
    """A request without its body."""

    __slots__ = (
        "arrived_at",
        "attributes",
        "headers",
        "method",
        "path",
        "path_parameters",
        "query",
        "raw_path",
        "request_id",
        "running",
        "scope",
    )

    def __init__(self, scope: Scope, id_header: bytes = REQUEST_ID) -> None:
        """Parse the head of an ASGI request. `id_header` names the header with the client's request id."""
        self.scope = scope
        self.arrived_at = time.monotonic()
        self.method: str = scope["method"]
        # The path to answer. `path` is decoded, and `raw_path` is as the client sent it. The router removes superfluous
        # trailing slashes. If a custom attribute names another path, that path replaces the path of the request.
        self.path: str = scope["path"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.path_parameters: Mapping[str, str] = {}  # The router sets them.
        # Header names are in lower case. If a name occurs several times, the last header counts.
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        # SageMaker's custom attributes, with names in lower case.
        given = self.headers.get(CUSTOM_ATTRIBUTES)
        self.attributes = attributes_of(given) if given else ()
        self.request_id = request_id(self.headers.get(id_header) or self.headers.get(INFERENCE_ID))
        self.running: Running | None = None  # The running call. None until the handler has begun the call.

    def call(self, body: bytes) -> Call:
        """Return the whole request as contracts see it."""
        key_salt = self.scope.get(KEY_SALT, "")
        steering, fault = read_steering(self.headers, key_salt)
        explanation = time_limit = None
        if self.attributes or EXPLAIN in self.headers:
            explanation, wrong = asked_explanation(self.headers, self.attributes)
            fault = fault or wrong
        if DEADLINE_HEADER in self.headers or self.attributes:
            time_limit, wrong = read_time_limit(self.headers, self.attributes)
            fault = fault or wrong
        return Call(
            body=body,
            content_type=self.headers.get(b"content-type", b"").decode("latin-1"),
            request_id=self.request_id,
            headers=self.headers,
            query=tuple(parse_qsl(self.query.decode("latin-1"), keep_blank_values=True)) if self.query else (),
            method=self.method,
            path=self.path,
            path_parameters=self.path_parameters,
            key_salt=key_salt,
            steering=steering,
            steering_fault=fault,
            explanation=explanation,
            arrived_at=self.arrived_at,
            time_limit=time_limit,
        )


def request_id(header: bytes | None) -> str:
    """Return the client's id, or a new random UUID if the client sent no safe id.

    Safe ids have 1 to 128 characters of visible ASCII, because they are written to headers and logs.
    """
    if header is not None and _ACCEPTABLE(header):
        return header.decode("ascii")
    # RFC 9562, section 5.4. `uuid.uuid4` is slower because it creates an object first.
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) % 4]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
