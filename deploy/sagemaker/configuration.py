"""What to deploy, and how: the fields of a configuration file or of the command line, and how they are checked."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, field

from container.settings.aliases import ALIASES, VLLM_PREFIX
from container.settings.parsers import TRUE
from container.settings.properties import quoted
from deploy.sagemaker import instances
from deploy.sagemaker.instances import Version
from deploy.sagemaker.uploads import ECR_REPOSITORY, ecr_image, pushed_image

LONGEST_NAME = 48
"""Characters of an endpoint's name. SageMaker's names have up to 63, and an adapter's name follows."""
LONGEST_SAGEMAKER_NAME = 63


_NAME = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_S3 = r"s3://[^/\s]+(/\S*)?"
_PERIODS = (10, 30, 60, 120, 180, 240, 300)
"""Seconds between two publications of metrics, as SageMaker has them."""
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]+")
_ARCHIVE = re.compile(r"\.(tar\.gz|tgz|tar)$")


def _text(pattern: str, description: str) -> Meta:
    """Text that matches as a whole."""
    return Meta(pattern=rf"^({pattern})\Z", description=description)


def _one_of(*choices: str) -> Meta:
    return _text("|".join(choices), f"one of {', '.join(choices)}")


EndpointName = Annotated[
    str,
    _text(
        rf"(?=.{{1,{LONGEST_NAME}}}\Z){_NAME}",
        f"letters, digits and hyphens, at most {LONGEST_NAME}, with no hyphen at either end",
    ),
]
Model = Annotated[str, _text(rf"{_S3}|[\w][\w.-]*(/[\w][\w.-]*)?", "a hub id such as org/model, or an s3:// prefix")]
Image = Annotated[str, _text(r"\S{1,255}", "an image reference without blanks")]
LocalImage = Annotated[str, _text(r"[^\s@-][^\s@]*", "a local image such as slipway:gpu")]
Repository = Annotated[str, _text(rf"(?=.{{2,256}}\Z){ECR_REPOSITORY}", "a repository name of ECR")]
Region = Annotated[str, _text(r"[a-z]{2,8}(-[a-z0-9]+)+", "a region such as eu-west-1 (also AWS_REGION)")]
Account = Annotated[str, _text(r"\d{12}", "twelve digits")]
_ROLE = ("the ARN of an IAM role, arn:aws:iam::<account>:role/<name>", r"arn:aws[a-z-]*:iam::\d{12}:role/")
Role = Annotated[str, _text(rf"{_ROLE[1]}[\w+=,.@/-]+", _ROLE[0])]
Roles = Annotated[str, _text(rf"{_ROLE[1]}[\w+=,.@/*-]+", _ROLE[0])]
"""A policy may be for several roles, such as `role/slipway-*`."""
InstanceType = Annotated[str, _text(instances.TYPE.pattern, "an instance type such as ml.g6e.xlarge")]
Cuda = Annotated[str, _text(r"\d{1,2}\.\d{1,2}", "a version such as 13.0")]
MachineImage = Annotated[str, _text(r"[a-z0-9-]+", "an InferenceAmiVersion")]
Key = Annotated[str, _text(r"[a-zA-Z0-9:/_-]{1,2048}", "a KMS key's id, ARN or alias")]
Reservation = Annotated[
    str,
    _text(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:[a-z0-9-]{1,14}/.+", "the ARN of a capacity reservation"),
]
S3Prefix = Annotated[str, _text(_S3, "an s3:// prefix")]
S3Archive = Annotated[str, _text(r"s3://[^/\s]+/\S+\.tar\.gz", "an s3:// archive that ends in .tar.gz")]
Topic = Annotated[str, _text(r"arn:aws[a-z-]*:sns:[a-z0-9-]*:\d{12}:[\w.-]+", "the ARN of an SNS topic")]
NetworkId = Annotated[str, _text(r"[-0-9a-zA-Z]{1,32}", "the id of a subnet or security group")]
AlarmName = Annotated[str, _text(r"\S.{0,254}", "an alarm's name")]
VariableName = Annotated[str, _text(r"[a-zA-Z_][a-zA-Z0-9_]{0,1023}", "a variable's name")]
TagKey = Annotated[str, _text(r"(?!aws:|slipway:)[\w\s.:/=+@-]{1,128}", "a tag's key")]
Positive = Annotated[float, Meta(gt=0, le=1e9, description="a number above 0")]
Seconds = Annotated[int, Meta(ge=instances.SHORTEST_TIMEOUT, le=instances.LONGEST_TIMEOUT)]
Cooldown = Annotated[int, Meta(ge=0, le=86400)]


class _Table(msgspec.Struct, frozen=True):
    """A table of the configuration file."""


class Pool(_Table, frozen=True, kw_only=True):
    """Instances of one type, taken in order of `priority` (1: first) as far as there is capacity."""

    instance_type: InstanceType
    priority: Annotated[int, Meta(ge=1, le=5)] = 1


class Vpc(_Table, frozen=True, kw_only=True):
    """The network of the containers."""

    subnets: Annotated[tuple[NetworkId, ...], Meta(min_length=1, max_length=16)]
    security_groups: Annotated[tuple[NetworkId, ...], Meta(min_length=1, max_length=5)]


class Capture(_Table, frozen=True, kw_only=True):
    """Requests and answers are kept in S3."""

    destination: S3Prefix
    percent: Annotated[int, Meta(ge=0, le=100)] = 100
    mode: Annotated[str, _one_of("input", "output", "both")] = "both"


class Metrics(_Table, frozen=True, kw_only=True):
    """What SageMaker publishes to CloudWatch, every `period` seconds."""

    detailed: bool = True
    """Scrape the container's Prometheus metrics, and publish those of each GPU and instance."""
    enhanced: bool = False
    period: Annotated[int, Meta(description=f"one of {', '.join(map(str, _PERIODS))}")] = 60


class Capacity(_Table, frozen=True, kw_only=True):
    """How many instances SageMaker may hold for inference components (managed instance scaling)."""

    minimum: Annotated[int, Meta(ge=0)] = field(name="min")
    maximum: Annotated[int, Meta(ge=1)] = field(name="max")
    strategy: Annotated[str, _one_of("IDLE_RELEASE", "CONSOLIDATION")] | None = None


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
    success_topic: Topic | None = None
    error_topic: Topic | None = None


class Rollout(_Table, frozen=True, kw_only=True):
    """How an update replaces what runs, and the alarms that take it back."""

    strategy: Annotated[str, _one_of("blue-green", "canary", "linear", "rolling")] = "blue-green"
    """"blue-green" shifts all traffic at once."""
    step_percent: Annotated[int, Meta(ge=5, le=50)] = 50
    wait: Annotated[int, Meta(ge=0, le=3600)] = 300
    """Seconds between steps, and before the old ones end."""
    alarms: Annotated[tuple[AlarmName, ...], Meta(min_length=1, max_length=10)] = ()


class Configuration(_Table, frozen=True, kw_only=True):
    """One deployment, as `read_configuration` gives it: checked, and with what follows from other fields filled in."""

    model: Model
    """A hub id, or an s3:// prefix or archive."""
    region: Region
    name: EndpointName = ""
    """Of the endpoint; by default from the model."""
    image: Image = ""
    """With `push`, it is made of the account, the region and `repository`."""
    push: LocalImage | None = None
    """A local image that is pushed to `repository` first."""
    repository: Repository = "slipway"
    upload: Annotated[str, Meta(min_length=1, description="a local directory")] | None = None
    """A local directory that is uploaded to the prefix `model` first."""
    role: Role | None = None
    """The execution role; None with `create_role`, which has it made."""
    create_role: bool = False
    account: Account | None = None
    instance_type: InstanceType | None = None
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=5)] = ()
    instances: Annotated[int, Meta(ge=1, le=1000)] = 1
    env: Annotated[dict[VariableName, str], Meta(max_length=90)] = {}
    tags: Annotated[dict[TagKey, str], Meta(max_length=40)] = {}
    cuda: Cuda | None = None
    ami: MachineImage | None = None
    gpus: Annotated[int, Meta(ge=1, le=64)] | None = None
    model_size_gb: Positive | None = None
    download_timeout: Seconds | None = None
    startup_timeout: Seconds | None = None
    provision_timeout: Annotated[int, Meta(ge=300, le=3600)] | None = None
    volume_gb: Annotated[int, Meta(ge=1, le=512)] | None = None
    kms_key: Key | None = None
    routing: Annotated[str, _one_of("LEAST_OUTSTANDING_REQUESTS", "RANDOM", "PREFIX_AWARE")] = (
        "LEAST_OUTSTANDING_REQUESTS"
    )
    prefix_length: Annotated[int, Meta(ge=1024, le=65536)] | None = None
    network_isolation: bool = False
    accept_eula: bool = False
    reservation: Reservation | None = None
    ssm: bool = False
    vpc: Vpc | None = None
    capture: Capture | None = None
    metrics: Metrics = Metrics()
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: Annotated[tuple[Adapter, ...], Meta(min_length=1, max_length=100)] = ()
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
    def main_instance_type(self) -> str:
        """The type that limits are estimated from: the only one, or that of the first pool."""
        return self.instance_types[0]

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
    reader = _Reader(origins or {})
    read = reader.table(Configuration, values, "")
    if read is None:
        raise ConfigurationError(tuple(reader.problems))
    account = read.account or (read.role.split(":")[4] if read.role else None)
    read = msgspec.structs.replace(read, name=read.name or name_from_model(read.model), account=account)
    problems = list(_missing_fields(read))
    if not problems:
        if read.push and account:
            image = pushed_image(read.push, read.repository, account, read.region)
            read = msgspec.structs.replace(read, image=image)
        problems = list(_contradictions(read))
    if problems:
        raise ConfigurationError(tuple(problems))
    return read


