"""Image references, and the commands that bring a local image into a registry of ECR."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from deploy.sagemaker.configuration import Configuration
from deploy.sagemaker.partitions import DOMAINS, domain

_ECR = re.compile(
    rf"(?P<account>\d{{12}})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.({'|'.join(map(re.escape, DOMAINS))})"
    r"/(?P<repository>[^:@\s]+)(?P<version>[:@]\S+)?"
)
REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")
_PUSH_LIMIT = 3600.0
"""Seconds for one docker command; an image has several gigabytes."""


@dataclass(frozen=True, slots=True)
class EcrImage:
    """The parts of an image reference in ECR."""

    account: str
    region: str
    repository: str


class PushFailed(Exception):
    """A docker command failed, or there is no docker."""


def ecr_image(image: str) -> EcrImage | None:
    """The parts of a reference to an image in ECR; None for any other registry."""
    match = _ECR.fullmatch(image)
    return EcrImage(match["account"], match["region"], match["repository"]) if match else None


def registry(account: str, region: str) -> str:
    """Host of an account's registry."""
    return f"{account}.dkr.ecr.{region}.{domain(region)}"


def pushed_image(local: str, repository: str, account: str, region: str) -> str:
    """The reference that the local image has after the push; its tag is kept."""
    tag = local.rpartition("/")[2].partition(":")[2] or "latest"
    return f"{registry(account, region)}/{repository}:{tag}"


def push_commands(configuration: Configuration) -> tuple[tuple[str, ...], ...]:
    """docker's commands after the login."""
    local = configuration.push or ""
    return ("docker", "tag", local, configuration.image), ("docker", "push", configuration.image)


def push_script(configuration: Configuration) -> str:
    """All commands of the push, to be run by hand."""
    host = registry(configuration.account, configuration.region)
    login = (
        f"aws ecr get-login-password --region {configuration.region}"
        f" | docker login --username AWS --password-stdin {host}"
    )
    return "\n".join([login, *(" ".join(command) for command in push_commands(configuration))])


def push(configuration: Configuration, password: str) -> None:
    """Log in, tag and push with docker; its progress goes to the terminal.

    Raises:
        PushFailed: docker is not there, or one of its commands failed.
    """
    host = registry(configuration.account, configuration.region)
    _docker(("docker", "login", "--username", "AWS", "--password-stdin", host), password)
    for command in push_commands(configuration):
        _docker(command, None)


def _docker(command: tuple[str, ...], stdin: str | None) -> None:
    try:
        done = subprocess.run(command, input=stdin, text=True, timeout=_PUSH_LIMIT, check=False)
    except FileNotFoundError:
        raise PushFailed(f"docker is not installed here; it is needed for: {' '.join(command)}") from None
    except subprocess.TimeoutExpired:
        raise PushFailed(f"no end after {_PUSH_LIMIT:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise PushFailed(f"exit code {done.returncode}: {' '.join(command)}")
