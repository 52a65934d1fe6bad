"""The configuration of a deployment: the fields of a configuration file and of the command line.

AWS checks most values when the stack is created. This module checks the values whose faults AWS reports only after
minutes, or not at all.
"""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta, field

from container.settings.load import setting_faults
from container.settings.lookup import closest
from deploy.sagemaker.ecr import ecr_image


def _matching(pattern: str, expected: str, example: str, longest: int | None = None) -> Meta:
    """Require a text that matches the pattern entirely. No message shows the text, because it may be a credential.

    Args:
        pattern: The regular expression.
        expected: A description of the allowed texts, for a message.
        example: An allowed text, which the message also names.
        longest: The maximum number of characters.
    """
    words = f"{expected}, such as {example}"
    return Meta(pattern=rf"^({pattern})\Z", max_length=longest, description=words, examples=[example])


_S3 = r"s3://[^/\s$]+(/[^\s$]*)?"
_MAX_NAME = 63  # The longest name of an endpoint or a component, in characters.
_HOSTED = r"[^\s/]+[.:][^\s/]*/\S+"
Name = Annotated[
    str,
    _matching(
        r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", "at most 63 letters, digits and hyphens", "my-endpoint", longest=_MAX_NAME
    ),
]
Model = Annotated[
    str,
    _matching(
        rf"{_S3}|\w[\w.-]*(/\w[\w.-]*)?",
        "the name of a model on the Hugging Face hub, an s3:// prefix or an s3:// archive",
        "org/name",
    ),
]
Image = Annotated[
    str,
    _matching(_HOSTED, "an image in a registry", "123456789012.dkr.ecr.us-east-1.amazonaws.com/slipway:gpu"),
]
InstanceType = Annotated[str, _matching(r"ml\.[a-z0-9-]+\.[a-z0-9]+", "an instance type", "ml.g6e.xlarge")]
S3Prefix = Annotated[str, _matching(_S3, "an S3 prefix of at most 512 characters", "s3://bucket/prefix/", longest=512)]
S3Archive = Annotated[
    str, _matching(r"s3://[^/\s$]+/[^\s$]+\.tar\.gz", "an archive on S3", "s3://bucket/adapter.tar.gz")
]
Topic = Annotated[
    str,
    _matching(
        r"arn:aws[a-z-]*:sns:[a-z0-9-]*:[0-9]{12}:[a-zA-Z0-9_.-]+",
        "the ARN of an SNS topic",
        "arn:aws:sns:us-east-1:123456789012:topic",
    ),
]
Reservation = Annotated[
    str,
    _matching(
        r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:[a-z0-9-]{1,14}/.*",
        "the ARN of a capacity reservation",
        "arn:aws:sagemaker:us-east-1:123456789012:training-plan/name",
    ),
]
MachineImage = Annotated[
    str,
    _matching(r"al[a-z0-9-]+", "a version of SageMaker's machine image", "al2023-ami-sagemaker-inference-gpu-4-1"),
]
Text = str | int | float | bool
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[int, Meta(ge=60, le=3600)]
Deadline = Annotated[float, Meta(ge=0, le=1e9)]  # In seconds. The container accepts no larger value.
# If a variant has none of these properties, it needs the field `instance_type`. ServerlessConfig is refused with its
# own message (`_refused_by_sagemaker`).
_INSTANCES = frozenset({"InstanceType", "InstancePools", "ServerlessConfig"})
_RESOLVED = "{{resolve:"  # CloudFormation replaces such a reference with a parameter or a secret.
_INTERVALS = (10, 30, 60, 120, 180, 240, 300)  # The intervals between metrics that SageMaker allows, in seconds.


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


class Capacity(_Table, frozen=True):
    """The number of instances that SageMaker may run for inference components (managed instance scaling)."""

    min: Count
    max: Annotated[int, Meta(ge=1)]
    # Which instances SageMaker may stop: "idle-release" stops empty instances. "consolidation" also moves copies.
    scale_in: (
        Annotated[str, _matching("idle-release|consolidation", "idle-release or consolidation", "idle-release")] | None
    ) = None
    scale_in_step: Annotated[int, Meta(ge=1, le=100)] | None = None  # How many instances a consolidation stops at once.
    scale_in_cooldown: Annotated[int, Meta(ge=5, le=1440)] | None = None  # Minutes before a consolidation.


