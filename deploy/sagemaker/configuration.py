"""What to deploy, and how: the fields of a configuration file and of the command line, read and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, field

from container.settings.environment import ALIASES, VLLM_PREFIX
from container.settings.values import TRUE, quoted
from deploy.sagemaker import instances
from deploy.sagemaker.instances import Version
from deploy.sagemaker.uploads import ecr_image, pushed_image

LONGEST_NAME = 48
"""Characters of an endpoint's name. SageMaker's names have up to 63, and an adapter's name follows."""
_LONGEST_SAGEMAKER_NAME = 63

_NAME = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_S3 = r"s3://[^/\s]+(/\S*)?"


def _text(pattern: str, description: str) -> Meta:
    """Text that matches as a whole."""
    return Meta(pattern=rf"^({pattern})\Z", description=description)


EndpointName = Annotated[
    str,
    _text(
        rf"(?=.{{1,{LONGEST_NAME}}}\Z){_NAME}",
        f"letters, digits and hyphens, at most {LONGEST_NAME}, with no hyphen at either end",
    ),
]
Model = Annotated[str, _text(rf"{_S3}|[\w][\w.-]*(/[\w][\w.-]*)?", "a hub id such as org/model, or an s3:// prefix")]
Region = Annotated[str, _text(r"[a-z]{2,8}(-[a-z0-9]+)+", "a region such as eu-west-1 (also AWS_REGION)")]
Account = Annotated[str, _text(r"\d{12}", "twelve digits")]
Role = Annotated[
    str,
    _text(
        r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+",
        "the ARN of an IAM role, arn:aws:iam::<account>:role/<name>",
    ),
]
InstanceType = Annotated[str, _text(instances.TYPE.pattern, "an instance type such as ml.g6e.xlarge")]
Cuda = Annotated[str, _text(r"\d{1,2}\.\d{1,2}", "a version such as 13.0")]
S3Prefix = Annotated[str, _text(_S3, "an s3:// prefix")]
S3Archive = Annotated[str, _text(r"s3://[^/\s]+/\S+\.tar\.gz", "an s3:// archive that ends in .tar.gz")]
VariableName = Annotated[str, _text(r"[a-zA-Z_][a-zA-Z0-9_]*", "a variable's name")]
TagKey = Annotated[str, _text(r"(?!slipway:).+", "a tag's key, which does not begin with slipway:")]
Positive = Annotated[float, Meta(gt=0, le=1e9, description="a number above 0")]
Seconds = Annotated[int, Meta(ge=60, le=3600)]
Cooldown = Annotated[int, Meta(ge=0, le=86400)]


class _Table(msgspec.Struct, frozen=True):
    """A table of the configuration file."""


class Pool(_Table, frozen=True, kw_only=True):
    """Instances of one type, taken in order of `priority` (1: first) as far as there is capacity."""

    instance_type: InstanceType
    priority: Annotated[int, Meta(ge=1, le=5)] = 1


class Vpc(_Table, frozen=True, kw_only=True):
    """The network of the containers."""

    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]


class Capture(_Table, frozen=True, kw_only=True):
    """Requests and answers are kept in S3."""

    destination: S3Prefix
    percent: Annotated[int, Meta(ge=0, le=100)] = 100
    mode: Literal["input", "output", "both"] = "both"


class Metrics(_Table, frozen=True, kw_only=True):
    """What SageMaker publishes to CloudWatch, every `period` seconds."""

    detailed: bool = True
    """Scrape the container's Prometheus metrics, and publish those of each GPU and instance."""
    enhanced: bool = False
    period: Literal[10, 30, 60, 120, 180, 240, 300] = 60


class Capacity(_Table, frozen=True, kw_only=True):
    """How many instances SageMaker may hold for inference components (managed instance scaling)."""

    minimum: Annotated[int, Meta(ge=0)] = field(name="min")
    maximum: Annotated[int, Meta(ge=1)] = field(name="max")
    strategy: Literal["IDLE_RELEASE", "CONSOLIDATION"] | None = None


class Component(_Table, frozen=True, kw_only=True):
    """The model as an inference component: what one copy takes of an instance."""

    copies: Annotated[int, Meta(ge=0)] = 1
    gpus: Annotated[int, Meta(ge=1, le=64)] | None = None
    """None: all of the instance's."""
    cpus: Positive | None = None
    memory_mb: Annotated[int, Meta(ge=128)] = 1024
    """Of the host, reserved for a copy."""
    cache: bool = True
    """Keep the image and the model on instances, for faster scale-out."""


class Adapter(_Table, frozen=True, kw_only=True):
    """A LoRA adapter as an inference component on top of the model's."""

    name: Annotated[str, _text(_NAME, "letters, digits and hyphens")]
    source: S3Archive

    @property
    def resource(self) -> str:
        """Its name in the stack."""
        return "Adapter" + "".join(word.capitalize() for word in self.name.split("-"))

    def component(self, endpoint: str) -> str:
        """Name of its inference component."""
        return f"{endpoint}-{self.name}"


