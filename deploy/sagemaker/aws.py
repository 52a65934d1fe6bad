"""boto3's session and clients, and the words for what goes wrong with them.

boto3 is imported on first use: it takes a while, and `slipway serve` needs none of it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import boto3
    from botocore.exceptions import ClientError

_ATTEMPTS = 8
_CONNECT_TIMEOUT, _READ_TIMEOUT = 10, 70
"""Seconds; SageMaker itself ends an invocation after 60."""
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
_MISSING = frozenset({"NoSuchEntity", "RepositoryNotFoundException", "ResourceNotFound", "ResourceNotFoundException"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
_UNKNOWN = frozenset({"InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch"})


class NoRegion(Exception):
    """Neither the command nor the environment names a region."""


class Aws:
    """A session of boto3, and its clients; they try throttled calls and lost connections again."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        """Without `region`, AWS_REGION, AWS_DEFAULT_REGION or the profile's counts.

        Raises:
            NoRegion: there is none.
            botocore.exceptions.ProfileNotFound: there is no such profile.
        """
        self.session = _session(region, profile)
        self._clients: dict[str, Any] = {}

    @property
    def region(self) -> str:
        """The region of all calls."""
        return str(self.session.region_name)

    @property
    def has_credentials(self) -> bool:
        """Whether calls can be made at all."""
        return self.session.get_credentials() is not None

    def client(self, service: str) -> Any:
        """boto3's client of a service: "cloudformation", "sagemaker-runtime", ..."""
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "max_attempts": _ATTEMPTS},
                connect_timeout=_CONNECT_TIMEOUT,
                read_timeout=_READ_TIMEOUT,
                user_agent_extra="slipway",
            )
            make: Any = self.session.client
            self._clients[service] = make(service, config=config)
        return self._clients[service]


def _session(region: str | None, profile: str | None) -> boto3.Session:
    import os

    import boto3

    found = boto3.Session(region_name=region or os.environ.get("AWS_REGION") or None, profile_name=profile)
    if found.region_name is None:
        raise NoRegion("no region: give --region, or set AWS_REGION")
    return found


def is_missing(error: ClientError) -> bool:
    """What the call is about is not there; SageMaker and CloudFormation say it in words alone."""
    code, message = _code(error), _message(error)
    said = "could not find" in message.lower() or "does not exist" in message.lower()
    return code in _MISSING or (code in ("ValidationException", "ValidationError") and said)


def is_denied(error: ClientError) -> bool:
    """The caller may not do this."""
    return _code(error) in _DENIED


def error_in_words(error: BaseException) -> str:
    """One line for people: what was called, the service's code and message, and what to do where that is known."""
    from botocore.exceptions import ClientError, NoCredentialsError

    if isinstance(error, NoCredentialsError):
        return "there are no AWS credentials: set AWS_PROFILE or give --profile, or run `aws configure`"
    text = str(error)
    if isinstance(error, ClientError):
        text = f"{error.operation_name}: {_code(error)}: {_message(error)}"
        if is_denied(error):
            text += " (`slipway policy` prints what is needed)"
        elif _code(error) in _EXPIRED:
            text += " (renew the credentials: `aws sso login`, or a new session token)"
        elif _code(error) in _UNKNOWN:
            text += " (the credentials are wrong, or of another partition or region)"
    # A message may quote a container's answer, or list several problems.
    return " ".join(text.split()) or type(error).__name__


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _message(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))