class Component(_Table, frozen=True):
    """The model as an inference component: the resources of an instance that one copy uses."""

    gpus: Count
    copies: Count = 1
    cpus: Positive | None = None
    memory_mb: Annotated[int, Meta(ge=128)] = 1024  # The host memory that is reserved for a copy.
    max_memory_mb: Annotated[int, Meta(ge=128)] | None = None  # The host memory that a copy may use.
    placement: Annotated[str, _matching("spread|binpack", "spread or binpack", "spread")] | None = None


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
    # The number of concurrent requests per instance or copy. For an asynchronous endpoint, this is the number of
    # waiting requests per instance.
    target: Positive
    scale_in_cooldown: Count = 300
    scale_out_cooldown: Count = 60


class Asynchronous(_Table, frozen=True):
    """Answers are S3 objects, and so are requests of more than 128,000 bytes."""

    output: S3Prefix
    failure: S3Prefix | None = None
    # The location of requests. If the stack creates the endpoint's role, the role gets read access to it.
    input: S3Prefix | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1000)] | None = None  # How many requests run at a time on each instance.
    success_topic: Topic | None = None  # The ARN of an SNS topic to which a message is sent for each answer.
    error_topic: Topic | None = None


class PrefixAwareRouting(_Table, frozen=True):
    """Requests with the same prefix go to the same instance, which has the prefix in its cache."""

    prefix_length: Annotated[
        int, Meta(ge=1024, le=65536)
    ]  # The number of bytes of the body. On the OpenAI path: the number of characters of the messages.
    # The number of open requests at which an instance, or a copy of a component, gets no further requests.
    concurrency_threshold: Annotated[int, Meta(ge=1, le=1024)]


class DataCapture(_Table, frozen=True):
    """Requests and answers are copied to S3."""

    destination: S3Prefix
    percent: Annotated[int, Meta(ge=0, le=100)]  # The share of the requests to record.
    modes: Annotated[
        tuple[Annotated[str, _matching("Input|Output", "Input or Output", "Input")], ...], Meta(min_length=1)
    ] = ("Input", "Output")


class Metrics(_Table, frozen=True):
    """Metrics of instances, GPUs and the container in CloudWatch (detailed observability)."""

    detailed: bool = True
    interval: int = 60  # Seconds; one of `_INTERVALS`.
    # The container's route for metrics, if it is not /metrics. CloudFormation supports this for components only.
    path: Annotated[str, _matching(r"/(?!.*\.\.)[a-zA-Z0-9/_.-]+", "a path", "/metrics", longest=256)] | None = None


class Rollout(_Table, frozen=True):
    """How an update replaces instances, and which alarms roll an update back."""

    # "blue-green" shifts all traffic at once.
    strategy: Annotated[
        str, _matching("blue-green|canary|linear|rolling", "blue-green, canary, linear or rolling", "rolling")
    ] = "blue-green"
    step_percent: Annotated[int, Meta(ge=5, le=50)] = 50
    wait: Annotated[int, Meta(ge=0, le=3600)] = 300  # Seconds between steps, and before the old instances are stopped.
    timeout: Annotated[int, Meta(ge=600, le=28800)] | None = None  # The time limit of the whole update, in seconds.
    alarms: tuple[str, ...] = ()