class Autoscaling(_Table, frozen=True, kw_only=True):
    """Instances (or copies of the component) follow the load."""

    minimum: Annotated[int, Meta(ge=0)] = field(name="min")
    maximum: Annotated[int, Meta(ge=1)] = field(name="max")
    target: Positive
    """Concurrent requests for each instance or copy; waiting requests for each instance of an asynchronous endpoint."""
    scale_in_cooldown: Cooldown = 300
    scale_out_cooldown: Cooldown = 60


class Asynchronous(_Table, frozen=True, kw_only=True):
    """Requests and answers go through S3."""

    output: S3Prefix
    failure: S3Prefix | None = None
    concurrency: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """For each instance at a time."""
    success_topic: str | None = None
    error_topic: str | None = None


class Rollout(_Table, frozen=True, kw_only=True):
    """How an update replaces what runs, and the alarms that take it back."""

    strategy: Literal["blue-green", "canary", "linear", "rolling"] = "blue-green"
    """"blue-green" shifts all traffic at once."""
    step_percent: Annotated[int, Meta(ge=5, le=50)] = 50
    wait: Annotated[int, Meta(ge=0, le=3600)] = 300
    """Seconds between steps, and before the old ones end."""
    alarms: tuple[str, ...] = ()


class Configuration(_Table, frozen=True, kw_only=True):
    """One deployment, as `read_configuration` gives it: checked, and with what follows from other fields filled in."""

    model: Model
    """A hub id, or an s3:// prefix or archive."""
    region: Region
    name: EndpointName = ""
    """Of the endpoint; by default from the model."""
    image: str = ""
    """With `push`, it is made of the account, the region and `repository`."""
    push: str | None = None
    """A local image that is pushed to `repository` first."""
    repository: str = "slipway"
    upload: str | None = None
    """A local directory that is uploaded to the prefix `model` first."""
    role: Role | None = None
    """The execution role; None: one is made in the stack."""
    create_role: bool = True
    """Whether a role may be made where none is given."""
    account: Account | None = None
    instance_type: InstanceType | None = None
    pools: tuple[Pool, ...] = ()
    instances: Annotated[int, Meta(ge=1, le=1000)] = 1
    env: dict[VariableName, str] = {}
    tags: dict[TagKey, str] = {}
    cuda: Cuda | None = None
    ami: str | None = None
    gpus: Annotated[int, Meta(ge=1, le=64)] | None = None
    download_timeout: Seconds = 1800
    """For SageMaker, which downloads a model from S3."""
    startup_timeout: Seconds = 1800
    """Until the container is healthy; it downloads a hub model itself."""
    provision_timeout: Annotated[int, Meta(ge=300, le=3600)] | None = None
    volume_gb: Annotated[int, Meta(ge=1, le=512)] | None = None
    kms_key: str | None = None
    routing: Literal["LEAST_OUTSTANDING_REQUESTS", "RANDOM", "PREFIX_AWARE"] = "LEAST_OUTSTANDING_REQUESTS"
    prefix_length: Annotated[int, Meta(ge=1024, le=65536)] | None = None
    network_isolation: bool = False
    accept_eula: bool = False
    reservation: str | None = None
    ssm: bool = False
    vpc: Vpc | None = None
    capture: Capture | None = None
    metrics: Metrics = Metrics()
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: tuple[Adapter, ...] = ()
    autoscaling: Autoscaling | None = None
    asynchronous: Asynchronous | None = field(name="async", default=None)
    rollout: Rollout = Rollout()

    @property
    def instance_types(self) -> tuple[str, ...]:
        """The only type, or those of the pools in the order in which they are tried."""
        if self.instance_type:
            return (self.instance_type,)
        return tuple(pool.instance_type for pool in sorted(self.pools, key=lambda pool: pool.priority))

    @property
    def cuda_version(self) -> Version:
        """CUDA of the image."""
        if self.cuda is None:
            return instances.cuda_of_image(self.image)
        major, minor = self.cuda.split(".")
        return int(major), int(minor)

    @property
    def from_s3(self) -> bool:
        """SageMaker downloads the model, not the container."""
        return self.model.startswith("s3://")

    @property
    def is_archive(self) -> bool:
        """The model is one archive in S3."""
        return self.model.endswith((".tar.gz", ".tgz"))


