"""The head of a request: its id, and the `Call` that it becomes with its body."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from handlers.contract import Call

Scope = dict[str, Any]

INFERENCE_ID = (
    b"x-amzn-sagemaker-inference-id"  # SageMaker's header for a client's id. The configured header goes first.
)
KEY_SALT = "slipway.key_salt"  # The key in an ASGI scope for the salt of the call's API key.
LONGEST_PATH = 1024  # Bytes of a path that the log and errors show.
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
# Headers that LMI's documentation writes in lower case.
_LOWER = ("x-request-id", "x-synchronous", "x-starting-token", "x-next-token", "x-max-items", "x-priority")
_SAGEMAKER = "x-amzn-sagemaker-"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body."""

    scope: Scope  # ASGI's.
    headers: dict[bytes, bytes]  # By names in lower case. Of several headers with one name, the last.
    request_id: str

    @classmethod
    def of(cls, scope: Scope, id_header: bytes) -> RequestHead:
        """Read the head of an ASGI request. `id_header` names the header with the client's request id."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        return cls(scope, headers, request_id(headers.get(id_header) or headers.get(INFERENCE_ID)))

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def path_parameters(self) -> Mapping[str, str]:
        return self.scope.get("path_params") or {}

    def call(self, body: bytes) -> Call:
        """Return the whole request as contracts see it."""
        scope = self.scope
        query: bytes = scope["query_string"]
        return Call(
            body=body,
            content_type=self.headers.get(b"content-type", b"").decode("latin-1"),
            request_id=self.request_id,
            headers=tuple([(_canonical(name), value.decode("latin-1")) for name, value in scope["headers"]]),
            query=tuple(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else (),
            method=scope["method"],
            path=scope["path"],
            path_parameters=self.path_parameters,
            key_salt=scope.get(KEY_SALT, ""),
        )


def request_id(header: bytes | None) -> str:
    """Return the client's id, or a new UUID if the client sent no safe id.

    Safe ids have 1 to 128 characters of visible ASCII. They are written into headers and logs.
    """
    if header is not None and _ACCEPTABLE(header):
        return header.decode("ascii")
    return _uuid4()


def _uuid4() -> str:
    """Return a random UUID (RFC 9562, section 5.4). `uuid.uuid4` makes an object first, which takes longer."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) % 4]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


@lru_cache(maxsize=512)
def _canonical(name: bytes) -> str:
    text = name.decode("latin-1")
    if text in _LOWER or "_" in text:
        return text
    if text.startswith(_SAGEMAKER):
        return "X-Amzn-SageMaker-" + "-".join(map(str.capitalize, text.removeprefix(_SAGEMAKER).split("-")))
    return "-".join(map(str.capitalize, text.split("-")))
