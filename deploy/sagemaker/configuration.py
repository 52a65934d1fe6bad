"""The configuration of a deployment: the fields of a configuration file and of the command line.

AWS checks most values when the stack is created. This module checks the values that AWS would check late, or not at
all.
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

from deploy.sagemaker.ecr import ecr_image


def _matching(pattern: str) -> Meta:
    """Require a text that matches as a whole. No message shows the text, which may be a credential."""
    return Meta(pattern=rf"^({pattern})\Z")


_S3 = r"s3://[^/\s$]+(/[^\s$]*)?"
_MAX_NAME = 63  # Characters of the name of an endpoint or a component.
Name = Annotated[str, Meta(pattern=r"^([a-zA-Z0-9](-*[a-zA-Z0-9])*)\Z", max_length=_MAX_NAME)]
Model = Annotated[str, _matching(rf"{_S3}|\w[\w.-]*(/\w[\w.-]*)?")]
InstanceType = Annotated[str, _matching(r"ml\.[a-z0-9-]+\.[a-z0-9]+")]
S3Prefix = Annotated[str, Meta(pattern=rf"^({_S3})\Z", max_length=512)]
S3Archive = Annotated[str, _matching(r"s3://[^/\s$]+/[^\s$]+\.tar\.gz")]
Topic = Annotated[str, _matching(r"arn:aws[a-z-]*:sns:[a-z0-9-]*:[0-9]{12}:[a-zA-Z0-9_.-]+")]
Text = str | int | float | bool
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[int, Meta(ge=60, le=3600)]
_INSTANCES = frozenset({"InstanceType", "InstancePools", "ServerlessConfig"})  # Properties of a variant.
_INTERVALS = (10, 30, 60, 120, 180, 240, 300)  # Seconds between metrics that SageMaker allows.


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


class Capacity(_Table, frozen=True):
    """The number of instances that SageMaker may hold for inference components (managed instance scaling)."""

    min: Count
    max: Annotated[int, Meta(ge=1)]


class Component(_Table, frozen=True):
    """The model as an inference component: the resources of an instance that one copy uses."""

    gpus: Count
    copies: Count = 1
    cpus: Positive | None = None
    memory_mb: Annotated[int, Meta(ge=128)] = 1024  # Memory of the host that is reserved for a copy.


class AdapterComponent(_Table, frozen=True):
    """A LoRA adapter, as an inference component on top of the model's component."""

    name: Name
    source: S3Archive

    @property
    def resource_name(self) -> str:
        return "Adapter" + "".join(word.capitalize() for word in self.name.split("-"))


class Autoscaling(_Table, frozen=True):
    """Scales the instances, or the copies of the component, with the load."""

    min: Count
    max: Annotated[int, Meta(ge=1)]
    # Concurrent requests for each instance or copy. For an asynchronous endpoint: waiting requests for each instance.
    target: Positive
    scale_in_cooldown: Count = 300
    scale_out_cooldown: Count = 60


class Asynchronous(_Table, frozen=True):
    """Answers are S3 objects, and so are requests of more than 128,000 bytes."""

    output: S3Prefix
    failure: S3Prefix | None = None
    input: S3Prefix | None = None  # Requests. A role that the stack creates may read them.
    concurrency: Annotated[int, Meta(ge=1, le=1000)] | None = None  # Requests that run at a time on each instance.
    success_topic: Topic | None = None  # ARN of an SNS topic that gets a message for each answer.
    error_topic: Topic | None = None


class PrefixAwareRouting(_Table, frozen=True):
    """Requests with the same prefix go to the same instance, which has the prefix in its cache."""

    prefix_length: Annotated[
        int, Meta(ge=1024, le=65536)
    ]  # Bytes of the body; OpenAI path: characters of the messages.
    # Open requests of an instance, or of a component's copy, from which on requests go elsewhere.
    concurrency_threshold: Annotated[int, Meta(ge=1, le=1024)]


class DataCapture(_Table, frozen=True):
    """Requests and answers are copied to S3."""

    destination: S3Prefix
    percent: Annotated[int, Meta(ge=0, le=100)]  # Share of the requests.
    modes: Annotated[tuple[Annotated[str, _matching("Input|Output")], ...], Meta(min_length=1)] = ("Input", "Output")


