"""Images in Amazon ECR: parses their references, and pushes a local image with docker."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.[a-z0-9.-]+"
    r"/(?P<repository>[^:@\s]+)(?P<version>[:@]\S+)?"
)


class PushFailed(Exception):
    """A docker command failed, or docker is not installed."""


@dataclass(frozen=True, slots=True)
class EcrImage:
    """The parts of a reference to an image in ECR."""

    account: str
    region: str
    repository: str


def ecr_image(image: str) -> EcrImage | None:
    """Return the parts of a reference to an image in ECR, or None for any other registry."""
    match = _ECR.fullmatch(image)
    return EcrImage(match["account"], match["region"], match["repository"]) if match else None


def push(ecr: Any, local: str, image: str, report: Callable[[str], None]) -> None:
    """Push a local image to ECR. docker shows its progress on the terminal.

    Args:
        ecr: boto3's client for ECR. If the repository does not exist, it is created.
        image: The reference of the image in ECR.
        report: Called with a line for each step.

    Raises:
        PushFailed: docker is not installed, or a docker command fails.
        botocore.exceptions.ClientError: ECR refused a call.
    """
    host, _, rest = image.partition("/")
    repository = re.split("[:@]", rest)[0]
    registry = host.partition(".")[0]  # The image's account. The credentials may be for another account.
    try:
        ecr.describe_repositories(registryId=registry, repositoryNames=[repository])
    except ecr.exceptions.RepositoryNotFoundException:
        report(f"creating image repository {repository}")
        scanning = {"scanOnPush": True}
        ecr.create_repository(registryId=registry, repositoryName=repository, imageScanningConfiguration=scanning)
    except ecr.exceptions.ClientError as error:
        # Another account may allow only pushes. If the repository is missing, docker reports this.
        if error.response["Error"]["Code"] != "AccessDeniedException":
            raise
    token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    password = base64.b64decode(token).decode().partition(":")[2]
    report(f"pushing {local} to {image}")
    _docker("login", "--username", "AWS", "--password-stdin", host, stdin=password)
    _docker("tag", local, image)
    _docker("push", image)


def _docker(*arguments: str, stdin: str | None = None) -> None:
    command = ("docker", *arguments)
    try:
        done = subprocess.run(command, input=stdin, text=True, check=False)
    except FileNotFoundError:
        raise PushFailed(f"docker is not installed; it is needed for: {' '.join(command)}") from None
    if done.returncode:
        raise PushFailed(f"exit code {done.returncode}: {' '.join(command)}")