class ConfigurationError(Exception):
    """The configuration cannot be used; `problems` names each field, its value and what was expected."""

    def __init__(self, *problems: str) -> None:
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
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from None


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of command line options, in the shape of a file; what is None was not given.

    Raises:
        ConfigurationError: a value of --env, --tag or --set has no "=", or is no TOML.
    """
    values = {
        each.name: options[each.name]
        for each in msgspec.structs.fields(Configuration)
        if each.name != "env" and options.get(each.name) is not None
    }
    for option, name in (("env", "env"), ("tag", "tags")):
        if pairs := options.get(option):
            values[name] = dict(_halves(option, pair) for pair in pairs)
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
    """`values` with those of `over` in their place, tables within tables merged."""
    merged = dict(values)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = laid_over(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def read_configuration(values: Mapping[str, Any]) -> Configuration:
    """Read and check all fields.

    Raises:
        ConfigurationError: something is wrong; all that is wrong is listed.
    """
    reader = _Reader()
    read: Configuration = reader.table(Configuration, values)
    if reader.problems:
        raise ConfigurationError(*reader.problems)
    account = read.account or (read.role.split(":")[4] if read.role else None)
    read = msgspec.structs.replace(read, name=read.name or name_from_model(read.model), account=account)
    problems = list(_wrong_choices(read))
    if not problems:
        if read.push and account:
            image = pushed_image(read.push, read.repository, account, read.region)
            read = msgspec.structs.replace(read, image=image)
        problems = [*_wrong_model(read), *_wrong_scaling(read), *_wrong_components(read)]
    if problems:
        raise ConfigurationError(*problems)
    return read


def name_from_model(model: str) -> str:
    """A deployment's name made of a hub id or an S3 location; empty if nothing in it can be part of a name.

    "meta-llama/Llama-3.1-8B-Instruct" gives "llama-3-1-8b-instruct".
    """
    parts = [part for part in model.removeprefix("s3://").split("/") if part]
    last = re.sub(r"\.(tar\.gz|tgz|tar)$", "", parts[-1]) if parts else ""
    plain = re.sub("[^a-zA-Z0-9]+", "-", last).strip("-").lower()
    return plain[:LONGEST_NAME].strip("-")


class _Reader:
    """Reads tables field by field, so that everything that is wrong is said at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def table(self, kind: type[_Table], values: Mapping[str, Any], path: str = "") -> Any:
        """A table of this kind, with None for each field that is wrong; `path` comes before keys: "autoscaling."."""
        known = {each.encode_name: each for each in msgspec.structs.fields(kind)}
        for key in values.keys() - known:
            self.problems.append(
                f"{_printable(path + key)}: there is no such field; there are {', '.join(sorted(known))}"
            )
        found: dict[str, Any] = {}
        for key, each in known.items():
            if values.get(key) is not None:
                found[each.name] = self.value(each.type, values[key], path + key)
            elif each.required:
                found[each.name] = None
                self.problems.append(f"{path}{key}: missing; expected {_expected(each.type)}")
        return kind(**found)

    def value(self, annotation: Any, value: object, path: str) -> Any:
        """A value of the annotated type; None if it is wrong."""
        kind, _ = _unwrapped(annotation)
        if isinstance(kind, type) and issubclass(kind, _Table) and isinstance(value, Mapping):
            return self.table(kind, value, path + ".")
        if get_origin(kind) is tuple and isinstance(value, list):
            return tuple(self.value(get_args(kind)[0], each, f"{path}[{at}]") for at, each in enumerate(value))
        if get_origin(kind) is dict and isinstance(value, Mapping):
            name, text = get_args(kind)
            return {
                self.value(name, key, f"{path}.{key}"): self.value(text, _as_text(item), f"{path}.{key}")
                for key, item in value.items()
            }
        try:
            return msgspec.convert(value, annotation)
        except msgspec.ValidationError:
            shown = quoted(path, value if isinstance(value, str) else repr(value))
            self.problems.append(f"{_printable(path)} is {shown}; expected {_expected(annotation)}")


def _unwrapped(annotation: Any) -> tuple[Any, Meta]:
    """A field's type without its `None` and its `Meta`, and the `Meta`."""
    if NoneType in get_args(annotation):
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__[0]
    return annotation, Meta()


def _expected(annotation: Any) -> str:
    """A field's type in words."""
    kind, meta = _unwrapped(annotation)
    if meta.description:
        return meta.description
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind is int:
        return f"a whole number from {meta.ge} " + ("on" if meta.le is None else f"to {meta.le}")
    return {bool: "true or false", str: "text", tuple: "a list"}.get(get_origin(kind) or kind, "a table")


