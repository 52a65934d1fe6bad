"""The same plan through the SageMaker SDK's resource classes, for those who work with them.

Needs the extra `slipway[sagemaker]`. `sagemaker` here is the SDK's package; ours is `deploy.sagemaker`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deploy.sagemaker.api_call import ApiCall
from deploy.sagemaker.executor import Executor
from deploy.sagemaker.plan import Plan
from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.resource import SAGEMAKER

if TYPE_CHECKING:
    import boto3

_MISSPELT = frozenset({"EnableSSMAccess"})
"""The SDK sends "EnableSsmAccess", which boto3 refuses."""

_CLASSES = {
    "create_model": "Model",
    "create_endpoint_config": "EndpointConfig",
    "create_endpoint": "Endpoint",
    "create_inference_component": "InferenceComponent",
}


class SdkMissing(ImportError):
    """The extra is not installed."""

    def __init__(self) -> None:
        super().__init__('the SageMaker SDK is not installed; pip install "slipway[sagemaker]"')


def deploy(plan: Plan, session: boto3.Session, around: Surroundings, *, rollback: bool = True) -> Any:
    """Carry out the plan, making models, configurations, endpoints and components with the SDK's classes.

    What the SDK has no class for (scaling, alarms, roles) or would not send as it is (`is_faithful`) goes through
    `around.cloud`, and so does looking.

    Returns:
        The SDK's `sagemaker.core.resources.Endpoint`, in service.

    Raises:
        SdkMissing: the extra is not installed.
        deploy.sagemaker.executor.Conflict, Failed: as `Executor.deploy`.
    """
    resources = _resources()
    cloud = _SdkCloud(around, session, resources)
    Executor(Surroundings(cloud, around.progress, around.clock), rollback=rollback).deploy(plan)
    return resources.Endpoint.get(endpoint_name=plan.name, session=session, region=session.region_name)


class _SdkCloud:
    """A `Cloud` whose creating calls go through the SDK."""

    def __init__(self, around: Surroundings, session: boto3.Session, resources: Any) -> None:
        self._around = around
        self._session = session
        self._resources = resources

    def call(self, call: ApiCall) -> dict[str, Any]:
        name = _CLASSES.get(call.operation) if call.service == SAGEMAKER else None
        if name is None or not is_faithful(call):
            return self._around.cloud.call(call)
        parameters = arguments(call)
        made = getattr(self._resources, name)
        made.create(**parameters, session=self._session, region=self._session.region_name)
        return {}


def is_faithful(call: ApiCall) -> bool:
    """Whether the SDK would send the call as it is.

    sagemaker-core 2.27 leaves out zeros, false and what is empty, so that a minimum of no instances becomes the
    default, and misspells a field. Such a call has to go through boto3.
    """
    return _is_kept(call.parameters)


def _is_kept(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(key not in _MISSPELT and _is_kept(item) for key, item in value.items())
    if isinstance(value, list):
        return bool(value) and all(map(_is_kept, value))
    return bool(value)


def arguments(call: ApiCall) -> dict[str, Any]:
    """A call's parameters by the SDK's names.

    The keys of maps, such as environment variables, are data and stay as they are: the service's model tells them
    from names of fields.
    """
    from deploy.sagemaker.call_checks import input_shape

    renamed: dict[str, Any] = _renamed(call.parameters, input_shape(call.service, call.operation))
    return renamed


def _renamed(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        return {_snake_case(key): _renamed(item, shape.members[key]) for key, item in value.items()}
    if shape.type_name == "list":
        return [_renamed(item, shape.member) for item in value]
    return value


def _snake_case(name: str) -> str:
    convert = importlib.import_module("sagemaker.core.utils.utils").pascal_to_snake
    return str(convert(name))


def _resources() -> Any:
    try:
        return importlib.import_module("sagemaker.core.resources")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("sagemaker"):
            raise SdkMissing from None
        raise
