"""The SageMaker SDK's `Endpoint` of what `slipway deploy` has made, for those who work with the SDK.

Needs the extra `slipway[sagemaker]`. `sagemaker` here is the SDK's package; ours is `deploy.sagemaker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.sagemaker.stack import Conflict, Stack

if TYPE_CHECKING:
    import boto3


class SdkMissing(ImportError):
    """The extra is not installed."""

    def __init__(self) -> None:
        super().__init__('the SageMaker SDK is not installed; pip install "slipway[sagemaker]"')


def endpoint(name: str, session: boto3.Session) -> Any:
    """The endpoint of a finished stack.

    Returns:
        The SDK's `sagemaker.core.resources.Endpoint`.

    Raises:
        SdkMissing: the extra is not installed.
        deploy.sagemaker.stack.Conflict: there is no stack of the endpoint, or it is not finished.
    """
    try:
        from sagemaker.core.resources import Endpoint
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("sagemaker"):
            raise SdkMissing from None
        raise
    client: Any = session.client("cloudformation")
    status = Stack(client, name).status()
    if status is None or not status.endswith("_COMPLETE") or status == "ROLLBACK_COMPLETE":
        raise Conflict(f"there is no finished stack of {name}" + (f": it is {status}" if status else ""))
    return Endpoint.get(endpoint_name=name, session=session, region=session.region_name)
