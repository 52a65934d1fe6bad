"""Reads S3 with boto3: lists a folder, reads ranges of objects, and says in plain words what S3 refuses.

Credentials, region and endpoint are found as everywhere with AWS: the environment, the profile, the role of the
container or the machine; AWS_ENDPOINT_URL_S3 names another S3.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from container.sources.remote_file import RemoteFile, check_path
from container.sources.s3_url import S3Url
from container.sources.source_error import SourceError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_ATTEMPTS = 5
_LATER = (408, 429)
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
_BLOCK = 1 << 20
_MOST_FILES = 100_000
_REPLACED = "an object was replaced while it was read"
_DENIED = frozenset({"AccessDenied", "403"})
_REFUSED = {
    "AllAccessDisabled": "access to the bucket is disabled",
    "NoSuchBucket": "there is no such bucket",
    "404": "there is no such bucket or object",
    "NoSuchKey": "an object that was listed is not there any more",
    "412": _REPLACED,
    "PreconditionFailed": _REPLACED,
    "InvalidObjectState": "an object is archived; restore it first",
    "InvalidAccessKeyId": "S3 does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the credentials have expired",
    "InvalidToken": "the session token is not valid",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to it",
    "IllegalLocationConstraintException": "the bucket is in another region; set AWS_REGION to it",
}


class S3Bucket:
    """A folder of a bucket, and a client for it. May be used by several threads."""

    def __init__(self, url: S3Url, connections: int = 8) -> None:
        """Make the client; S3 is not asked yet.

        Raises:
            SourceError: the configuration of AWS in the environment or its files cannot be used.
        """
        self.url = url
        self._client = _client(url, connections)

    def files(self) -> tuple[RemoteFile, ...]:
        """All objects in the folder, those that stand for folders left out.

        Raises:
            SourceError: S3 cannot be asked, or has nothing there.
        """
        try:
            found = tuple(self._listed())
        except Exception as error:
            raise self.explained(error) from error
        if not found and self.url.name.lower().endswith(_ARCHIVES):
            raise SourceError(f"{self.url}: an archive is not unpacked; give a folder with the unpacked files")
        if not found:
            raise SourceError(f"{self.url}: there are no objects below this prefix; give the folder that holds them")
        return found

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` to `end`, exclusively, of that very version of the object, in blocks.

        Raises:
            SourceError: the object has been replaced.
            Exception: whatever boto3 raises; `explained` says what it means.
        """
        if start == end:
            return
        etag = file.version.partition(" ")[0]
        answer = self._client.get_object(
            Bucket=self.url.bucket,
            Key=self.url.key_prefix + file.path,
            Range=f"bytes={start}-{end - 1}",
            IfMatch=etag,
        )
        with contextlib.closing(answer["Body"]) as body:
            if answer.get("ETag", etag) != etag:  # not every S3 knows the condition
                raise SourceError(f"{self.url}: {_REPLACED}: {file.path}")
            yield from body.iter_chunks(_BLOCK)

    def explained(self, error: Exception) -> SourceError:
        """The error in words, with the folder and the endpoint."""
        return error if isinstance(error, SourceError) else SourceError(f"{self.url}: {_reason(error, self.url)}")

    def _listed(self) -> Iterator[RemoteFile]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.url.bucket, Prefix=self.url.key_prefix
        )
        count = 0
        for page in pages:
            for found in page.get("Contents", ()):
                path = found["Key"].removeprefix(self.url.key_prefix)
                if not path or path.endswith("/"):
                    continue
                count += 1
                if count > _MOST_FILES:
                    raise SourceError(f"{self.url}: more than {_MOST_FILES} objects; give the folder of one model")
                version = f"{found['ETag']} {found['LastModified'].isoformat()}"
                yield RemoteFile(check_path(path), found["Size"], version)


def may_pass(error: Exception) -> bool:
    """Whether it may help to try again: S3 or the network was at fault, not what was asked for."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        return status >= 500 or status in _LATER
    return isinstance(error, BotoCoreError | OSError) and not isinstance(error, NoCredentialsError)


def _client(url: S3Url, connections: int) -> S3Client:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=connections,
        tcp_keepalive=True,
        # Ranges have no checksum of their own; their length is checked.
        response_checksum_validation="when_required",
    )
    # Where no region is set, S3 tells the bucket's own in its first answer, and botocore follows.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        session = boto3.session.Session(region_name=region)
        return session.client("s3", config=config, region_name=session.region_name or "us-east-1")
    except (BotoCoreError, ValueError) as error:
        raise SourceError(f"{url}: {error}") from error


def _denied(operation: str, url: S3Url, message: str) -> str:
    """What to permit, and what S3 says of it, which may name the policy that stands in the way."""
    needed = (
        f"s3:ListBucket on the bucket {url.bucket}"
        if operation == "ListObjectsV2"
        else f"s3:GetObject on {url.bucket}/{url.key_prefix}*, and kms:Decrypt where a KMS key encrypts the objects"
    )
    said = f"; S3 says: {message}" if "not authorized" in message else ""
    return f"access is denied; allow {needed}{said}"


def _reason(error: Exception, url: S3Url) -> str:
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )

    match error:
        case ClientError():
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            message = str(error.response.get("Error", {}).get("Message", ""))
            if code in _DENIED:
                return f"{_denied(error.operation_name, url, message)} ({code})"
            return f"{_REFUSED.get(code, message or 'S3 refuses')} ({code})"
        case NoCredentialsError() | PartialCredentialsError():
            return "no AWS credentials were found: give the container a role, or set AWS_ACCESS_KEY_ID and its secret"
        case ConnectionError() | HTTPClientError():
            return f"S3 cannot be reached: {error}"
        case BotoCoreError():
            return str(error)
        case _:
            return f"{type(error).__name__}: {error}"
