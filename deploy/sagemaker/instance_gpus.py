"""The GPUs of SageMaker's instance types, and the plan for a model on them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from container.models.placement import gpu_plan, hub_asked_once
from container.settings.load import load_startup
from container.settings.settings import SettingsError, Startup
from deploy.sagemaker.configuration import Configuration

_MEBIBYTE = 1 << 20
_ONE = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "16xlarge": 1}
_FOUR_OR_EIGHT = {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
_ONE_TO_EIGHT = {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}
# By instance family: the MiB per GPU, and the number of GPUs for each size. The numbers are `GpuInfo` from EC2's
# DescribeInstanceTypes, as listed in Karpenter's documentation of instance types in August 2026. The numbers for P3 are
# from SageMaker's Python SDK (`instance_gpu_info.json`). Drivers report a few percent less.
_FAMILIES: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "g4dn": (16_384, _ONE | {"12xlarge": 4}),
    "g5": (22_888, _ONE | _FOUR_OR_EIGHT),
    "g6": (22_888, _ONE | _FOUR_OR_EIGHT),
    "gr6": (22_888, {"4xlarge": 1, "8xlarge": 1}),
    "g6e": (45_776, _ONE | _FOUR_OR_EIGHT),
    "g7": (32_768, _ONE_TO_EIGHT),
    "g7e": (98_304, _ONE_TO_EIGHT),
    "p3": (16_384, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "p3dn": (32_768, {"24xlarge": 8}),
    "p4d": (40_960, {"24xlarge": 8}),
    "p4de": (81_920, {"24xlarge": 8}),
    "p5": (81_920, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": (144_384, {"48xlarge": 8}),
    "p5en": (144_384, {"48xlarge": 8}),
    "p6-b200": (183_359, {"48xlarge": 8}),
    "p6-b300": (275_040, {"48xlarge": 8}),
}
INSTANCE_GPUS: Mapping[str, tuple[int, ...]] = {
    f"ml.{family}.{size}": (mebibytes * _MEBIBYTE,) * count
    for family, (mebibytes, sizes) in _FAMILIES.items()
    for size, count in sizes.items()
}
"""The bytes of each GPU, by the instance type."""


def plan_lines(configuration: Configuration, *, reads_s3: bool) -> Iterator[str]:
    """Yield a description of the plan for an instance's GPUs, or the reason why the plan is unknown.

    The settings are read as the container would read them. The sizes of a hub's model are read from the hub.

    Args:
        reads_s3: Whether a model on S3 may be read.
    """
    gpus = INSTANCE_GPUS.get(configuration.instance_type or "")
    if gpus is not None and configuration.component is not None:
        gpus = gpus[: configuration.component.gpus]
    if gpus is None:
        why = (
            f"those of {configuration.instance_type} are not known" if configuration.instance_type else "several types"
        )
    elif configuration.upload or not configuration.from_s3:
        why = ""
    else:
        why = "the model is in an archive" if configuration.is_archive else "" if reads_s3 else "the model is on S3"
    if why or not gpus:
        yield from [f"slipway: note: no plan of the GPUs: {why}"] if why else []
        return
    try:
        startup = _startup(configuration, len(gpus))
    except SettingsError as error:
        yield from (f"slipway: note: no plan of the GPUs: {problem}" for problem in error.problems)
        return
    os.environ.update(startup.exports)  # The libraries that read from the hub need these variables.
    models = [model.settings for model in startup.models]
    with hub_asked_once(models) as note:
        if note:
            yield f"slipway: note: {note}"
        plan = gpu_plan(models, gpus)
    yield f"the plan for {'a copy of the component' if configuration.component else configuration.instance_type}:"
    yield from (f"  {line}" for line in plan.lines)
    if plan.warning:
        yield f"  warning: {plan.warning}"


def _startup(configuration: Configuration, gpus: int) -> Startup:
    """Read the settings as the container would, with the model in the directory to upload, on S3 or on the hub."""
    environ = {name: os.environ[name] for name in ("HOME", "SLIPWAY_CACHE_DIR") if name in os.environ}
    environ |= {} if configuration.from_s3 else {"HF_MODEL_ID": configuration.model}
    environ |= configuration.environment
    if place := configuration.upload or (configuration.model if configuration.from_s3 else ""):
        return load_startup(place, environ, {}, gpus)
    with tempfile.TemporaryDirectory(prefix="slipway-") as empty:
        return load_startup(Path(empty), environ, {}, gpus)
