"""boto3 as a `Cloud`. It is imported on first use: it takes a while, and `slipway serve` needs none of it here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploy.sagemaker.api_call import ApiCall

if TYPE_CHECKING:
    import boto3

_ATTEMPTS = 8
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 70
"""Seconds; SageMaker itself ends an invocation after 60."""


class NoRegion(Exception):
    """Neither the command nor the environment names a region."""


class AwsCloud:
    """Carries out calls with boto3's clients; throttled calls and lost connections are tried again by botocore."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        """Without `region`, AWS_REGION, AWS_DEFAULT_REGION or the profile's counts.

        Raises:
            NoRegion: there is none.
            botocore.exceptions.ProfileNotFound: there is no such profile.
        """
        self._session = session(region, profile)
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        """The region of all calls."""
        return str(self._session.region_name)

    def call(self, call: ApiCall) -> dict[str, Any]:
        method = getattr(self._client(call.service), call.operation)
        answer: dict[str, Any] = method(**call.parameters)
        return answer

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "max_attempts": _ATTEMPTS},
                connect_timeout=_CONNECT_TIMEOUT,
                read_timeout=_READ_TIMEOUT,
                user_agent_extra="slipway",
            )
            make: Any = self._session.client
            self._clients[service] = make(service, config=config)
        return self._clients[service]


def session(region: str | None, profile: str | None = None) -> boto3.Session:
    """A session of boto3 that has a region.

    Raises:
        NoRegion: there is none.
    """
    import os

    import boto3

    found = boto3.Session(region_name=region or os.environ.get("AWS_REGION") or None, profile_name=profile)
    if found.region_name is None:
        raise NoRegion("no region: give --region, or set AWS_REGION")
    return found
