"""The OpenAI path of an endpoint, `/endpoints/<name>/openai/v1/...`, and the paths of its inference components.

As on SageMaker, the container gets the path without the prefix and without `/openai`, and errors have OpenAI's form.
SageMaker documents `POST chat/completions` alone. The local endpoint forwards the paths of OpenAI's and Anthropic's
clients. It does not forward the paths that manage vLLM's server.
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
# Headers of the client that the container does not get: `Authorization` is meant for SageMaker, and the adapter is
# named by the path.
_DROPPED = frozenset({b"authorization", ADAPTER_HEADER, b"x-amzn-sagemaker-adapter-alias"})
_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_CLIENTS_FAULTS = frozenset({"ValidationError", "AccessDeniedException", "UnknownOperationException"})


@dataclass(frozen=True, slots=True)
class OpenAIPath:
    """The parts of a path."""

    endpoint: str
    component: str | None
    path: str  # The path at the container.
    raw_path: bytes  # The same with escaped characters, such as a slash in a model's name.

    @classmethod
    def of(cls, scope: Scope) -> OpenAIPath | None:
        """Return the parts of a request's path, or None for any other path."""
        found, raw = _PATH.fullmatch(scope["path"]), _PATH.fullmatch(scope["raw_path"].decode("latin-1"))
        if found is None or raw is None or raw.groups()[:2] != found.groups()[:2]:
            return None
        if not {".", ".."}.isdisjoint(found[3].split("/")):  # The container may read another path into it.
            return None
        # The container would redirect from slashes at the end, and a redirect is no answer of an endpoint.
        return cls(found[1], found[2], found[3].rstrip("/"), raw[3].rstrip("/").encode("latin-1"))

    def headers(self, client: Headers, settings: LocalSettings) -> Headers:
        """Return the headers that the container gets.

        Args:
            client: The headers of the client's request.
            settings: Has the inference components.

        Raises:
            RuntimeApiError: The call does not name its inference component as it should.
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
    """The form of a reply that the client gets as the container sends it."""

    common: Headers  # Headers that every reply of the API has.

    def start(self, status: int, headers: Headers) -> Message:
        own = [(name, value) for name, value in headers if name.lower() not in _CONNECTION]
        return {"type": "http.response.start", "status": status, "headers": [*own, *self.common]}

    def piece(self, data: bytes) -> bytes:
        return data

    def failure(self, code: str, message: str) -> None:
        """Return None. The connection is closed, so that the client sees that the end is missing."""


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
