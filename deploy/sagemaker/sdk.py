"""The SageMaker SDK's `Endpoint` of what `slipway deploy` has made, for those who work with the SDK.

Needs pyproject.toml's extra `sagemaker`. `sagemaker` here is the SDK's package; ours is `deploy.sagemaker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.sagemaker.stack import Stack

if TYPE_CHECKING:
    import boto3

_PACKAGE = "sagemaker-core>=2.20,<3"
"""pyproject.toml's extra `sagemaker`."""


def endpoint(name: str, session: boto3.Session) -> Any:
    """The SDK's `sagemaker.core.resources.Endpoint` of a finished stack.

    Raises ImportError if the extra is not installed, and `deploy.sagemaker.stack.Conflict` where there is no stack
    of the endpoint, or it is not finished.
    """
    try:
        from sagemaker.core.resources import Endpoint
    except ImportError as error:
        raise ImportError(f'the SageMaker SDK cannot be imported; pip install "{_PACKAGE}"') from error
    client: Any = session.client("cloudformation")
    Stack(client, name).check_updatable()
    return Endpoint.get(endpoint_name=name, session=session, region=session.region_name)
