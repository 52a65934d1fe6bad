"""The errors of SageMaker's runtime API, with AWS's wording."""

from __future__ import annotations

import json
from collections.abc import Mapping

ACCOUNT, REGION = "000000000000", "us-east-1"  # Placeholders in messages and ARNs. The local endpoint has no account.

_MAX_ORIGINAL_MESSAGE = 2048  # The maximum length of `OriginalMessage`, in characters.


class RuntimeApiError(Exception):
    """An error reply of the API."""

    def __init__(self, name: str, status: int, message: str, more: Mapping[str, str | int] | None = None) -> None:
        """Describe the reply.

        Args:
            name: The name of the exception in the service model.
            more: Further keys of the body.
        """
        super().__init__(message)
        self.name, self.status, self.message = name, status, message
        self.more = dict(more or {})
        self.closes = False  # True: the connection must be closed, because the request's body was not read to its end.

    def body(self) -> bytes:
        return json.dumps({**self.more, "Message": self.message}).encode()


def validation_error(message: str, error_code: str | None = None) -> RuntimeApiError:
    """Return the error for an invalid call."""
    return RuntimeApiError("ValidationError", 400, message, {"ErrorCode": error_code} if error_code else None)


def constraint_violation(name: str, value: str, constraint: str) -> RuntimeApiError:
    """Return the error for a parameter whose value the service model forbids."""
    shown = value if len(value) <= 100 else value[:100] + "..."
    field = name[0].lower() + name[1:]
    return validation_error(
        f"1 validation error detected: Value '{shown}' at '{field}' failed to satisfy constraint: {constraint}"
    )


def model_error(endpoint: str, status: int, body: bytes | None) -> RuntimeApiError:
    """Return the error for an error status of the container. `body` is None if it was too long to read."""
    text = None if body is None else body.decode(errors="replace")
    side, code = ("client", "CLIENT_ERROR") if 400 <= status < 500 else ("server", "INTERNAL_FAILURE")
    shown = "and could not load the entire response body" if text is None else f'with message "{text}"'
    original = (text or "")[:_MAX_ORIGINAL_MESSAGE]
    return _model_error(endpoint, status, f"Received {side} error ({status}) from primary {shown}.", original, code)


TIMED_OUT = (
    "Your invocation timed out while waiting for a response from container primary. Review the latency metrics for "
    "each container in Amazon CloudWatch, resolve the issue, and try again."
)
NO_RESPONSE = (
    "Amazon SageMaker could not get a response from the {} endpoint. This can occur when CPU or memory utilization is "
    "high. To check your utilization, see Amazon CloudWatch. To fix this problem, use an instance type with more CPU "
    "capacity or memory."
)


def not_ready(endpoint: str) -> RuntimeApiError:
    """Return the error for a container whose model is still being loaded. The container itself answers 503."""
    message = f"Model for endpoint {endpoint} is not ready for inference yet. Please retry."
    return RuntimeApiError("ModelNotReadyException", 429, message)


def no_capacity() -> RuntimeApiError:
    """Return the error for an inference component that has no running copy."""
    return validation_error(
        "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in-progress (if "
        "configured) or try to increase the capacity by invoking UpdateInferenceComponentRuntimeConfig API."
    )


def internal_failure(
    message: str = "The request processing has failed because of an unknown error.",
) -> RuntimeApiError:
    """Return the error for a fault of the local endpoint."""
    return RuntimeApiError("InternalFailure", 500, message)


def refused_answer(endpoint: str, status: int, reason: str) -> RuntimeApiError:
    """Return the error for a container's answer that SageMaker does not accept."""
    return _model_error(
        endpoint, status, f"Received an answer ({status}) from primary, but {reason}.", reason, "INTERNAL_FAILURE"
    )


def no_answer(endpoint: str, reason: str) -> RuntimeApiError:
    """Return the error for a container that did not answer in time, or that closed the connection too early."""
    message = f'Received server error (0) from primary with message "{reason}".'
    return _model_error(endpoint, 0, message, reason, "INTERNAL_FAILURE")


def _model_error(endpoint: str, status: int, message: str, original: str, code: str) -> RuntimeApiError:
    group = f"/aws/sagemaker/Endpoints/{endpoint}"
    console = f"https://{REGION}.console.aws.amazon.com/cloudwatch/home?region={REGION}#logEventViewer:group={group}"
    return RuntimeApiError(
        "ModelError",
        424,
        f"{message} See {console} in account {ACCOUNT} for more information.",
        {
            "ErrorCode": f"{code}_FROM_MODEL",
            "LogStreamArn": f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{group}",
            "OriginalMessage": original,
            "OriginalStatusCode": status,
        },
    )


def unknown_operation(method: str, path: str) -> RuntimeApiError:
    """Return the error for a method and a path that the runtime API does not have."""
    return RuntimeApiError("UnknownOperationException", 404, f"{method} {path} is no operation of the runtime API.")