class Configuration(_Table, frozen=True, kw_only=True):
    """One deployment."""

    name: Name  # The name of the endpoint.
    model: Model  # A hub id, an s3:// prefix, or an s3:// archive.
    image: Image
    region: str
    push: str | None = None  # A local image that is first pushed as `image`.
    upload: str | None = None  # A local directory that is first uploaded to the prefix `model`.
    role: str | None = None  # The ARN of the execution role. None: the stack creates a role.
    instance_type: InstanceType | None = None
    instances: Annotated[int, Meta(ge=1)] = 1
    inference_ami_version: MachineImage | None = None  # None: GPU instances get the newest driver.
    volume_gb: Annotated[int, Meta(ge=1, le=512)] | None = None  # The volume of an instance without its own disk.
    reservation: Reservation | None = None  # If set, instances come only from this reservation.
    ssm_access: bool = False  # Allows a shell on the instances, through Systems Manager.
    core_dumps: S3Prefix | None = None  # The location for core dumps of the container.
    env: dict[str, Text] = {}
    tags: dict[str, Text] = {}
    download_timeout: Seconds = 1800  # The time limit for SageMaker's download of the model from S3, in seconds.
    # The time limit until the container is healthy, in seconds. It includes the download of a hub model.
    startup_timeout: Seconds = 1800
    # After this many seconds, the container ends an answer or a stream with the text so far. 0: no deadline.
    # SageMaker itself ends an answer after 60 s and drops it. It ends a stream after 8 minutes. Asynchronous endpoints
    # have no deadlines.
    answer_deadline: Deadline = 55
    stream_deadline: Deadline = 450
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: tuple[AdapterComponent, ...] = ()
    autoscaling: Autoscaling | None = None
    asynchronous: Asynchronous | None = field(name="async", default=None)
    prefix_aware_routing: PrefixAwareRouting | None = None
    data_capture: DataCapture | None = None
    metrics: Metrics = Metrics()
    rollout: Rollout | None = None
    # Additional properties of the template's resources, by the name of the resource. They override the template's own
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
    """The configuration cannot be used. `problems` has one line for each fault."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_file(path: Path) -> dict[str, Any]:
    """Return the values in a TOML file.

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
    """Return the values of command line options, in the form of a file.

    Args:
        options: The value of each option, or None if the option was not given.

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
        # The value is not shown because it may be a credential.
        raise ConfigurationError(f"--{option}: expected NAME=VALUE; the given value has no name or no =")
    return key, text


def _toml(path: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[\w.:/@+,-]+", text):
            return text  # A bare word is text. In TOML, it would need quotes inside the shell's quotes.
    raise ConfigurationError(f'--set {path}: expected a TOML value, such as 4, true, "text" or ["a", "b"]')


def merge_tables(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, overridden by `over`.

    Tables are merged. If `values` has a list with a single table, a table of `over` is merged with that table, and
    the list stays a list.
    """
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
    """Read and check all fields, and as many of the container's settings as can be checked here.

    Raises:
        ConfigurationError: A field is missing, unknown or invalid, or two fields contradict each other. The error lists
            all faults. Contradictions are checked only if every field is valid.
    """
    problems: list[str] = []
    rest = copy.deepcopy(dict(values))
    while True:
        try:
            read = msgspec.convert(rest, Configuration)
            break
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            problem, goes_on = _without_fault(rest, message, _PARTS.findall(path.rstrip("`")))
            problems.append(problem)
            if not goes_on:
                break
    if not problems:
        problems += _problems(read)
    problems += setting_faults_of(values)[0]
    if problems:
        raise ConfigurationError(*dict.fromkeys(problems))
    return read


