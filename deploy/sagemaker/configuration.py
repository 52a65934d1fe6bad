"""What to deploy, and how: the fields of a configuration file and of the command line, read and checked.

AWS checks most values itself when the stack is made. Checked here is what it would notice late, or not at all.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from deploy.sagemaker.uploads import ecr_image


def _matching(pattern: str) -> Meta:
    """Text that matches as a whole. No message shows the text itself, which may be a credential."""
    return Meta(pattern=rf"^({pattern})\Z")


_S3 = r"s3://[^/\s$]+(/[^\s$]*)?"
Name = Annotated[str, _matching("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")]
Model = Annotated[str, _matching(rf"{_S3}|\w[\w.-]*(/\w[\w.-]*)?")]
InstanceType = Annotated[str, _matching(r"ml\.[a-z0-9-]+\.[a-z0-9]+")]
S3Prefix = Annotated[str, _matching(_S3)]
S3Archive = Annotated[str, _matching(r"s3://[^/\s$]+/[^\s$]+\.tar\.gz")]
Text = str | int | float | bool
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[int, Meta(ge=60, le=3600)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


class Capacity(_Table, frozen=True):
    """How many instances SageMaker may hold for inference components (managed instance scaling)."""

    min: Count
    max: Annotated[int, Meta(ge=1)]


class Component(_Table, frozen=True):
    """The model as an inference component: what one copy takes of an instance."""

    gpus: Count
    copies: Count = 1
    cpus: Positive | None = None
    memory_mb: Annotated[int, Meta(ge=128)] = 1024
    """Of the host, reserved for a copy."""


class Adapter(_Table, frozen=True):
    """A LoRA adapter as an inference component on top of the model's."""

    name: Name
    source: S3Archive

    @property
    def resource(self) -> str:
        return "Adapter" + "".join(word.capitalize() for word in self.name.split("-"))


class Autoscaling(_Table, frozen=True):
    """Instances (or copies of the component) follow the load."""

    min: Count
    max: Annotated[int, Meta(ge=1)]
    target: Positive
    """Concurrent requests for each instance or copy; waiting requests for each instance of an asynchronous endpoint."""
    scale_in_cooldown: Count = 300
    scale_out_cooldown: Count = 60


class Asynchronous(_Table, frozen=True):
    """Requests and answers go through S3."""

    output: S3Prefix
    failure: S3Prefix | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """For each instance at a time."""


class Rollout(_Table, frozen=True):
    """How an update replaces what runs, and the alarms that take it back."""

    strategy: Annotated[str, _matching("blue-green|canary|linear|rolling")] = "blue-green"
    """"blue-green" shifts all traffic at once."""
    step_percent: Annotated[int, Meta(ge=5, le=50)] = 50
    wait: Annotated[int, Meta(ge=0, le=3600)] = 300
    """Seconds between steps, and before the old ones end."""
    alarms: tuple[str, ...] = ()


class Configuration(_Table, frozen=True, kw_only=True):
    """One deployment."""

    name: Name
    """Of the endpoint."""
    model: Model
    """A hub id, or an s3:// prefix or archive."""
    image: str
    region: str
    push: str | None = None
    """A local image that is pushed as `image` first."""
    upload: str | None = None
    """A local directory that is uploaded to the prefix `model` first."""
    role: str | None = None
    """ARN of the execution role; None: one is made in the stack."""
    instance_type: InstanceType | None = None
    instances: Annotated[int, Meta(ge=1)] = 1
    env: dict[str, Text] = {}
    tags: dict[str, Text] = {}
    download_timeout: Seconds = 1800
    """For SageMaker, which downloads a model from S3."""
    startup_timeout: Seconds = 1800
    """Until the container is healthy; it downloads a hub model itself."""
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: tuple[Adapter, ...] = ()
    autoscaling: Autoscaling | None = None
    asynchronous: Asynchronous | None = field(name="async", default=None)
    rollout: Rollout | None = None
    properties: dict[str, dict[str, Any]] = {}
    """Further properties of the template's resources, by the name of the resource; they go before ours."""

    @property
    def environment(self) -> dict[str, str]:
        return _texts(self.env)

    @property
    def labels(self) -> dict[str, str]:
        return _texts(self.tags)

    @property
    def from_s3(self) -> bool:
        """SageMaker downloads the model, not the container."""
        return self.model.startswith("s3://")

    @property
    def is_archive(self) -> bool:
        return self.model.endswith((".tar.gz", ".tgz"))


