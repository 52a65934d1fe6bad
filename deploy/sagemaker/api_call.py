"""One call of an AWS API as data, and what carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from container.settings.properties import masked

_MAPS_OF_VARIABLES = frozenset({"Environment"})


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a value that is known only once another resource exists: a field of the answer to its creation."""

    resource: str
    """`Resource.key` of the other one."""
    field: str
    """A key of the answer, such as "PolicyARN"."""

    def __str__(self) -> str:
        return f"${{{self.resource}.{self.field}}}"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """An operation of an AWS service with its parameters, as boto3 names them."""

    service: str
    """"sagemaker", "application-autoscaling", ..."""
    operation: str
    """The client's method: "create_model"."""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def resolved(self, answers: Mapping[str, Mapping[str, Any]]) -> ApiCall:
        """The same call with every reference replaced by the value in `answers` (by `Resource.key`).

        Raises:
            KeyError: what a reference names has not been created.
        """
        return ApiCall(self.service, self.operation, _resolved(self.parameters, answers))

    def shown(self) -> dict[str, Any]:
        """The call as JSON for people: references in words, credentials in environment variables hidden."""
        return {"service": self.service, "operation": self.operation, "parameters": _shown(self.parameters)}


class Cloud(Protocol):
    """Carries out calls; the region and the credentials are its own."""

    def call(self, call: ApiCall) -> dict[str, Any]:
        """Carry out one call and give its answer.

        Raises:
            botocore.exceptions.ClientError: the service refused.
            botocore.exceptions.BotoCoreError: the service was not reached, or the parameters are wrong.
        """


def _resolved(value: Any, answers: Mapping[str, Mapping[str, Any]]) -> Any:
    if isinstance(value, Reference):
        return answers[value.resource][value.field]
    if isinstance(value, Mapping):
        return {key: _resolved(item, answers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(item, answers) for item in value]
    return value


def _shown(value: Any, name: str = "") -> Any:
    if isinstance(value, Reference):
        return str(value)
    if isinstance(value, Mapping):
        if name in _MAPS_OF_VARIABLES:
            return {key: masked(key, str(item)) for key, item in value.items()}
        return {key: _shown(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value