def setting_faults_of(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the problems and warnings of the settings in `env` and in a local model directory."""
    env, model, upload = values.get("env", {}), values.get("model"), values.get("upload")
    if not isinstance(env, dict) or not all(isinstance(value, Text) for value in env.values()):
        return [], []  # `env` is invalid, which `read_configuration` reports.
    directory = Path(upload) if isinstance(upload, str) and os.path.isdir(upload) else None
    is_elsewhere = directory is None and isinstance(model, str) and model.startswith("s3://")
    has_code = is_elsewhere or (directory is not None and any(directory.rglob("*.py")))
    known = {name: text for name, text in _as_text(env).items() if _RESOLVED not in text}
    return setting_faults(known, directory, has_code=has_code)


_PARTS = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_FIELD = re.compile("`(.*)`", re.DOTALL)


def _without_fault(values: dict[str, Any], message: str, path: list[tuple[str, str]]) -> tuple[str, bool]:
    """Return the message for one of msgspec's validation errors, and amend `values` so that the next error is found.

    Args:
        path: The path of the value: names of fields, and indices in lists.

    Returns:
        The message, and whether the values could be amended.
    """
    place = "".join(f".{name}" if name else f"[{index}]" for name, index in path).removeprefix(".")
    if message.startswith(("Object contains unknown field", "Object missing required field")):
        path = [*path, (_FIELD.findall(message)[0], "")]
        place = f"{place}.{path[-1][0]}" if place else path[-1][0]
    inner: Any = values
    holder, fields, found = inner, {}, None
    kind: Any = Configuration
    for name, index in path:
        if index:  # If a value inside a list or a table is invalid, the whole field is removed.
            if not index.isdigit() or (name, index) == path[-1]:
                break
            inner, kind = inner[int(index)], get_args(kind)[0]
            continue
        holder, fields = inner, {field.encode_name: field for field in msgspec.structs.fields(kind)}
        if (found := fields.get(name)) is None:
            del holder[name]
            meant = closest(name, fields, 0.6)
            hint = f"did you mean {meant}?" if meant else f"expected one of {', '.join(fields)}"
            return f"{place}: there is no such field; {hint}", True
        inner, kind = holder.get(name), _plain(found.type)
    assert found is not None, "a configuration is a table"
    missing = message.startswith("Object missing")
    meta = next((part for part in _parts_of(found.type) if isinstance(part, Meta)), Meta())
    words = f"{place}: {'missing; ' if missing else ''}expected {meta.description or _expected(found.type, meta)}"
    if not missing and not found.required:
        del holder[found.encode_name]
        return words, True
    example = (meta.examples or [meta.ge if meta.ge is not None else 1])[0]
    example = "text" if _plain(found.type) is str and not meta.examples else example
    amended = holder.get(found.encode_name) != example
    holder[found.encode_name] = example
    return words, amended


def _parts_of(kind: Any) -> list[Any]:
    """Return a type and all its type arguments, recursively."""
    return [kind, *(part for argument in get_args(kind) for part in _parts_of(argument))]


def _plain(kind: Any) -> Any:
    """Return a field's type without None and without its bounds."""
    while get_origin(kind) in (Annotated, types.UnionType, Union):
        kind = get_args(kind)[0]
    return kind


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a table", tuple: "a list"}


def _expected(kind: Any, meta: Meta) -> str:
    """Return the allowed values of a field that has no description."""
    plain = _plain(kind)
    words = _WORDS.get(get_origin(plain) or plain, "a table")
    if meta.gt is not None:
        return f"{words} above {meta.gt}"
    if meta.ge is None:
        return words
    return f"{words} of at least {meta.ge}" if meta.le is None else f"{words} from {meta.ge} to {meta.le}"


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
    if (capacity := read.capacity) and capacity.scale_in != "consolidation":
        for name in ("scale_in_step", "scale_in_cooldown"):
            if getattr(capacity, name) is not None:
                yield f'capacity.{name}: expected capacity.scale_in = "consolidation", too'
    if read.component and (most := read.component.max_memory_mb) and most < read.component.memory_mb:
        yield f"component.max_memory_mb is {most}; expected at least memory_mb, which is {read.component.memory_mb}"
    if read.adapters and not read.component:
        yield "adapters: expected a [component] table, too: an adapter is an inference component on top of another one"
    for number, adapter in enumerate(read.adapters):
        if len(component := f"{read.name}-{adapter.name}") > _MAX_NAME:
            yield f"adapters[{number}].name: the component {component} would have more than {_MAX_NAME} characters"
    if len({adapter.resource_name for adapter in read.adapters}) < len(read.adapters):
        yield "adapters has a name twice; expected names that differ in more than hyphens and capitals"


def _refused_by_sagemaker(read: Configuration) -> Iterator[str]:
    """Yield a line for each combination that SageMaker or CloudFormation refuses or ignores."""
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
    """Return the properties that the field `properties` adds to the variants of the endpoint."""
    given = read.properties.get("EndpointConfiguration", {}).get("ProductionVariants")
    return [variant for variant in (given if isinstance(given, list) else [given]) if isinstance(variant, Mapping)]
