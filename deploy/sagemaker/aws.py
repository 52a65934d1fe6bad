"""boto3's clients.

boto3 is imported on first use: it takes a while, and `slipway serve` needs none of it here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deploy.sagemaker.configuration import ConfigurationError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


class Aws:
    """A session of boto3, and its clients; they try throttled calls and lost connections again."""

    def __init__(self, region: str | None = None, profile: str | None = None, otherwise: str | None = None) -> None:
        """Without `region`, AWS_REGION, AWS_DEFAULT_REGION or the profile's counts, and `otherwise` without these.

        Raises ConfigurationError where there is none, and botocore's ProfileNotFound.
        """
        import boto3

        self._session: Any = boto3.Session(profile_name=profile)
        found = region or os.environ.get("AWS_REGION") or self._session.region_name or otherwise
        if not found:
            raise ConfigurationError("no region: give --region, or set AWS_REGION")
        self.region = found

    @property
    def has_credentials(self) -> bool:
        return self._session.get_credentials() is not None

    def client(self, service: str) -> Any:
        from botocore.config import Config

        config = Config(
            retries={"mode": "standard", "max_attempts": 8},
            connect_timeout=10,
            read_timeout=70,  # SageMaker itself ends an invocation after 60 s
            user_agent_extra="slipway",
        )
        return self._session.client(service, region_name=self.region, config=config)


def is_missing(error: ClientError) -> bool:
    """What the call is about is not there; SageMaker and CloudFormation say it in words alone."""
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "").lower()
    said = "could not find" in message or "does not exist" in message
    return code == "ResourceNotFoundException" or (code in ("ValidationException", "ValidationError") and said)
