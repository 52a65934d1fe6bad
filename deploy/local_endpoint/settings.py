"""The settings of the local endpoint: its names, its inference components and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from container.sources.location import S3Url
from deploy.local_endpoint.errors import ACCOUNT, REGION, validation_error
from deploy.local_endpoint.parameters import VARIANT, Headers, Parameters, check_endpoint_name

MEBIBYTE = 1 << 20
# The name has the form of the bucket that SageMaker's SDK creates in each account.
OWN_BUCKET = f"sagemaker-{REGION}-{ACCOUNT}"
_OUTPUT = S3Url(OWN_BUCKET, "async-output")
ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"
_COMPONENT_MISSING = (
    "Inference Component Name header is required for endpoints to which you plan to deploy inference components. "
    "Please include Inference Component Name header or consider using SageMaker models."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """The endpoints and their limits. The defaults are SageMaker's limits."""

    endpoints: tuple[str, ...]
    # The inference components that stand for the base model. If there are any, each call has to name a component, as on
    # SageMaker.
    components: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()  # Inference components that are adapters of the container.
    max_payload: int = 25 * MEBIBYTE  # The largest request, and the largest reply that is not streamed.
    answer_timeout: float = 60.0  # The time limit for a whole reply, or for the first byte of a stream, in seconds.
    stream_timeout: float = 480.0  # The time limit for a whole stream, in seconds.
    async_output: S3Url = _OUTPUT  # The folder for answers of asynchronous calls.
    async_failures: S3Url | None = None  # The folder for failures of asynchronous calls. None: the folder for answers.
    s3_folder: Path | None = None  # The directory that stands for S3.
    # Has an effect if `s3_folder` is None. True: boto3 calls S3. False: a temporary directory stands for S3.
    uses_s3: bool = False
    capture: Path | None = None  # The directory for the records of calls.

    @property
    def keeps_objects(self) -> bool:
        """True if a directory stands for S3."""
        return self.s3_folder is not None or not self.uses_s3

    def check_name(self, name: str) -> None:
        """Check the name of an endpoint.

        Raises:
            RuntimeApiError: The name is malformed or unknown.
        """
        check_endpoint_name(name)
        if name not in self.endpoints:
            raise validation_error(f"Endpoint {name} of account {ACCOUNT} not found.")

    def container_headers(self, name: str, parameters: Parameters) -> Headers:
        """Return the headers to send to the container for a call of an endpoint.

        Raises:
            RuntimeApiError: The call names a variant, a container or an inference component that does not exist, or
                names no inference component although the endpoint has some.
        """
        variant = parameters.values.get("TargetVariant")
        if variant not in (None, VARIANT):
            raise validation_error(f"Variant {variant} of endpoint {name} not found; it has {VARIANT} alone.")
        if (host := parameters.values.get("TargetContainerHostname")) is not None:
            raise validation_error(f"TargetContainerHostname {host}: endpoint {name} has one container, not several.")
        component = parameters.values.get("InferenceComponentName")
        return [*parameters.forwarded, *self.component_headers(component)]

    def component_headers(self, component: str | None) -> Headers:
        """Return the headers that tell the container which inference component a call uses.

        Raises:
            RuntimeApiError: The component does not exist, or the call has to name a component and names none.
        """
        if component is None and self.components:
            raise validation_error(_COMPONENT_MISSING, "INFERENCE_COMPONENT_NAME_MISSING")
        if component is None or component in self.components:
            return []
        if component in self.adapters:
            return [(ADAPTER_HEADER, component.encode())]
        raise validation_error(f"Inference component {component} of account {ACCOUNT} not found.")
