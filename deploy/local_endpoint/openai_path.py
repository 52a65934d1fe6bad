"""The OpenAI path of an endpoint, `/endpoints/<name>/openai/v1/...`, and the paths of its inference components.

As on SageMaker, the container sees the path without the prefix and without `/openai`, and errors have OpenAI's form.
SageMaker documents only `POST chat/completions`. The local endpoint forwards the paths that OpenAI's and Anthropic's
clients use. It does not forward the paths that manage vLLM's server.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from starlette.types import Message, Scope

from deploy.local_endpoint.errors import RuntimeApiError, validation_error
from deploy.local_endpoint.parameters import Headers
from deploy.local_endpoint.settings import ADAPTER_HEADER, LocalSettings

_APIS = "(?:chat|completions|responses|messages|embeddings|models|audio)"
_PATH = re.compile(rf"/endpoints/([^/]+)(?:/inference-components/([^/]+))?/openai(/v1/{_APIS}(?:/.*)?)")
_COMPONENT = b"x-amzn-sagemaker-inference-component"
# Headers of the client that are not forwarded: `Authorization` is meant for SageMaker, and only the path may name an
# adapter.
_DROPPED = frozenset({b"authorization", ADAPTER_HEADER, b"x-amzn-sagemaker-adapter-alias"})
_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_CLIENTS_FAULTS = frozenset({"ValidationError", "AccessDeniedException", "UnknownOperationException"})


@dataclass(frozen=True, slots=True)
class OpenAIPath:
    """The parts of a path."""

    endpoint: str
    component: str | None
    path: str  # The path in the container.
    raw_path: bytes  # The same path with escaped characters, such as a slash in a model's name.

    @classmethod
    def of(cls, scope: Scope) -> OpenAIPath | None:
        """Return the parts of a request's path, or None for any other path."""
        found, raw = _PATH.fullmatch(scope["path"]), _PATH.fullmatch(scope["raw_path"].decode("latin-1"))
        if found is None or raw is None or raw.groups()[:2] != found.groups()[:2]:
            return None
        if not {".", ".."}.isdisjoint(found[3].split("/")):  # The container may resolve the dots to another path.
            return None
        # Trailing slashes are removed: the container would redirect a path that ends in slashes, but an endpoint never
        # sends a redirect.
        return cls(found[1], found[2], found[3].rstrip("/"), raw[3].rstrip("/").encode("latin-1"))

    def headers(self, client: Headers, settings: LocalSettings) -> Headers:
        """Return the headers to send to the container.

        Args:
            client: The headers of the client's request.
            settings: Lists the inference components.

        Raises:
            RuntimeApiError: The call names its inference component in a header, names an unknown component, or lacks a
                required component.
        """
        headers = [(name, value) for name, value in client if name not in _DROPPED]
        if any(name == _COMPONENT for name, _ in headers):
            raise validation_error(
                "The header X-Amzn-SageMaker-Inference-Component is not supported here. Name the inference component "
                f"in the path: /endpoints/{self.endpoint}/inference-components/<name>/openai/v1/..."
            )
        return [*headers, *settings.component_headers(self.component)]


@dataclass(frozen=True, slots=True)
class PassedReply:
    """The format of a reply that is passed on unchanged."""

    common: Headers  # The headers of every reply of the API.

    def start(self, status: int, headers: Headers) -> Message:
        own = [(name, value) for name, value in headers if name.lower() not in _CONNECTION]
        return {"type": "http.response.start", "status": status, "headers": [*own, *self.common]}

    def piece(self, data: bytes) -> bytes:
        return data

    def failure(self, code: str, message: str) -> None:
        """Return None. The connection is closed, so the client sees that the end is missing."""


def openai_error(error: RuntimeApiError) -> tuple[int, bytes]:
    """Return the status and the body of an error on this path.

    An error of the container keeps its status.
    """
    kind = "invalid_request_error" if error.name in _CLIENTS_FAULTS else "server_error"
    code = re.sub(r"(?<!^)(?=[A-Z])", "_", error.name.removesuffix("Exception")).lower()
    original = error.more.get("OriginalStatusCode", 0)
    status = original if isinstance(original, int) and original >= 400 else error.status
    body = {"error": {"message": error.message, "type": kind, "param": None, "code": code}}
    return status, json.dumps(body).encode()
