"""Which fields of a configuration go together. Each problem names the field, its value and what was expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from container.settings.aliases import ALIASES, VLLM_PREFIX
from container.settings.parsers import TRUE
from deploy.sagemaker import cuda, images, instances
from deploy.sagemaker.configuration import Configuration, Rollout
from deploy.sagemaker.naming import LONGEST_SAGEMAKER_NAME, adapter_component

_HUB_ID = "HF_MODEL_ID"
_SET_BY_DEPLOY = frozenset(
    {_HUB_ID, f"{VLLM_PREFIX}MODEL", *(alias.variable for alias in ALIASES if alias.target == _HUB_ID)}
)
_GOES_BEFORE_IT = frozenset({"OPTION_MODEL_ID"})
"""With a model from S3 it can name a directory below /opt/ml/model, as in LMI; else it is another model."""
_LEAST_LINEAR_STEP = 10
"""Per cent; canary and rolling steps may be smaller (the service model's TrafficRoutingConfig)."""
_LORA = ("OPTION_ENABLE_LORA", f"{VLLM_PREFIX}ENABLE_LORA")


def problems_of(configuration: Configuration) -> list[str]:
    """All that is wrong with fields which are right by themselves."""
    return [
        *_source(configuration),
        *_image(configuration),
        *_volume(configuration),
        *_scaling(configuration),
        *_components(configuration),
        *_asynchronous(configuration),
        *_routing(configuration),
        *_rollout(configuration.rollout),
    ]


def _source(configuration: Configuration) -> Iterator[str]:
    if configuration.network_isolation and not configuration.from_s3:
        yield (
            f'model is "{configuration.model}"; expected an s3:// location, as network_isolation keeps the container '
            "from reaching a hub"
        )
    unwanted = _SET_BY_DEPLOY if configuration.from_s3 else _SET_BY_DEPLOY | _GOES_BEFORE_IT
    for name in sorted(unwanted & configuration.env.keys()):
        yield f"env.{name} is set; expected no such variable: the field model says which model it is"
    if configuration.accept_eula and not configuration.from_s3:
        yield "accept_eula is true; expected false for a model that does not come from S3"


def _image(configuration: Configuration) -> Iterator[str]:
    found = images.ecr_image(configuration.image)
    if found is None and configuration.vpc is None:
        yield (
            f'image is "{configuration.image}"; expected an image in ECR (<account>.dkr.ecr.<region>.amazonaws.com/'
            "...): SageMaker takes other registries only through a vpc"
        )
    if found is not None and found.region != configuration.region:
        yield f"image is in {found.region}; expected one in {configuration.region}, the region of the endpoint"
    for instance_type in configuration.instance_types:
        try:
            cuda.machine_image(configuration.cuda or cuda.cuda_of_image(configuration.image), instance_type)
        except cuda.NoMachineImage as error:
            yield f'instance_type is "{instance_type}"; {error}'


def _volume(configuration: Configuration) -> Iterator[str]:
    if configuration.volume_gb is None:
        return
    for instance_type in configuration.instance_types:
        if not instances.takes_a_volume(instance_type):
            yield (
                f"volume_gb is {configuration.volume_gb}; expected none, as {instance_type} has disks of its own and "
                "SageMaker attaches no volume to it"
            )


def _scaling(configuration: Configuration) -> Iterator[str]:
    scaling, capacity = configuration.autoscaling, configuration.capacity
    if scaling and scaling.minimum == 0 and not configuration.component and not configuration.asynchronous:
        yield (
            "autoscaling.min is 0; expected at least 1: only inference components (a [component] table) and "
            "asynchronous endpoints scale to zero"
        )
    if capacity and not configuration.component:
        yield "capacity is set; expected a [component] table beside it: only inference components have it"
    if scaling and scaling.minimum == 0 and configuration.component and (capacity is None or capacity.minimum > 0):
        yield "capacity.min is not 0; expected 0, as autoscaling.min is 0: no instance is released otherwise"
    if scaling and not configuration.component and not scaling.minimum <= configuration.instances <= scaling.maximum:
        yield (
            f"instances is {configuration.instances}; expected a number from autoscaling.min to autoscaling.max, "
            f"which are {scaling.minimum} and {scaling.maximum}"
        )
    if capacity and not max(capacity.minimum, 1) <= configuration.instances <= capacity.maximum:
        yield (
            f"instances is {configuration.instances}; expected a number from capacity.min to capacity.max, "
            f"which are {capacity.minimum} and {capacity.maximum}"
        )


def _components(configuration: Configuration) -> Iterator[str]:
    component = configuration.component
    if configuration.adapters and component is None:
        yield "adapters is set; expected a [component] table beside it: an adapter is a component on another"
    on = any(configuration.env.get(name, "").strip().lower() in TRUE for name in _LORA)
    if configuration.adapters and not on and not configuration.from_s3:
        yield (
            f"adapters is set; expected {_LORA[0]} = true in env beside it: without it, and with no serving.properties "
            "beside the model, the container takes no adapters"
        )
    for name, count in Counter(adapter.name for adapter in configuration.adapters).items():
        full = adapter_component(configuration.name, name)
        if count > 1:
            yield f'adapters has the name "{name}" {count} times; expected different names'
        if len(full) > LONGEST_SAGEMAKER_NAME:
            yield f'adapters has "{name}"; expected at most {LONGEST_SAGEMAKER_NAME} characters in "{full}"'
    if component is None:
        return
    for instance_type in configuration.instance_types:
        has = configuration.gpus if configuration.gpus is not None else instances.gpus(instance_type)
        if has is None and component.gpus is None:
            yield f"component.gpus: missing; expected a number, as the GPUs of {instance_type} are not known here"
        if component.gpus and has is not None and component.gpus > has:
            yield f"component.gpus is {component.gpus}; expected at most {has}, which {instance_type} has"


def _asynchronous(configuration: Configuration) -> Iterator[str]:
    if configuration.asynchronous and configuration.component:
        yield "async is set; expected no [component] table beside it: SageMaker has no asynchronous components"


def _routing(configuration: Configuration) -> Iterator[str]:
    if configuration.prefix_length is not None and configuration.routing != "PREFIX_AWARE":
        yield f'prefix_length is set; expected routing "PREFIX_AWARE" beside it, not "{configuration.routing}"'


def _rollout(rollout: Rollout) -> Iterator[str]:
    if rollout.strategy == "linear" and rollout.step_percent < _LEAST_LINEAR_STEP:
        yield (
            f"rollout.step_percent is {rollout.step_percent}; expected at least {_LEAST_LINEAR_STEP}, which SageMaker "
            'asks of the strategy "linear"'
        )
