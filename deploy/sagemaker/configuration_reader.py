"""Makes a `Configuration` of a TOML file and command-line options, and names everything that is wrong with them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.sagemaker import configuration_tables as tables
from deploy.sagemaker import images, instances
from deploy.sagemaker.configuration import Configuration, made_role_arn
from deploy.sagemaker.configuration_checks import problems_of
from deploy.sagemaker.naming import LONGEST_NAME, NAME, name_from_model
from deploy.sagemaker.table import Table
from deploy.sagemaker.timeouts import LONGEST, SHORTEST

_NAME = rf"(?=.{{1,{LONGEST_NAME}}}$){NAME.pattern}"
_NAME_EXPECTED = f"letters, digits and hyphens, at most {LONGEST_NAME}, with no hyphen at either end"
_MODEL = r"s3://[^/\s]+(/\S*)?|[\w][\w.-]*(/[\w][\w.-]*)?"
_ACCOUNT = ("twelve digits", r"\d{12}")
"""What is expected, and how it is written; so are those that follow."""
_REGION = ("a region such as eu-west-1 (also AWS_REGION)", r"[a-z]{2,8}(-[a-z0-9]+)+")
_ROLE = ("the ARN of an IAM role, arn:aws:iam::<account>:role/<name>", r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")
_REPOSITORY = ("a repository name of ECR", rf"(?=.{{2,256}}$){images.REPOSITORY.pattern}")
_RESERVATION = r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:[a-z0-9-]{1,14}/.+"
_ROLES = (_ROLE[0], r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/*-]+")
"""A policy may be for several roles, such as `role/slipway-*`."""
_CALLER = {"account": _ACCOUNT, "region": _REGION, "role": _ROLES, "repository": _REPOSITORY}
_VARIABLE = r"[a-zA-Z_][a-zA-Z0-9_]{0,1023}"
_TAG_KEY = r"(?!aws:|slipway:)[\w\s.:/=+@-]{1,128}"
_MOST_TAGS = 40


class ConfigurationError(Exception):
    """The configuration cannot be used; `problems` names each field, its value and what was expected."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigurationError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError((f"{path}: {error.strerror or type(error).__name__}",)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError((f"{path}: not a TOML file: {error}",)) from None


