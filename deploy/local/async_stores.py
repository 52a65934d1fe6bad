"""Where asynchronous invocations have their input from and their output to: S3, or a folder in its place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deploy.local.errors import validation_error

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MAX_PAYLOAD = 1 << 30
"""Bytes of an input in S3, and of an output: sagemaker_hosting.md section 2."""

_S3 = "s3://"


class StoreError(Exception):
    """An object cannot be read or written; the text says which and why."""


class OutputStore(Protocol):
    """Takes results, each whole or not at all."""

    def location(self, key: str) -> str:
        """The URI of a result."""

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Put a result where `location` says. Blocks.

        Raises:
            StoreError: it cannot be written.
        """


class Folder:
    """A folder of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def location(self, key: str) -> str:
        """A `file://` URI."""
        return (self._directory / key).as_uri()

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Write a file under another name and rename it."""
        path = self._directory / key
        unfinished: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(unfinished, path)
        except OSError as error:
            if unfinished is not None:
                Path(unfinished).unlink(missing_ok=True)
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error


class Bucket:
    """A prefix of an S3 bucket."""

    def __init__(self, uri: str) -> None:
        """`uri`: `s3://bucket/prefix`."""
        self._bucket, self._prefix = split_s3(uri)

    def location(self, key: str) -> str:
        """An `s3://` URI."""
        return f"{_S3}{self._bucket}/{self._key(key)}"

    def write(self, key: str, data: bytes, content_type: str) -> None:
        """Put an object."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            _s3().put_object(Bucket=self._bucket, Key=self._key(key), Body=data, ContentType=content_type)
        except (BotoCoreError, ClientError) as error:
            raise StoreError(f"{self.location(key)} cannot be written: {error}") from error

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


def output_store(place: str) -> OutputStore:
    """The store for a folder's path or an `s3://` URI."""
    return Bucket(place) if place.startswith(_S3) else Folder(Path(place))


def split_s3(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://` URI, the key without slashes at its ends."""
    bucket, _, key = uri.removeprefix(_S3).partition("/")
    return bucket, key.strip("/")


def check_input_location(uri: str) -> None:
    """See that an input can be read from there at all.

    Raises:
        RuntimeApiError: ValidationError, it is not in S3.
    """
    if not uri.startswith(_S3) or not all(split_s3(uri)):
        raise validation_error(f"InputLocation {uri} is not supported here; expected s3://bucket/key.")


def read_input(uri: str) -> bytes:
    """An object of S3. Blocks.

    Raises:
        StoreError: it cannot be read, or is larger than MAX_PAYLOAD.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, key = split_s3(uri)
    try:
        found = _s3().get_object(Bucket=bucket, Key=key)
        with found["Body"] as body:
            if found["ContentLength"] > MAX_PAYLOAD:
                raise StoreError(f"{uri} has {found['ContentLength']} bytes; at most {MAX_PAYLOAD} are allowed")
            return body.read()
    except (BotoCoreError, ClientError) as error:
        raise StoreError(f"{uri} cannot be read: {error}") from error


def _s3() -> S3Client:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3", config=Config(connect_timeout=5, read_timeout=60, retries={"max_attempts": 2})
    )