def check_fields(**fields: tuple[Any, object]) -> None:
    """Check values that are not of a configuration, each against a type of this module and named by its option.

    Raises:
        ConfigurationError: something is wrong; all that is wrong is listed.
    """
    reader = _Reader({name: f"--{name}" for name in fields})
    for name, (annotation, value) in fields.items():
        if value is not None:
            reader.value(annotation, value, name)
    if reader.problems:
        raise ConfigurationError(tuple(reader.problems))


def name_from_model(model: str) -> str:
    """A deployment's name made of a hub id or an S3 location; empty if nothing in it can be part of a name.

    "meta-llama/Llama-3.1-8B-Instruct" gives "llama-3-1-8b-instruct".
    """
    parts = [part for part in model.removeprefix("s3://").split("/") if part]
    last = _ARCHIVE.sub("", parts[-1]) if parts else ""
    plain = _NOT_IN_NAMES.sub("-", last).strip("-").lower()
    return plain[:LONGEST_NAME].strip("-")


def adapter_component(endpoint: str, adapter: str) -> str:
    """Name of the inference component of an adapter."""
    return f"{endpoint}-{adapter}"


_T = TypeVar("_T", bound=_Table)


class _Reader:
    """Reads tables field by field, so that everything that is wrong is said at once."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self._origins = origins
        self.problems: list[str] = []

    def table(self, kind: type[_T], values: Mapping[str, Any], path: str) -> _T | None:
        """A table of this kind; None if anything in it is wrong. `path` comes before keys: "autoscaling."."""
        before = len(self.problems)
        known = {each.encode_name: each for each in msgspec.structs.fields(kind)}
        found = {}
        for key, each in known.items():
            value = values.get(key)
            if value is not None:
                found[each.name] = self.value(each.type, value, path + key)
            elif each.required:
                self.problems.append(f"{path}{key}: missing; expected {_expected(each.type)}")
        for key in values:
            if key not in known:
                place = _printable(path + key) + self._origin(path + key)
                self.problems.append(f"{place}: there is no such field; there are {', '.join(sorted(known))}")
        return kind(**found) if len(self.problems) == before else None

    def value(self, annotation: Any, value: object, path: str) -> Any:
        """A value of the annotated type; None if it is wrong."""
        bare, _ = _unwrapped(annotation)
        if isinstance(bare, type) and issubclass(bare, _Table) and isinstance(value, Mapping):
            return self.table(bare, value, path + ".")
        if get_origin(bare) is dict and isinstance(value, Mapping):
            return self._texts(annotation, value, path)
        if get_origin(bare) is tuple and isinstance(value, list) and _is_list_of_tables(annotation, value):
            item = get_args(bare)[0]
            return tuple(self.table(item, each, f"{path}[{index}].") for index, each in enumerate(value))
        try:
            return msgspec.convert(value, annotation)
        except msgspec.ValidationError:
            self._refuse(path, value, _expected(annotation))
            return None

    def _texts(self, annotation: Any, value: Mapping[str, Any], path: str) -> dict[str, str]:
        """A table of texts; numbers and truth values are written as a file would have them."""
        bare, meta = _unwrapped(annotation)
        key_type = get_args(bare)[0]
        if len(value) > meta.max_length:
            self.problems.append(f"{path} has {len(value)} entries; expected {_expected(annotation)}")
            return {}
        found: dict[str, str] = {}
        for key, item in value.items():
            text = _as_text(item)
            if text is not None and re.search(key_type.__metadata__[0].pattern, key):
                found[key] = text
            else:
                self._refuse(f"{path}.{key}", item, "a name that is allowed there, and a text, number, true or false")
        return found

    def _refuse(self, path: str, value: object, expected: str) -> None:
        shown = quoted(path, value if isinstance(value, str) else repr(value))
        self.problems.append(f"{_printable(path)} is {shown}{self._origin(path)}; expected {expected}")

    def _origin(self, path: str) -> str:
        return f" ({self._origins[path]})" if path in self._origins else ""


def _unwrapped(annotation: Any) -> tuple[Any, Any]:
    """A field's type without its `None` and its `Meta`, and the `Meta`."""
    if NoneType in get_args(annotation):
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) is Annotated:
        return annotation.__origin__, annotation.__metadata__[0]
    return annotation, Meta()