def laid_over(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `over` in their place, tables within tables merged."""
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = laid_over(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def read_configuration(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Configuration:
    """Read and check all fields.

    `origins` says for full paths ("autoscaling.max") where they come from, if not from the file ("--max").

    Raises:
        ConfigurationError: something is wrong; all that is wrong is listed.
    """
    problems: list[str] = []
    table = Table(values, "", problems, origins)
    fields = _fields(table)
    table.finish()
    if not problems:
        configuration = Configuration(**fields)
        problems = problems_of(configuration)
    if problems:
        raise ConfigurationError(tuple(problems))
    return configuration


def check_caller(values: Mapping[str, str | None]) -> None:
    """Check for whom `slipway policy` prints a policy: account, region, role and repository, each named by its option.

    Raises:
        ConfigurationError: something is wrong; all that is wrong is listed.
    """
    problems: list[str] = []
    table = Table(values, "", problems, {key: f"--{key}" for key in values})
    for key, (expected, pattern) in _CALLER.items():
        table.text(key, expected, pattern)
    if problems:
        raise ConfigurationError(tuple(problems))


def _fields(table: Table) -> dict[str, Any]:
    model = table.required_text("model", "a hub id such as org/model, or an s3:// prefix", _MODEL)
    name = table.text("name", _NAME_EXPECTED, _NAME) or name_from_model(model)
    if model and not name:
        table.refuse("name", _NAME_EXPECTED)
    fields: dict[str, Any] = {"name": name, "model": model}
    fields |= _surroundings(table, name)
    fields |= _hosting(table)
    fields |= _limits(table)
    fields["env"] = table.pairs("env", _VARIABLE, most=90)
    fields["tags"] = table.pairs("tags", _TAG_KEY, most=_MOST_TAGS)
    fields["vpc"] = tables.vpc_of(table.table("vpc"))
    fields["capture"] = tables.capture_of(table.table("capture"))
    fields["metrics"] = tables.metrics_of(table.table("metrics"))
    fields["capacity"] = tables.capacity_of(table.table("capacity"))
    fields["component"] = tables.component_of(table.table("component"))
    fields["adapters"] = tuple(tables.adapter_of(each) for each in table.tables("adapters", most=100))
    fields["autoscaling"] = tables.autoscaling_of(table.table("autoscaling"))
    fields["asynchronous"] = tables.asynchronous_of(table.table("async"))
    fields["rollout"] = tables.rollout_of(table.table("rollout"))
    return fields


def _surroundings(table: Table, name: str) -> dict[str, Any]:
    region = table.required_text("region", *_REGION)
    role = table.text("role", *_ROLE)
    image = table.text("image", "an image reference without blanks", r"\S{1,255}")
    push = table.text("push", "a local image such as slipway:gpu", r"[^\s@-][^\s@]*")
    repository = table.text("repository", *_REPOSITORY) or "slipway"
    create_role = table.boolean("create_role") or False
    account = table.text("account", *_ACCOUNT) or _account_of(role, image)
    if not account:
        table.refuse("account", "twelve digits; or a role's ARN or an image in ECR, which name the account")
    if not role and not create_role:
        table.refuse("role", "the ARN of an execution role, or create_role = true")
    if role and create_role:
        table.refuse("role", "none, as create_role is true")
    if not image and not push:
        table.refuse("image", "an image reference, or push with a local image")
    if image and push:
        table.refuse("image", "none, as push makes it of the account, the region and the repository")
    if push:
        image = images.pushed_image(push, repository, account, region)
    return {
        "region": region,
        "account": account,
        "role": role or made_role_arn(account, region, name),
        "create_role": create_role,
        "image": image or "",
        "push": push,
        "repository": repository,
    }


def _account_of(role: str | None, image: str | None) -> str:
    if role:
        return role.split(":")[4]
    found = images.ecr_image(image) if image else None
    return found.account if found else ""


def _hosting(table: Table) -> dict[str, Any]:
    pools = tuple(tables.pool_of(each) for each in table.tables("pools", most=5))
    instance_type = table.text("instance_type", tables.INSTANCE_EXPECTED, instances.TYPE.pattern)
    if not pools and instance_type is None and "instance_type" not in table:
        table.refuse("instance_type", tables.INSTANCE_EXPECTED)
    if pools and instance_type:
        table.refuse("instance_type", "none, as there are pools")
    cuda = table.text("cuda", "a version such as 13.0", r"\d{1,2}\.\d{1,2}")
    return {
        "instance_type": instance_type,
        "pools": pools,
        "instances": table.integer("instances", 1, 1000) or 1,
        "cuda": (int(cuda.split(".")[0]), int(cuda.split(".")[1])) if cuda else None,
        "ami": table.text("ami", "an InferenceAmiVersion", r"[a-z0-9-]+"),
        "gpus": table.integer("gpus", 1, 64),
        "routing": table.text("routing", "a routing strategy", r"[A-Z_]+") or "LEAST_OUTSTANDING_REQUESTS",
        "prefix_length": table.integer("prefix_length", 1024, 65536),
        "network_isolation": table.boolean("network_isolation") or False,
        "accept_eula": table.boolean("accept_eula") or False,
        "reservation": table.text("reservation", "the ARN of a capacity reservation", _RESERVATION),
        "ssm": table.boolean("ssm") or False,
        "kms_key": table.text("kms_key", "a KMS key's id, ARN or alias", r"[a-zA-Z0-9:/_-]{1,2048}"),
        "volume_gb": table.integer("volume_gb", 1, 512),
    }


def _limits(table: Table) -> dict[str, Any]:
    return {
        "model_size_gb": table.number("model_size_gb", 0),
        "download_timeout": table.integer("download_timeout", SHORTEST, LONGEST),
        "startup_timeout": table.integer("startup_timeout", SHORTEST, LONGEST),
        "provision_timeout": table.integer("provision_timeout", 300, 3600),
    }
