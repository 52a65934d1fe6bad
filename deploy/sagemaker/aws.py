"""boto3's session and clients, and the words for what goes wrong with them.

boto3 is imported on first use: it takes a while, and `slipway serve` needs none of it here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deploy.sagemaker.configuration import ConfigurationError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

_MISSING = frozenset({"NoSuchEntity", "RepositoryNotFoundException", "ResourceNotFound", "ResourceNotFoundException"})
_POLICY = " (`slipway policy` prints what is needed)"
_RENEW = " (renew the credentials: `aws sso login`, or a new session token)"
_WRONG = " (the credentials are wrong, or of another partition or region)"
_ADVICE = {
    **dict.fromkeys(("AccessDenied", "AccessDeniedException", "UnauthorizedOperation"), _POLICY),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired"), _RENEW),
    **dict.fromkeys(("InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch"), _WRONG),
}


class Aws:
    """A session of boto3, and its clients; they try throttled calls and lost connections again."""

    def __init__(self, region: str | None = None, profile: str | None = None, otherwise: str | None = None) -> None:
        """Without `region`, AWS_REGION, AWS_DEFAULT_REGION or the profile's counts, and `otherwise` without these.

        Raises:
            ConfigurationError: there is none.
            botocore.exceptions.ProfileNotFound: there is no such profile.
        """
        import boto3

        self._session = boto3.Session(profile_name=profile)
        found = region or os.environ.get("AWS_REGION") or self._session.region_name or otherwise
        if not found:
            raise ConfigurationError("no region: give --region, or set AWS_REGION")
        self.region = found
        self._clients: dict[str, Any] = {}

    @property
    def has_credentials(self) -> bool:
        """Whether calls can be made at all."""
        return self._session.get_credentials() is not None

    def client(self, service: str) -> Any:
        """boto3's client of a service: "cloudformation", "sagemaker-runtime", ..."""
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "max_attempts": 8},
                connect_timeout=10,
                read_timeout=70,  # SageMaker itself ends an invocation after 60 s
                user_agent_extra="slipway",
            )
            make: Any = self._session.client
            self._clients[service] = make(service, region_name=self.region, config=config)
        return self._clients[service]


def is_missing(error: ClientError) -> bool:
    """What the call is about is not there; SageMaker and CloudFormation say it in words alone."""
    code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "").lower()
    said = "could not find" in message or "does not exist" in message
    return code in _MISSING or (code in ("ValidationException", "ValidationError") and said)


def error_in_words(error: BaseException) -> str:
    """One line for people: what was called, the service's code and message, and what to do where that is known."""
    from botocore.exceptions import ClientError, NoCredentialsError

    if isinstance(error, NoCredentialsError):
        return "there are no AWS credentials: set AWS_PROFILE or give --profile, or run `aws configure`"
    text = str(error)
    if isinstance(error, ClientError):
        code = error.response["Error"].get("Code", "")
        text = f"{error.operation_name}: {code}: {error.response['Error'].get('Message', '')}{_ADVICE.get(code, '')}"
    # A message may quote a container's answer, or list several problems.
    return " ".join(text.split()) or type(error).__name__
