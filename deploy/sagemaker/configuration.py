"""What to deploy, and how: plain immutable data. `configuration_reader` makes it of a file and a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.sagemaker.naming import role_name
from deploy.sagemaker.partitions import partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Instances of one type, taken in order of `priority` (1: first) as far as there is capacity."""

    instance_type: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vpc:
    """The network of the containers."""

    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Requests and answers are kept in S3."""

    destination: str
    percent: int
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What SageMaker publishes to CloudWatch, every `period` seconds."""

    detailed: bool = True
    """Scrape the container's Prometheus metrics, and publish those of each GPU and instance."""
    enhanced: bool = False
    period: int = 60
    path: str = "/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many instances SageMaker may hold for inference components (managed instance scaling)."""

    minimum: int
    maximum: int
    strategy: str | None = None
    """"IDLE_RELEASE" or "CONSOLIDATION"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The model as an inference component: what one copy takes of an instance."""

    copies: int = 1
    gpus: int | None = None
    """None: all of the instance's."""
    cpus: float | None = None
    memory_mb: int = 1024
    """Of the host, reserved for a copy."""
    cache: bool = True
    """Keep the image and the model on instances, for faster scale-out."""
    placement: str | None = None
    """"SPREAD" or "BINPACK"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter as an inference component on top of the model's."""

    name: str
    source: str
    """An archive in S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Instances (or copies of the component) follow the load."""

    minimum: int
    maximum: int
    target: float
    """Concurrent requests for each instance or copy; waiting requests for each instance of an asynchronous endpoint."""
    scale_in_cooldown: int = 300
    scale_out_cooldown: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """Requests and answers go through S3."""

    output: str
    failure: str | None = None
    concurrency: int | None = None
    """For each instance at a time."""
    success_topic: str | None = None
    error_topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How an update replaces what runs, and the alarms that take it back."""

    strategy: str = "blue-green"
    """"blue-green" (all at once), "canary", "linear" or "rolling"."""
    step_percent: int = 50
    wait: int = 300
    """Seconds between steps, and before the old ones end."""
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One deployment. `configuration_checks` says which fields go together."""

    name: str
    model: str
    """A hub id, or an s3:// prefix or archive."""
    image: str
    """With `push`, it is made of the account, the region and `repository`."""
    region: str
    account: str
    role: str
    """ARN of the execution role; with `create_role`, of the one that will be made."""
    instance_type: str | None = None
    pools: tuple[Pool, ...] = ()
    instances: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    create_role: bool = False
    push: str | None = None
    """A local image that is pushed to `repository` first."""
    repository: str = "slipway"
    cuda: tuple[int, int] | None = None
    ami: str | None = None
    gpus: int | None = None
    model_size_gb: float | None = None
    download_timeout: int | None = None
    startup_timeout: int | None = None
    provision_timeout: int | None = None
    volume_gb: int | None = None
    kms_key: str | None = None
    routing: str = "LEAST_OUTSTANDING_REQUESTS"
    prefix_length: int | None = None
    network_isolation: bool = False
    accept_eula: bool = False
    reservation: str | None = None
    """ARN of a capacity reservation."""
    ssm: bool = False
    vpc: Vpc | None = None
    capture: Capture | None = None
    metrics: Metrics = Metrics()
    capacity: Capacity | None = None
    component: Component | None = None
    adapters: tuple[Adapter, ...] = ()
    autoscaling: Autoscaling | None = None
    asynchronous: Asynchronous | None = None
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
    def from_s3(self) -> bool:
        """SageMaker downloads the model, not the container."""
        return self.model.startswith("s3://")


def made_role_arn(account: str, region: str, name: str) -> str:
    """ARN of the role that `create_role` makes."""
    return f"arn:{partition(region)}:iam::{account}:role/{role_name(name)}"
