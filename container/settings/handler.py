"""The settings of a customer's handler: its workers, their devices, and its properties."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from container.gpus import allowed_devices, device_groups
from container.settings.lookup import SettingEntry, Sources
from container.settings.options import BY_KEY
from container.sources import location
from engines.settings.declaration import PREFIX
from engines.settings.engine_config import ENVIRONMENT
from handlers.custom.settings import HandlerConfig, PackageConfig

# LMI's own handler for vLLM. It calls the function `handle` of a `model.py`. The engine answers if `handle` does not
# exist or returns None.
SERVICE_FOR_VLLM = "djl_python.lmi_vllm.vllm_async_service"
_DEGREE = re.compile(r"[0-9]{1,9}").fullmatch
_LEAST_IDLE_TIME = 0.01  # Seconds.
_TENSOR_PARALLEL, _PIPELINE_PARALLEL = _PARALLEL = ("tensor_parallel_degree", "pipeline_parallel_degree")


def handler_settings(
    sources: Sources, entry_point: str, function: str, model_id: str, packages: PackageConfig
) -> HandlerConfig | None:
    """Return the handler's settings. If they are invalid, add the reasons to the problems and return None."""
    lookup = sources.lookup
    problems = len(lookup.problems)
    layer = sources.workers()
    handler_config = lookup.read(
        HandlerConfig, layer, sources.variables, entry_point=entry_point, function=function, packages=packages
    )
    _show_other_keys(sources)
    is_hugging_face = _is_hugging_face(sources.model_dir, model_id)
    degrees = _degrees(sources, is_hugging_face)
    devices = _worker_devices(sources, degrees)
    if len(lookup.problems) > problems:
        return None
    _warn_of_mpi(sources, degrees)
    least, most = (number * max(len(devices), 1) for number in (handler_config.min_workers, handler_config.max_workers))
    given = layer.get("maxWorkers") or layer.get("max_workers")
    if given is not None and most < least:
        lookup.warnings.append(f"maxWorkers ({given.source}) is below minWorkers: {least} run")
    executable = None
    if handler_config.python_executable is not None:
        executable = shutil.which(handler_config.python_executable)
        if executable is None:
            lookup.problems.append(
                f'option.pythonExecutable is "{handler_config.python_executable}": there is no such program'
            )
    properties = _properties(sources, model_id, degrees)
    if is_hugging_face:
        # LMI sets these properties for a Hugging Face model. If none of LMI's own engines is used, LMI replaces `auto`
        # by `disable`.
        if properties.get("rolling_batch", "auto").strip().lower() == "auto":
            properties["rolling_batch"] = "disable"
        properties = {"pipeline_parallel_degree": "1", "max_rolling_batch_size": "32"} | properties
    return replace(
        handler_config,
        min_workers=least,
        max_workers=max(least, most),
        # With 0, a surplus worker would exit when its last call ends. While a batch waits for more requests,
        # idle workers are checked again after this time, so it must not be too short.
        max_idle_time=max(handler_config.max_idle_time, _LEAST_IDLE_TIME),
        python_executable=executable,
        devices=devices,
        sees_own_gpus=_TENSOR_PARALLEL in degrees,
        rolling_batch=properties.get("rolling_batch", "").strip().lower() not in ("", "disable"),
        properties=properties,
    )


def handler_before_engine(
    sources: Sources, model_id: str, environment: Mapping[str, str], packages: PackageConfig
) -> HandlerConfig:
    """Return the settings for a function `handle` that is called before the engine.

    The function has one worker, which sees all GPUs of the model.
    """
    degrees = _degrees(sources, is_hugging_face=True)
    devices = _worker_devices(sources, degrees)
    return HandlerConfig(
        entry_point=SERVICE_FOR_VLLM,
        async_mode=True,
        devices=(",".join(devices),) if devices else (),
        properties=_properties(sources, model_id, degrees),
        environment=environment,
        packages=packages,
    )


def _show_other_keys(sources: Sources) -> None:
    entries = sources.lookup.entries
    reported = {entry.name for entry in entries}
    for key, value in sources.model.items():
        if key not in reported and (key not in BY_KEY or BY_KEY[key].key not in reported):
            entries.append(SettingEntry(key, value.text, value.source, "for the handler"))


def _degrees(sources: Sources, is_hugging_face: bool) -> dict[str, int]:
    """Return the parallel degrees. Without a tensor parallel degree, a Hugging Face model uses all GPUs, as in LMI."""
    given = {name: sources.model.get(PREFIX + name) or sources.variables.get(name.upper()) for name in _PARALLEL}
    degrees = {name: max(int(value.word), 1) for name, value in given.items() if value and _DEGREE(value.word)}
    tensor = given[_TENSOR_PARALLEL]
    if (tensor is None and is_hugging_face and sources.gpus) or (tensor is not None and tensor.word == "max"):
        try:
            allowed = len(allowed_devices(sources.gpus, _load_on(sources))) or sources.gpus
        except ValueError:  # `_worker_devices` reports the error.
            allowed = sources.gpus
        degrees[_TENSOR_PARALLEL] = max(allowed // degrees.get(_PIPELINE_PARALLEL, 1), 1)
    return degrees


def _load_on(sources: Sources) -> str:
    load_on = sources.model.get("load_on_devices")
    return load_on.text if load_on is not None else "*"


def _worker_devices(sources: Sources, degrees: Mapping[str, int]) -> tuple[str, ...]:
    try:
        return device_groups(sources.gpus, math.prod(degrees.values()), _load_on(sources))
    except ValueError as error:
        sources.lookup.problems.append(f"the handler's workers cannot be placed: {error}")
        return ()


def _warn_of_mpi(sources: Sources, degrees: Mapping[str, int]) -> None:
    engine, mode = sources.model.get("engine"), sources.model.get("option.mpi_mode")
    asked = (engine is not None and engine.word == "mpi") or (mode is not None and mode.word == "true")
    if asked and math.prod(degrees.values()) > 1:
        sources.lookup.warnings.append(
            "MPI is not used: a handler has one process, which sees all of its GPUs, and no RANK and WORLD_SIZE"
        )


def _is_hugging_face(model_dir: Path, model_id: str) -> bool:
    """Return True for a Hugging Face model. A hub id counts as such a model."""
    if not model_id or model_id == str(model_dir):
        return location.has_model(model_dir)
    return location.is_hub_id(model_id) or location.has_model(Path(model_id))


def _properties(sources: Sources, model_id: str, degrees: Mapping[str, int]) -> dict[str, str]:
    """Return the properties that LMI passes to a handler: all settings of the model, without the prefix `option.`.

    As in LMI, settings without a value are included. `option.env` is left out because it may contain secrets.
    """
    properties = {
        key.removeprefix(PREFIX): value.text for key, value in sources.model.items() if key != ENVIRONMENT.key
    }
    named = "model_id" in properties or "HF_MODEL_ID" in sources.variables
    if named and model_id:
        properties["model_id"] = model_id
    if "HF_TASK" in sources.variables:
        properties.setdefault("task", sources.variables["HF_TASK"].text)
    empty = {key.removeprefix(PREFIX): "" for key in sources.empty if key != ENVIRONMENT.key}
    return empty | properties | {name: str(degree) for name, degree in degrees.items()}