class Metrics(_Table, frozen=True):
    """Metrics of instances, GPUs and the container in CloudWatch (detailed observability)."""

    detailed: bool = True
    interval: int = 60  # Seconds; one of `_INTERVALS`.
    # The container's route, if it is not /metrics. CloudFormation knows it for components only.
    path: Annotated[str, Meta(pattern=r"^/(?!.*\.\.)[a-zA-Z0-9/_.-]+\Z", max_length=256)] | None = None


class Rollout(_Table, frozen=True):
    """The way an update replaces instances, and the alarms that undo an update."""

    # "blue-green" shifts all traffic at once.
    strategy: Annotated[str, _matching("blue-green|canary|linear|rolling")] = "blue-green"
    step_percent: Annotated[int, Meta(ge=5, le=50)] = 50
    wait: Annotated[int, Meta(ge=0, le=3600)] = 300  # Seconds between steps, and before the old instances end.
    alarms: tuple[str, ...] = ()


class Configuration(_Table, frozen=True, kw_only=True):
    """One deployment."""

    name: Name  # The name of the endpoint.
    model: Model  # A hub id, an s3:// prefix, or an s3:// archive.
    image: str
    region: str
    push: str | None = None  # A local image that is pushed as `image` first.
    upload: str | None = None  # A local directory that is uploaded to the prefix `model` first.
    role: str | None = None  # ARN of the execution role. None: the stack creates one.
    instance_type: InstanceType | None = None
    instances: Annotated[int, Meta(ge=1)] = 1
    env: dict[str, Text] = {}
    tags: dict[str, Text] = {}
    download_timeout: Seconds = 1800  # Seconds in which SageMaker has to download the model from S3.
    # Seconds until the container has to be healthy. It downloads a hub model in this time.
    startup_timeout: Seconds = 1800
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: tuple[AdapterComponent, ...] = ()
    autoscaling: Autoscaling | None = None
    asynchronous: Asynchronous | None = field(name="async", default=None)
    prefix_aware_routing: PrefixAwareRouting | None = None
    data_capture: DataCapture | None = None
    metrics: Metrics = Metrics()
    rollout: Rollout | None = None
    # Further properties of the template's resources, by the name of the resource. They override the template's own
    # properties.
    properties: dict[str, dict[str, Any]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return _as_text(self.env)

    @property
    def labels(self) -> dict[str, str]:
        return _as_text(self.tags)

    @property
    def from_s3(self) -> bool:
        """True if SageMaker downloads the model from S3. Otherwise the container downloads it."""
        return self.model.startswith("s3://")

    @property
    def is_archive(self) -> bool:
        return self.model.endswith((".tar.gz", ".tgz"))

    @property
    def most_instances(self) -> int:
        """The number of instances that the endpoint can grow to."""
        if self.capacity:
            return max(self.instances, self.capacity.max)
        return max(self.instances, self.autoscaling.max if self.autoscaling and not self.component else 0)


def _as_text(table: Mapping[str, Text]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in table.items()}


class ConfigurationError(Exception):
    """The configuration cannot be used. `problems` has a line for each fault."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_file(path: Path) -> dict[str, Any]:
    """Read the values of a TOML file.

    Raises:
        ConfigurationError: The file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from None


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of command line options, in the shape of a file.

    Args:
        options: The value of each option, or None if the option is not given.

    Raises:
        ConfigurationError: A value of --env or --set has no "=", or is not TOML.
    """
    values = {name: value for name, value in options.items() if value is not None and name not in ("env", "set")}
    if pairs := options.get("env"):
        values["env"] = dict(_split("env", pair) for pair in pairs)
    for assignment in options.get("set") or ():
        path, text = _split("set", assignment)
        *tables, key = path.split(".")
        inner = {key: _toml(path, text)}
        for table in reversed(tables):
            inner = {table: inner}
        values = merge_tables(values, inner)
    return values


def _split(option: str, pair: str) -> tuple[str, str]:
    key, equals, text = pair.partition("=")
    if not equals or not key:
        # The value is not shown, because it may be a credential.
        raise ConfigurationError(f"--{option}: expected NAME=VALUE; the given value has no name or no =")
    return key, text


def _toml(path: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[\w.:/@+,-]+", text):
            return text  # A bare word, which needs no quotes within the quotes of the shell.
    raise ConfigurationError(f'--set {path}: expected a TOML value, such as 4, true, "text" or ["a", "b"]')


def merge_tables(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, overridden by `over`. Tables are merged, also with the only table of a list."""
    merged = dict(values)
    for key, value in over.items():
        match merged.get(key):
            case Mapping() as below if isinstance(value, Mapping):
                merged[key] = merge_tables(below, value)
            case [Mapping() as below] if isinstance(value, Mapping):
                merged[key] = [merge_tables(below, value)]
            case _:
                merged[key] = value
    return merged


def read_configuration(values: Mapping[str, Any]) -> Configuration:
    """Read and check all fields.

    Raises:
        ConfigurationError: A field is missing, unknown or wrong, or two fields contradict each other.
    """
    try:
        read = msgspec.convert(values, Configuration)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise ConfigurationError(f"{path.rstrip('`')}: {message}" if path else message) from None
    if problems := list(_problems(read)):
        raise ConfigurationError(*problems)
    return read


def _problems(read: Configuration) -> Iterator[str]:
    """Yield a line for each contradiction between fields."""
    variants = _variants(read)
    if not read.instance_type and (not variants or any(_INSTANCES.isdisjoint(variant) for variant in variants)):
        yield "instance_type: missing; expected a type such as ml.g6e.xlarge"
    image = ecr_image(read.image)
    if image and image.region != read.region:
        yield f"image is in {image.region}; expected one in {read.region}, the region of the endpoint"
    if read.push and not image:
        yield "push: expected an image in ECR in the field image; the local image is pushed to it"
    if read.upload and (read.is_archive or not read.from_s3):
        yield f'upload: expected an s3:// prefix as model, not "{read.model}"; the directory is uploaded to it'
    if scaling := read.autoscaling:
        if scaling.min > scaling.max:
            yield f"autoscaling.max is {scaling.max}; expected at least min, which is {scaling.min}"
        if scaling.min == 0 and not read.component and not read.asynchronous:
            yield (
                "autoscaling.min is 0; expected at least 1: only inference components (a [component] table) and "
                "asynchronous endpoints scale to zero"
            )
        if scaling.min == 0 and read.component and not variants and (not read.capacity or read.capacity.min > 0):
            yield "autoscaling.min is 0; expected capacity.min = 0, too: without it the instances stay"
    yield from _refused_by_sagemaker(read)
    if read.adapters and not read.component:
        yield "adapters: expected a [component] table, too: an adapter is an inference component on top of another one"
    for number, adapter in enumerate(read.adapters):
        if len(component := f"{read.name}-{adapter.name}") > _MAX_NAME:
            yield f"adapters[{number}].name: the component {component} would have more than {_MAX_NAME} characters"
    if len({adapter.resource_name for adapter in read.adapters}) < len(read.adapters):
        yield "adapters has a name twice; expected names that differ in more than hyphens and capitals"


def _refused_by_sagemaker(read: Configuration) -> Iterator[str]:
    """Yield a line for each combination that SageMaker or CloudFormation refuses, or that has no effect there."""
    prefix_aware, metrics = read.prefix_aware_routing, read.metrics
    if read.asynchronous and read.component:
        yield (
            "async: expected no [component] table: asynchronous calls cannot name a component, and an asynchronous "
            "endpoint takes no other calls"
        )
    if read.asynchronous and prefix_aware:
        yield "prefix_aware_routing: expected no [async] table: SageMaker routes by prefix on real-time endpoints only"
    if prefix_aware and read.most_instances < 2:
        yield (
            f"prefix_aware_routing: expected at least 2 instances, not {read.most_instances}: SageMaker routes by "
            "prefix between instances (instances, capacity.max, or autoscaling.max without a component)"
        )
    if metrics.interval not in _INTERVALS:
        yield f"metrics.interval is {metrics.interval}; expected one of {', '.join(map(str, _INTERVALS))}"
    if metrics.path and not read.component:
        yield (
            "metrics.path: expected a [component] table, too: for other endpoints CloudFormation has no such property, "
            "and SageMaker reads /metrics"
        )
    if metrics.path and not metrics.detailed:
        yield "metrics.path: expected metrics.detailed = true: otherwise SageMaker reads no metrics of the container"
    if any("ServerlessConfig" in variant for variant in _variants(read)):
        yield (
            "properties.EndpointConfiguration.ProductionVariants: expected no ServerlessConfig: the endpoint has "
            "instances, and serverless endpoints have no GPUs, no asynchronous calls and no data capture"
        )


def _variants(read: Configuration) -> list[Mapping[str, Any]]:
    """Return what `properties` adds to the variants of the endpoint."""
    given = read.properties.get("EndpointConfiguration", {}).get("ProductionVariants")
    return [variant for variant in (given if isinstance(given, list) else [given]) if isinstance(variant, Mapping)]