def _is_list_of_tables(annotation: Any, value: list[Any]) -> bool:
    bare, meta = _unwrapped(annotation)
    item = get_args(bare)[0]
    tables = isinstance(item, type) and issubclass(item, _Table)
    return tables and 0 < len(value) <= meta.max_length and all(isinstance(each, Mapping) for each in value)


def _expected(annotation: Any) -> str:
    """A field's type in words."""
    bare, meta = _unwrapped(annotation)
    if meta.description:
        return str(meta.description)
    if get_origin(bare) is tuple:
        item = get_args(bare)[0]
        of = " tables" if isinstance(item, type) and issubclass(item, _Table) else f": {_expected(item)}"
        return f"a list of 1 to {meta.max_length}{of}"
    if get_origin(bare) is dict:
        return f"a table of at most {meta.max_length} entries"
    if bare is int:
        return f"a whole number from {meta.ge} " + ("on" if meta.le is None else f"to {meta.le}")
    return {bool: "true or false", str: "text"}.get(bare, "a table")


def _as_text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if "\x00" not in value else None
    return str(value) if isinstance(value, int | float) else None


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


def _missing_fields(read: Configuration) -> Iterator[str]:
    """Fields of which exactly one is needed."""
    if not read.name:
        yield f"name: missing; expected {_expected(EndpointName)}"
    if not read.role and not read.create_role:
        yield "role: missing; expected the ARN of an execution role, or create_role = true"
    if read.role and read.create_role:
        yield f'role is "{read.role}"; expected none, as create_role is true'
    if not read.image and not read.push:
        yield "image: missing; expected an image reference, or push with a local image"
    if read.image and read.push:
        yield (
            f'image is "{read.image}"; expected none, as push makes it of the account, the region and the repository'
        )
    if read.push and not read.account:
        yield "account: missing; expected twelve digits, or a role's ARN, which names the account"
    if not read.pools and not read.instance_type:
        yield f"instance_type: missing; expected {_expected(InstanceType)}"
    if read.pools and read.instance_type:
        yield f'instance_type is "{read.instance_type}"; expected none, as there are pools'