def _texts(table: Mapping[str, Text]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in table.items()}


class ConfigurationError(Exception):
    """The configuration cannot be used; `problems` has a line for each thing that is wrong."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file. Raises ConfigurationError where it cannot be read, or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from None


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of command line options, in the shape of a file; what is None was not given.

    Raises ConfigurationError where a value of --env or --set has no "=", or is no TOML.
    """
    values = {name: value for name, value in options.items() if value is not None and name not in ("env", "set")}
    if pairs := options.get("env"):
        values["env"] = dict(_halves("env", pair) for pair in pairs)
    for setting in options.get("set") or ():
        path, text = _halves("set", setting)
        *tables, key = path.split(".")
        inner = {key: _toml(path, text)}
        for table in reversed(tables):
            inner = {table: inner}
        values = laid_over(values, inner)
    return values


def _halves(option: str, pair: str) -> tuple[str, str]:
    key, equals, text = pair.partition("=")
    if not equals or not key:
        # The value may be a credential, so it is not shown.
        raise ConfigurationError(f"--{option}: expected NAME=VALUE, and there is no name or no = in what was given")
    return key, text


def _toml(path: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[\w.:/@+,-]+", text):
            return text  # a bare word: quotes within quotes are tiresome in a shell
    raise ConfigurationError(f'--set {path}: expected a value as in TOML, such as 4, true, "text" or ["a", "b"]')


def laid_over(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `over` in their place; tables are merged, also with the one table of a list."""
    merged = dict(values)
    for key, value in over.items():
        match merged.get(key):
            case Mapping() as below if isinstance(value, Mapping):
                merged[key] = laid_over(below, value)
            case [Mapping() as below] if isinstance(value, Mapping):
                merged[key] = [laid_over(below, value)]
            case _:
                merged[key] = value
    return merged


def read_configuration(values: Mapping[str, Any]) -> Configuration:
    """Read and check all fields. Raises ConfigurationError."""
    try:
        read = msgspec.convert(values, Configuration)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise ConfigurationError(f"{path.rstrip('`')}: {what}" if path else what) from None
    if problems := list(_problems(read)):
        raise ConfigurationError(*problems)
    return read


def _problems(read: Configuration) -> Iterator[str]:
    """Fields that do not go together."""
    if not read.instance_type and "EndpointConfiguration" not in read.properties:
        yield "instance_type: missing; expected a type such as ml.g6e.xlarge"
    image = ecr_image(read.image)
    if image and image.region != read.region:
        yield f"image is in {image.region}; expected one in {read.region}, the region of the endpoint"
    if read.push and not image:
        yield "push: expected an image of ECR in the field image, as which it is pushed"
    if read.upload and (read.is_archive or not read.from_s3):
        yield f'upload: expected an s3:// prefix as model, to which it is uploaded, not "{read.model}"'
    if scaling := read.autoscaling:
        if scaling.min > scaling.max:
            yield f"autoscaling.max is {scaling.max}; expected at least min, which is {scaling.min}"
        if scaling.min == 0 and not read.component and not read.asynchronous:
            yield (
                "autoscaling.min is 0; expected at least 1: only inference components (a [component] table) and "
                "asynchronous endpoints scale to zero"
            )
    if read.adapters and not read.component:
        yield "adapters: expected a [component] table beside it: an adapter is a component on another"
    if len({adapter.resource for adapter in read.adapters}) < len(read.adapters):
        yield "adapters has a name twice, hyphens and capitals aside; expected different names"
