"""Uploads a model's directory to S3."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The metadata key for the SHA-256 of an object's file. If an object was uploaded in several parts, S3's own checksum is
# not the checksum of the file.
_DIGEST = "sha256"


class UploadFailed(Exception):
    """The model's directory cannot be uploaded."""


def upload_model(s3: Any, directory: Path, location: str, report: Callable[[str], None]) -> None:
    """Upload a directory to an s3:// prefix.

    A file is skipped if S3 has an object that this function uploaded from a file with the same SHA-256. No object is
    deleted.

    Args:
        s3: boto3's client for S3.
        report: Called with a line for each uploaded file.

    Raises:
        UploadFailed: The directory does not exist, has no files, or has a file that cannot be read.
        boto3.exceptions.Boto3Error: S3 refused a file. botocore's ClientError may be raised instead.
    """
    files = files_in(directory)
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    prefix = prefix if prefix.endswith("/") or not prefix else prefix + "/"
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    uploaded = {entry["Key"]: entry for page in pages for entry in page.get("Contents", ())}
    for path in files:
        key = prefix + path.relative_to(directory).as_posix()
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UploadFailed(f"{path} cannot be read: {error}") from None
        found = uploaded.get(key)
        same_size = found is not None and found["Size"] == path.stat().st_size
        if same_size and s3.head_object(Bucket=bucket, Key=key)["Metadata"].get(_DIGEST) == digest:
            continue
        report(f"uploading {path} to s3://{bucket}/{key}")
        s3.upload_file(os.fspath(path), bucket, key, ExtraArgs={"Metadata": {_DIGEST: digest}})


def files_in(directory: Path) -> list[Path]:
    """Return all files of a directory that an upload would include.

    Raises:
        UploadFailed: The directory does not exist or has no files, a file cannot be read, or a file's name cannot be
            a key in S3.
    """
    files = list(_files(directory)) if directory.is_dir() else []
    if not files:
        raise UploadFailed(f"{directory}: expected a directory with files")
    for path in files:
        name = path.relative_to(directory).as_posix()
        if not name.isprintable():  # Bytes that are not UTF-8 are decoded as lone surrogates, which are not printable.
            shown = ascii(os.fspath(path))
            raise UploadFailed(f"the name of the file {shown} is not UTF-8 text that can be printed; rename the file")
    return files


def _files(directory: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield all files below a directory, including files behind links to directories.

    Args:
        directory: The directory.
        above: The directories that contain it, with links resolved.

    Raises:
        UploadFailed: A directory cannot be read, or a link leads nowhere or to a directory that contains the link.
    """
    real = directory.resolve()
    if real in above:
        raise UploadFailed(f"{directory} is a link to a directory that it is in")
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise UploadFailed(f"{directory} cannot be read: {error}") from None
    for path in paths:
        if path.is_dir():
            yield from _files(path, (*above, real))
        elif path.is_file():
            yield path
        elif path.is_symlink():
            raise UploadFailed(f"{path} is a link to {os.readlink(path)}, which does not exist")
