"""What goes to AWS before the stack is made: the image to ECR, with docker, and the model to S3."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+"
    r"/(?P<repository>[^:@\s]+)(?P<version>[:@]\S+)?"
)
_PUSH_LIMIT = 3600.0
"""Seconds for one docker command; an image has several gigabytes."""


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


def registry(account: str, region: str) -> str:
    """Host of an account's registry."""
    import botocore.session

    session = botocore.session.get_session()
    name = session.get_partition_for_region(region)
    partition = next(each for each in session.get_data("endpoints")["partitions"] if each["partition"] == name)
    return f"{account}.dkr.ecr.{region}.{partition['dnsSuffix']}"


def pushed_image(local: str, repository: str, account: str, region: str) -> str:
    """The reference that the local image has after the push; its tag is kept."""
    tag = local.rpartition("/")[2].partition(":")[2] or "latest"
    return f"{registry(account, region)}/{repository}:{tag}"


def push_script(local: str, image: str, region: str) -> str:
    """The commands of the push, to be run by hand."""
    login = f"aws ecr get-login-password --region {region} | docker login --username AWS --password-stdin"
    host = image.partition("/")[0]
    return "\n".join([f"{login} {host}", *(" ".join(command) for command in _push_commands(local, image))])


def push(ecr: Any, local: str, image: str, tags: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Push a local image to ECR, with boto3's client `ecr`; its repository is made, with `tags`, if it is not there.

    docker's own progress goes to the terminal.

    Raises:
        UploadFailed: docker is not there, or one of its commands failed.
        botocore.exceptions.ClientError: ECR refused.
    """
    host, _, rest = image.partition("/")
    repository = rest.rpartition(":")[0]
    try:
        ecr.describe_repositories(repositoryNames=[repository])
    except ecr.exceptions.RepositoryNotFoundException:
        tell(f"creating image repository {repository}")
        pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
        ecr.create_repository(repositoryName=repository, imageScanningConfiguration={"scanOnPush": True}, tags=pairs)
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().partition(":")[2]
    tell(f"pushing {local} to {image}")
    _docker(("docker", "login", "--username", "AWS", "--password-stdin", host), password)
    for command in _push_commands(local, image):
        _docker(command, None)


def upload_model(s3: Any, directory: Path, location: str, tell: Callable[[str], None]) -> None:
    """Upload a directory to an s3:// prefix, with boto3's client `s3`.

    What S3 has already, of the same size and not older, is skipped. Nothing is removed there.

    Raises:
        UploadFailed: the directory is not there, or is empty.
        botocore.exceptions.ClientError, boto3.exceptions.S3UploadFailedError: S3 refused.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    if not files:
        raise UploadFailed(f"{directory}: there is no directory with files in it")
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    prefix = prefix if prefix.endswith("/") or not prefix else prefix + "/"
    there = {entry["Key"]: entry for entry in _objects(s3, bucket, prefix)}
    for path in files:
        key = prefix + path.relative_to(directory).as_posix()
        found, status = there.get(key), path.stat()
        if found and found["Size"] == status.st_size and found["LastModified"].timestamp() >= status.st_mtime:
            continue
        tell(f"uploading {path} to s3://{bucket}/{key}")
        s3.upload_file(os.fspath(path), bucket, key)


def _objects(s3: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        yield from page.get("Contents", ())


def _push_commands(local: str, image: str) -> tuple[tuple[str, ...], ...]:
    return ("docker", "tag", local, image), ("docker", "push", image)


def _docker(command: tuple[str, ...], stdin: str | None) -> None:
    try:
        done = subprocess.run(command, input=stdin, text=True, timeout=_PUSH_LIMIT, check=False)
    except FileNotFoundError:
        raise UploadFailed(f"docker is not installed here; it is needed for: {' '.join(command)}") from None
    except subprocess.TimeoutExpired:
        raise UploadFailed(f"no end after {_PUSH_LIMIT:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise UploadFailed(f"exit code {done.returncode}: {' '.join(command)}")