def _as_text(value: object) -> object:
    """Numbers and truth values of `env` and `tags` as a properties file would have them."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


def _wrong_choices(read: Configuration) -> Iterator[str]:
    """Fields of which exactly one is needed."""
    if not read.name:
        yield f"name: missing; expected {_expected(EndpointName)}"
    if not read.role and not read.create_role:
        yield "role: missing; expected the ARN of an execution role, as create_role is false"
    if not read.image and not read.push:
        yield "image: missing; expected an image reference, or push with a local image"
    if read.image and read.push:
        yield f"image is {quoted('image', read.image)}; expected none, as push says which image it is"
    if read.push and not read.account:
        yield "account: missing; expected twelve digits, or a role's ARN, which names the account"
    if not read.pools and not read.instance_type:
        yield f"instance_type: missing; expected {_expected(InstanceType)}"
    if read.pools and read.instance_type:
        yield f'instance_type is "{read.instance_type}"; expected none, as there are pools'


_HUB_ID = "HF_MODEL_ID"
_MODEL_VARIABLES = frozenset(
    {_HUB_ID, f"{VLLM_PREFIX}MODEL", *(alias.variable for alias in ALIASES if alias.target == _HUB_ID)}
)
"""Variables that name the model, as the field `model` does."""
_LORA = ("OPTION_ENABLE_LORA", f"{VLLM_PREFIX}ENABLE_LORA")


def _wrong_model(read: Configuration) -> Iterator[str]:
    """A model or an image that the endpoint could not use, which would show late or not at all."""
    if read.network_isolation and not read.from_s3:
        yield (
            f'model is "{read.model}"; expected an s3:// location, as network_isolation keeps the container from '
            "reaching a hub"
        )
    # With a model from S3, OPTION_MODEL_ID can name a directory below /opt/ml/model, as in LMI.
    unwanted = _MODEL_VARIABLES if read.from_s3 else _MODEL_VARIABLES | {"OPTION_MODEL_ID"}
    for name in sorted(unwanted & read.env.keys()):
        yield f"env.{name} is set; expected no such variable: the field model says which model it is"
    if read.upload and (read.is_archive or not read.from_s3):
        yield f'upload is set; expected an s3:// prefix as model, to which it is uploaded, not "{read.model}"'
    image = ecr_image(read.image)
    if image is None and read.vpc is None:
        yield (
            f"image is {quoted('image', read.image)}; expected an image in ECR "
            "(<account>.dkr.ecr.<region>.amazonaws.com/...): SageMaker takes other registries only through a vpc"
        )
    if image is not None and image.region != read.region:
        yield f"image is in {image.region}; expected one in {read.region}, the region of the endpoint"
    for instance_type in read.instance_types:
        try:
            instances.machine_image(read.cuda_version, instance_type)
        except instances.NoMachineImage as error:
            yield f'instance_type is "{instance_type}"; {error}'


def _wrong_scaling(read: Configuration) -> Iterator[str]:
    """Limits that AWS would refuse only once the endpoint runs, or that would have no effect."""
    scaling, capacity = read.autoscaling, read.capacity
    for name, ends in (("autoscaling", scaling), ("capacity", capacity)):
        if ends and ends.minimum > ends.maximum:
            yield f'{name}.max is "{ends.maximum}"; expected at least min, which is {ends.minimum}'
    if capacity and not read.component:
        yield "capacity is set; expected a [component] table beside it: only inference components have it"
    if scaling and scaling.minimum == 0:
        if not read.component and not read.asynchronous:
            yield (
                "autoscaling.min is 0; expected at least 1: only inference components (a [component] table) and "
                "asynchronous endpoints scale to zero"
            )
        if read.component and (capacity is None or capacity.minimum > 0):
            yield "capacity.min is not 0; expected 0, as autoscaling.min is 0: no instance is released otherwise"


def _wrong_components(read: Configuration) -> Iterator[str]:
    component = read.component
    if read.asynchronous and component:
        yield "async is set; expected no [component] table beside it: SageMaker has no asynchronous components"
    if read.adapters:
        if component is None:
            yield "adapters is set; expected a [component] table beside it: an adapter is a component on another"
        if not read.from_s3 and not any(read.env.get(name, "").strip().lower() in TRUE for name in _LORA):
            yield (
                f"adapters is set; expected {_LORA[0]} = true in env beside it: without it, and with no "
                "serving.properties beside the model, the container takes no adapters"
            )
        if len({adapter.resource for adapter in read.adapters}) < len(read.adapters):
            yield "adapters has a name twice, hyphens and capitals aside; expected different names"
    for adapter in read.adapters:
        if len(adapter.component(read.name)) > _LONGEST_SAGEMAKER_NAME:
            yield (
                f'adapters has "{adapter.name}"; expected at most {_LONGEST_SAGEMAKER_NAME} characters in '
                f'"{adapter.component(read.name)}"'
            )
    if component is None:
        return
    for instance_type in read.instance_types:
        has = read.gpus if read.gpus is not None else instances.gpus(instance_type)
        if has is None and component.gpus is None:
            yield f"component.gpus: missing; expected a number, as the GPUs of {instance_type} are not known here"
        if component.gpus and has is not None and component.gpus > has:
            yield f"component.gpus is {component.gpus}; expected at most {has}, which {instance_type} has"
