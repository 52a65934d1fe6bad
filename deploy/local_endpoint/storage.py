"""The storage for `s3://` objects: S3, or a local folder that stands for S3."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from container.sources.location import S3Url, SourceError
from container.sources.s3 import check_path, s3_client
from deploy.local_endpoint.settings import OWN_BUCKET, LocalSettings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


logger = logging.getLogger(__name__)


class StorageError(Exception):
    """An object cannot be read or written. The message states the reason."""


def object_url(text: str) -> S3Url:
    """Parse the URL of an object, `s3://bucket/key`.

    Raises:
        SourceError: The text is not such a URL, or a part of the path is `.`, `..` or empty.
    """
    url = folder_url(text)
    if not url.prefix:
        raise SourceError("allowed: s3://bucket/key")
    return url


def folder_url(text: str) -> S3Url:
    """Parse the URL of a folder, `s3://bucket/prefix`.

    Raises:
        SourceError: The text is not such a URL, or a part of the path is `.`, `..` or empty.
    """
    url = S3Url.parse(text)
    try:
        check_path(location(url).removeprefix("s3://").rstrip("/"))
    except SourceError:
        raise SourceError("a key may not have empty parts, `.` and `..`") from None
    return url


def location(url: S3Url) -> str:
    """Return the URL of an object as a string."""
    return f"s3://{url.bucket}/{url.prefix}"


class Storage(Protocol):
    """Reads and writes objects by their `s3://` URLs. Each method blocks, and may raise StorageError."""

    def size(self, url: S3Url) -> int:
        """Return the size of an object in bytes."""
        ...

    def read(self, url: S3Url) -> bytes:
        """Return an object's bytes."""
        ...

    def write(self, url: S3Url, body: bytes, content_type: str) -> None:
        """Write an object. Readers do not see an incomplete object."""
        ...


@contextlib.contextmanager
def _reporting(kind: type[Exception]) -> Iterator[None]:
    """Raise StorageError for each error of a kind."""
    try:
        yield
    except kind as error:
        raise StorageError(str(error) or type(error).__name__) from error


class FolderStorage:
    """A folder in which `s3://bucket/key` is the file `bucket/key`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @_reporting(OSError)
    def size(self, url: S3Url) -> int:
        return _size_of_file(self._path(url).stat())

    @_reporting(OSError)
    def read(self, url: S3Url) -> bytes:
        path = self._path(url)
        _size_of_file(path.stat())  # Checked before opening, because opening a device may have an effect.
        # Without O_NONBLOCK, a pipe that has replaced the file would block the thread.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(_size_of_file(os.fstat(file.fileno())))

    @_reporting(OSError)
    def write(self, url: S3Url, body: bytes, content_type: str) -> None:
        path = self._path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as directory:
            complete = Path(directory) / "complete"
            complete.write_bytes(body)
            complete.replace(path)

    def _path(self, url: S3Url) -> Path:
        root = self._root.resolve()
        # Before Python 3.13, Path.resolve raises RuntimeError for a loop of links.
        path = Path(os.path.realpath(root / url.bucket / url.prefix))
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # Raises OSError if there is a loop of links.
        if not path.is_relative_to(root):
            raise StorageError(f"{location(url)} leaves the folder {root}")
        return path


def _size_of_file(found: os.stat_result) -> int:
    """Return the size of a regular file.

    Raises:
        StorageError: The path is a directory, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(found.st_mode):
        raise StorageError("it is not a regular file")
    return found.st_size


class S3Storage:
    """S3, or the server that AWS_ENDPOINT_URL_S3 names, through boto3.

    The default bucket is created if it is missing.
    """

    @_reporting(Exception)
    def size(self, url: S3Url) -> int:
        return self._client.head_object(Bucket=url.bucket, Key=url.prefix)["ContentLength"]

    @_reporting(Exception)
    def read(self, url: S3Url) -> bytes:
        from boto3.s3.transfer import TransferConfig

        content = io.BytesIO()
        in_this_thread = TransferConfig(use_threads=False)
        self._client.download_fileobj(url.bucket, url.prefix, content, Config=in_this_thread)
        return content.getvalue()

    @_reporting(Exception)
    def write(self, url: S3Url, body: bytes, content_type: str) -> None:
        given: dict[str, Any] = {"ContentType": content_type} if content_type else {}
        try:
            self._client.put_object(Bucket=url.bucket, Key=url.prefix, Body=body, **given)
        except self._client.exceptions.NoSuchBucket:
            if url.bucket != OWN_BUCKET:
                raise
            self._make_bucket(url.bucket)
            self._client.put_object(Bucket=url.bucket, Key=url.prefix, Body=body, **given)

    def _make_bucket(self, name: str) -> None:
        region: Any = self._client.meta.region_name
        elsewhere: dict[str, Any] = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        self._client.create_bucket(Bucket=name, **({} if region == "us-east-1" else elsewhere))

    @functools.cached_property
    def _client(self) -> S3Client:
        return s3_client()


def storage_of(settings: LocalSettings) -> Storage:
    """Return the storage that the settings specify."""
    if settings.s3_folder is not None:
        return FolderStorage(settings.s3_folder)
    if settings.uses_s3:
        return S3Storage()
    folder = Path(tempfile.mkdtemp(prefix="slipway-s3-"))
    logger.info("s3://bucket/key is the file %s/bucket/key; --s3-folder sets another folder", folder)
    return FolderStorage(folder)
