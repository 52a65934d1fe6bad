"""The options of `slipway deploy | update | template`, and the field of the configuration that each one sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

# typer reads these annotations when the command runs, so they are written in full.
File = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(help="TOML file with the configuration; options go before what it says."),
]
Name = Annotated[Optional[str], typer.Option("--name", help="Name of the endpoint; by default from the model.")]  # noqa: UP045
Model = Annotated[Optional[str], typer.Option("--model", help="Hub id, or an s3:// prefix or archive.")]  # noqa: UP045
Image = Annotated[Optional[str], typer.Option("--image", help="Image in ECR.")]  # noqa: UP045
Role = Annotated[Optional[str], typer.Option("--role", help="ARN of the execution role.")]  # noqa: UP045
CreateRole = Annotated[bool, typer.Option("--create-role", help="Make the execution role as well.")]
InstanceType = Annotated[Optional[str], typer.Option("--instance-type", help="Such as ml.g6e.xlarge.")]  # noqa: UP045
Instances = Annotated[Optional[int], typer.Option("--instances", help="How many to begin with.")]  # noqa: UP045
Env = Annotated[Optional[list[str]], typer.Option("--env", help="NAME=VALUE for the container; repeatable.")]  # noqa: UP045
Tag = Annotated[Optional[list[str]], typer.Option("--tag", help="KEY=VALUE on every resource; repeatable.")]  # noqa: UP045
Upload = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--upload", help="Local directory to upload first, to the s3:// prefix that is the model."),
]
Push = Annotated[Optional[str], typer.Option("--push", help="Local image to push to ECR first, with docker.")]  # noqa: UP045
Account = Annotated[Optional[str], typer.Option("--account", help="Twelve digits, if no ARN says it.")]  # noqa: UP045
Setting = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", help="Any other field as FIELD=VALUE in TOML, such as autoscaling.max=4; repeatable."),
]
Region = Annotated[Optional[str], typer.Option("--region", help="By default AWS_REGION or the profile's.")]  # noqa: UP045
Profile = Annotated[Optional[str], typer.Option("--profile", help="Profile of the AWS credentials.")]  # noqa: UP045
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the template and, with credentials, what would change.")]


_FIELDS = (
    *("name", "model", "upload", "image", "push", "role", "create_role"),
    *("instance_type", "instances", "account", "region"),
)
"""Options that set the field of their name."""


class WrongOption(ValueError):
    """An option's value cannot be taken apart."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says, in the shape of the file, and the option that each field comes from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]


def overrides(options: Mapping[str, Any]) -> Overrides:
    """Put together what the options say; None, or a flag that is False, was not given.

    Raises:
        WrongOption: a value of --env, --tag or --set has no "=", or is no TOML.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in _FIELDS:
        value = options.get(field)
        if value is not None and value is not False:
            values[field] = value
            origins[field] = "--" + field.replace("_", "-")
    for option, field in (("--env", "env"), ("--tag", "tags")):
        for pair in options.get(option.removeprefix("--")) or ():
            key, text = _halves(option, pair)
            values.setdefault(field, {})[key] = text
            origins[f"{field}.{key}"] = option
    for setting in options.get("setting") or ():
        path, text = _halves("--set", setting)
        _place(values, path, _toml(path, text))
        origins[path] = "--set"
    return Overrides(values, origins)


def _halves(option: str, pair: str) -> tuple[str, str]:
    key, equals, text = pair.partition("=")
    if not equals or not key:
        # The value may be a credential, so it is not shown.
        raise WrongOption(f"{option}: expected NAME=VALUE, and there is no name or no = in what was given")
    return key, text


def _toml(path: str, text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    if text and all(character.isalnum() or character in "-_.:/@+," for character in text):
        return text  # a bare word: quotes within quotes are tiresome in a shell
    raise WrongOption(f'--set {path}: expected a value as in TOML, such as 4, true, "text" or ["a", "b"]')


def _place(values: dict[str, Any], path: str, value: Any) -> None:
    *tables, last = path.split(".")
    for table in tables:
        inner = values.setdefault(table, {})
        if not isinstance(inner, dict):
            raise WrongOption(f"--set {path}: {table} is no table")
        values = inner
    values[last] = value
