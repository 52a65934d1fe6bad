"""Uploads a model's directory to S3."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The metadata key that holds the SHA-256 of an object's file. S3's own checksum of an object that was uploaded in
# several parts is not the checksum of the file.
_DIGEST = "sha256"


class UploadFailed(Exception):
    """The model's directory cannot be uploaded."""


def upload_model(s3: Any, directory: Path, location: str, report: Callable[[str], None]) -> None:
    """Upload a directory to an s3:// prefix.

    A file is skipped if S3 has an object that this function uploaded from a file with the same SHA-256. No object is
    removed.

    Args:
        s3: boto3's client of S3.
        directory: The directory.
        location: The s3:// prefix.
        report: Takes a line for each uploaded file.

    Raises:
        UploadFailed: The directory does not exist, has no files, or has one that cannot be read.
        boto3.exceptions.Boto3Error: S3 refused a file. So does botocore's ClientError.
    """
    files = _files(directory)
    if not files:
        raise UploadFailed(f"{directory}: expected a directory with files")
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


def _files(directory: Path) -> list[Path]:
    """Return all files below a directory, sorted, also those behind links to directories.

    Raises:
        UploadFailed: A link leads nowhere, or to a directory that it is in.
    """
    found: list[Path] = []
    for folder, names, files in os.walk(directory, followlinks=True):
        here = Path(folder)
        for link in (here / name for name in names if (here / name).is_symlink()):
            if here.resolve().is_relative_to(link.resolve()):
                raise UploadFailed(f"{link} is a link to a directory that it is in")
        for path in (here / name for name in files):
            if path.is_symlink() and not path.exists():
                raise UploadFailed(f"{path} is a link to {os.readlink(path)}, which does not exist")
            if path.is_file():
                found.append(path)
    return sorted(found)
