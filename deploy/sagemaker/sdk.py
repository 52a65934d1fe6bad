"""Returns the SageMaker SDK's `Endpoint` for a deployment, for users of the SDK.

This needs the extra `sagemaker` of pyproject.toml. Here, `sagemaker` is the SDK's package, and `deploy.sagemaker` is
Slipway's package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.sagemaker.stack import Stack

if TYPE_CHECKING:
    import boto3

_PACKAGE = "sagemaker-core>=2.20,<3"  # The extra `sagemaker` of pyproject.toml.


def endpoint(name: str, session: boto3.Session) -> Any:
    """Return the SDK's `sagemaker.core.resources.Endpoint` for a finished stack.

    Raises:
        ImportError: The extra is not installed.
        deploy.sagemaker.stack.StackConflict: The stack of the endpoint does not exist, or is unfinished.
    """
    try:
        from sagemaker.core.resources import Endpoint
    except ImportError as error:
        raise ImportError(f'the SageMaker SDK cannot be imported; pip install "{_PACKAGE}"') from error
    client: Any = session.client("cloudformation")
    Stack(client, name).check_updatable()
    return Endpoint.get(endpoint_name=name, session=session, region=session.region_name)
