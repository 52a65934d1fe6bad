"""Creates boto3's clients.

boto3 is imported on first use: the import takes a while, and `slipway serve` loads this module without using it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deploy.sagemaker.configuration import ConfigurationError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


class Aws:
    """A boto3 session and its clients. The clients retry throttled calls and calls whose connection was lost."""

    def __init__(self, region: str | None = None, profile: str | None = None, otherwise: str | None = None) -> None:
        """Choose the region and the credentials.

        Args:
            region: The region. Default: AWS_REGION, AWS_DEFAULT_REGION, or the region of the profile.
            profile: The profile of the credentials.
            otherwise: The region if none of the above is set.

        Raises:
            ConfigurationError: No region is set.
            botocore.exceptions.ProfileNotFound: The profile does not exist.
        """
        import boto3

        self._session: Any = boto3.Session(profile_name=profile)
        found = region or os.environ.get("AWS_REGION") or self._session.region_name or otherwise
        if not found:
            raise ConfigurationError("region: missing; give --region, or set AWS_REGION")
        self.region = found

    @property
    def has_credentials(self) -> bool:
        return self._session.get_credentials() is not None

    def client(
        self, service: str, *, attempts: int = 8, connections: int = 10, url: str | None = None, key: str | None = None
    ) -> Any:
        """Return a client.

        Args:
            service: boto3's name of the service, such as `sagemaker-runtime`.
            attempts: The maximum number of times that a call is sent.
            connections: The number of concurrent calls.
            url: The URL of the server. None: chosen by the environment and boto3.
            key: The API key that is sent to the server with each call.

        Raises:
            ConfigurationError: The AWS configuration is invalid, for example an AWS_ENDPOINT_URL that is not a URL.
        """
        from botocore.config import Config

        config = Config(
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=10,
            max_pool_connections=connections,
            read_timeout=70,  # SageMaker ends an invocation after 60 s.
            user_agent_extra="slipway",
        )
        try:
            client = self._session.client(service, region_name=self.region, config=config, endpoint_url=url)
        except ValueError as error:
            raise ConfigurationError(f"AWS: {error}") from None
        if key is not None:
            # AWS's signature already uses the header Authorization.
            client.meta.events.register(
                "before-sign", lambda request, **_: request.headers.add_header("x-api-key", key)
            )
        return client


def is_missing(error: ClientError) -> bool:
    """Return True if an error means that a resource does not exist.

    SageMaker and CloudFormation state this only in the message.
    """
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "").lower()
    in_message = "could not find" in message or "does not exist" in message
    return code == "ResourceNotFoundException" or (code in ("ValidationException", "ValidationError") and in_message)
