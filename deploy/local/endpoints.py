"""The endpoints, and what in the container their inference components are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.local.errors import ACCOUNT, validation_error
from deploy.local.parameters import VARIANT, Parameters, check_endpoint_name

MEBIBYTE = 1 << 20

_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """One container, the endpoints in front of it, and their limits, by default those of the platform."""

    container: str
    """Base URL."""
    endpoints: tuple[str, ...]
    components: frozenset[str] = frozenset()
    """Inference components that are the base model. If there are any, each call has to name one, as on the platform."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Inference components that are adapters, each with its source; "" if the container has it already."""
    async_output: str | None = None
    """A folder or `s3://bucket/prefix` for asynchronous results; None: no asynchronous invocations."""
    max_payload: int = 25 * MEBIBYTE
    """Bytes of a request, and of an answer that is not streamed."""
    answer_timeout: float = 60.0
    """Seconds until an answer is complete, or until the first byte of a stream."""
    stream_timeout: float = 480.0
    """Seconds until a stream is complete."""
    max_connections: int = 512
    """Connections to the container; a call beyond them waits a few seconds and is refused then."""

    def check_name(self, name: str) -> None:
        """Check that an endpoint exists.

        Raises:
            RuntimeApiError: ValidationError, the name is malformed or unknown.
        """
        check_endpoint_name(name)
        if name not in self.endpoints:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")

    def container_headers(self, name: str, parameters: Parameters) -> tuple[tuple[str, str], ...]:
        """The container's headers for a call of an endpoint.

        Raises:
            RuntimeApiError: ValidationError, something that the call names does not exist.
        """
        variant = parameters.values.get("TargetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.values.get("TargetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        return parameters.forwarded + self._adapter(parameters.values.get("InferenceComponentName"))

    def _adapter(self, component: str | None) -> tuple[tuple[str, str], ...]:
        if component is None:
            if self.components:
                raise validation_error(_COMPONENT_MISSING, "INFERENCE_COMPONENT_NAME_MISSING")
            return ()
        if component in self.adapters:
            return ((_ADAPTER_HEADER, component),)
        if component in self.components:
            return ()
        raise validation_error(f"Inference component {component} of account {ACCOUNT} not found.")
