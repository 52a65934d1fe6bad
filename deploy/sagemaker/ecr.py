"""What goes to AWS before the stack is made: the image to ECR, with docker, and the model to S3."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+"
    r"/(?P<repository>[^:@\s]+)(?P<version>[:@]\S+)?"
)


_DIGEST = "sha256"
"""The metadata of an object that has its file's SHA-256. S3's own checksums are sums of parts if a file has several."""


class UploadFailed(Exception):
    """A docker command failed, there is no docker, or the model's directory cannot be uploaded."""


@dataclass(frozen=True, slots=True)
class EcrImage:
    """The parts of an image reference in ECR."""

    account: str
    region: str
    repository: str


def ecr_image(image: str) -> EcrImage | None:
    """The parts of a reference to an image in ECR; None for any other registry."""
    match = _ECR.fullmatch(image)
    return EcrImage(match["account"], match["region"], match["repository"]) if match else None


def push(ecr: Any, local: str, image: str, tell: Callable[[str], None]) -> None:
    """Push a local image to ECR as `image`, with boto3's client `ecr`; its repository is made if it is not there.

    docker's own progress goes to the terminal. Raises UploadFailed where docker is not there or fails, and botocore's
    ClientError where ECR refuses.
    """
    host, _, rest = image.partition("/")
    repository = re.split("[:@]", rest)[0]
    try:
        ecr.describe_repositories(repositoryNames=[repository])
    except ecr.exceptions.RepositoryNotFoundException:
        tell(f"creating image repository {repository}")
        ecr.create_repository(repositoryName=repository, imageScanningConfiguration={"scanOnPush": True})
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().partition(":")[2]
    tell(f"pushing {local} to {image}")
    _docker("login", "--username", "AWS", "--password-stdin", host, stdin=password)
    _docker("tag", local, image)
    _docker("push", image)


def _docker(*arguments: str, stdin: str | None = None) -> None:
    command = ("docker", *arguments)
    try:
        done = subprocess.run(command, input=stdin, text=True, check=False)
    except FileNotFoundError:
        raise UploadFailed(f"docker is not installed here; it is needed for: {' '.join(command)}") from None
    if done.returncode:
        raise UploadFailed(f"exit code {done.returncode}: {' '.join(command)}")


def upload_model(s3: Any, directory: Path, location: str, tell: Callable[[str], None]) -> None:
    """Upload a directory to an s3:// prefix, with boto3's client `s3`.

    A file is skipped if the object that S3 has was uploaded here from a file with the same SHA-256. Nothing is removed
    there. Raises UploadFailed if the directory is not there or empty, and what boto3 raises if S3 refuses.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if not files:
        raise UploadFailed(f"{directory}: there is no directory with files in it")
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    prefix = prefix if prefix.endswith("/") or not prefix else prefix + "/"
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    there = {entry["Key"]: entry for page in pages for entry in page.get("Contents", ())}
    for path in files:
        key = prefix + path.relative_to(directory).as_posix()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = there.get(key)
        same_size = found is not None and found["Size"] == path.stat().st_size
        if same_size and s3.head_object(Bucket=bucket, Key=key)["Metadata"].get(_DIGEST) == digest:
            continue
        tell(f"uploading {path} to s3://{bucket}/{key}")
        s3.upload_file(os.fspath(path), bucket, key, ExtraArgs={"Metadata": {_DIGEST: digest}})