def _contradictions(read: Configuration) -> Iterator[str]:
    """Fields that are right by themselves and do not go together."""
    yield from _wrong_model(read)
    yield from _wrong_image(read)
    yield from _wrong_scaling(read)
    yield from _wrong_components(read)
    if read.volume_gb is not None:
        for instance_type in read.instance_types:
            if not instances.takes_a_volume(instance_type):
                yield (
                    f"volume_gb is {read.volume_gb}; expected none, as {instance_type} has disks of its own and "
                    "SageMaker attaches no volume to it"
                )
    if read.metrics.period not in _PERIODS:
        yield f'metrics.period is "{read.metrics.period}"; expected one of {", ".join(map(str, _PERIODS))}'
    if read.asynchronous and read.component:
        yield "async is set; expected no [component] table beside it: SageMaker has no asynchronous components"
    if read.prefix_length is not None and read.routing != "PREFIX_AWARE":
        yield f'prefix_length is set; expected routing "PREFIX_AWARE" beside it, not "{read.routing}"'
    if read.rollout.strategy == "linear" and read.rollout.step_percent < _LEAST_LINEAR_STEP:
        yield (
            f"rollout.step_percent is {read.rollout.step_percent}; expected at least {_LEAST_LINEAR_STEP}, which "
            'SageMaker asks of the strategy "linear"'
        )


_LEAST_LINEAR_STEP = 10
"""Per cent; canary and rolling steps may be smaller (SageMaker's API reference, TrafficRoutingConfig)."""
_HUB_ID = "HF_MODEL_ID"
_SET_BY_DEPLOY = frozenset(
    {_HUB_ID, f"{VLLM_PREFIX}MODEL", *(alias.variable for alias in ALIASES if alias.target == _HUB_ID)}
)
_GOES_BEFORE_IT = frozenset({"OPTION_MODEL_ID"})
"""With a model from S3 it can name a directory below /opt/ml/model, as in LMI; else it is another model."""
_LORA = ("OPTION_ENABLE_LORA", f"{VLLM_PREFIX}ENABLE_LORA")


def _wrong_model(read: Configuration) -> Iterator[str]:
    if read.network_isolation and not read.from_s3:
        yield (
            f'model is "{read.model}"; expected an s3:// location, as network_isolation keeps the container from '
            "reaching a hub"
        )
    unwanted = _SET_BY_DEPLOY if read.from_s3 else _SET_BY_DEPLOY | _GOES_BEFORE_IT
    for name in sorted(unwanted & read.env.keys()):
        yield f"env.{name} is set; expected no such variable: the field model says which model it is"
    if read.accept_eula and not read.from_s3:
        yield "accept_eula is true; expected false for a model that does not come from S3"
    if read.upload and (read.is_archive or not read.from_s3):
        yield f'upload is set; expected an s3:// prefix as model, to which it is uploaded, not "{read.model}"'


def _wrong_image(read: Configuration) -> Iterator[str]:
    found = ecr_image(read.image)
    if found is None and read.vpc is None:
        yield (
            f'image is "{read.image}"; expected an image in ECR (<account>.dkr.ecr.<region>.amazonaws.com/...): '
            "SageMaker takes other registries only through a vpc"
        )
    if found is not None and found.region != read.region:
        yield f"image is in {found.region}; expected one in {read.region}, the region of the endpoint"
    for instance_type in read.instance_types:
        try:
            instances.machine_image(read.cuda_version, instance_type)
        except instances.NoMachineImage as error:
            yield f'instance_type is "{instance_type}"; {error}'


def _wrong_scaling(read: Configuration) -> Iterator[str]:
    scaling, capacity = read.autoscaling, read.capacity
    for name, ends in (("autoscaling", scaling), ("capacity", capacity)):
        if ends and ends.minimum > ends.maximum:
            yield f'{name}.max is "{ends.maximum}"; expected at least min, which is {ends.minimum}'
    if scaling and scaling.minimum == 0 and not read.component and not read.asynchronous:
        yield (
            "autoscaling.min is 0; expected at least 1: only inference components (a [component] table) and "
            "asynchronous endpoints scale to zero"
        )
    if capacity and not read.component:
        yield "capacity is set; expected a [component] table beside it: only inference components have it"
    if scaling and scaling.minimum == 0 and read.component and (capacity is None or capacity.minimum > 0):
        yield "capacity.min is not 0; expected 0, as autoscaling.min is 0: no instance is released otherwise"
    if scaling and not read.component and not scaling.minimum <= read.instances <= scaling.maximum:
        yield (
            f"instances is {read.instances}; expected a number from autoscaling.min to autoscaling.max, which are "
            f"{scaling.minimum} and {scaling.maximum}"
        )
    if capacity and not max(capacity.minimum, 1) <= read.instances <= capacity.maximum:
        yield (
            f"instances is {read.instances}; expected a number from capacity.min to capacity.max, which are "
            f"{capacity.minimum} and {capacity.maximum}"
        )


def _wrong_components(read: Configuration) -> Iterator[str]:
    component = read.component
    if read.adapters and component is None:
        yield "adapters is set; expected a [component] table beside it: an adapter is a component on another"
    on = any(read.env.get(name, "").strip().lower() in TRUE for name in _LORA)
    if read.adapters and not on and not read.from_s3:
        yield (
            f"adapters is set; expected {_LORA[0]} = true in env beside it: without it, and with no serving.properties "
            "beside the model, the container takes no adapters"
        )
    for plain, count in Counter(adapter.name.replace("-", "").lower() for adapter in read.adapters).items():
        if count > 1:
            yield f'adapters has the name "{plain}" {count} times, hyphens and capitals aside; expected different names'
    for adapter in read.adapters:
        full = adapter_component(read.name, adapter.name)
        if len(full) > LONGEST_SAGEMAKER_NAME:
            yield f'adapters has "{adapter.name}"; expected at most {LONGEST_SAGEMAKER_NAME} characters in "{full}"'
    if component is None:
        return
    for instance_type in read.instance_types:
        has = read.gpus if read.gpus is not None else instances.gpus(instance_type)
        if has is None and component.gpus is None:
            yield f"component.gpus: missing; expected a number, as the GPUs of {instance_type} are not known here"
        if component.gpus and has is not None and component.gpus > has:
            yield f"component.gpus is {component.gpus}; expected at most {has}, which {instance_type} has"
