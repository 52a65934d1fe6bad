"""The settings of a customer's handler: its workers, their devices, and its properties."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container.gpus import device_groups, gpu_count
from container.settings.options import BY_KEY, HANDLER_OPTIONS, PREFIX, ROLLING_BATCH, Sources
from container.settings.settings import SettingEntry
from container.settings.values import assignments
from container.sources import location
from engines.model_settings import HandlerSettings

# LMI's own handler for vLLM. It calls the `handle` of a `model.py` before the engine.
SERVICE_FOR_VLLM = "djl_python.lmi_vllm.vllm_async_service"


def handler_settings(
    sources: Sources, entry_point: str, function: str, model_id: str | None, packages: Mapping[str, Any]
) -> HandlerSettings | None:
    """Return the handler's settings. If they are wrong, return None and add the reasons to the problems.

    Args:
        packages: The fields for `requirements.txt`.
    """
    lookup = sources.lookup
    problems = len(lookup.problems)
    gpus = gpu_count()
    own = {key: sources.model.get(f"{'gpu' if gpus else 'cpu'}.{key}") for key in ("minWorkers", "maxWorkers")}
    layer = sources.model | {key: value for key, value in own.items() if value is not None}
    fields: dict[str, Any] = {
        option.field: lookup.value(option, layer, sources.variables) for option in HANDLER_OPTIONS
    }
    _show_other_keys(sources)
    devices = _worker_devices(sources, gpus)
    if len(lookup.problems) > problems:
        return None
    for name in ("min_workers", "max_workers"):  # Both are numbers for each device.
        fields[name] *= max(len(devices), 1)
    least, most = fields["min_workers"], fields["max_workers"]
    given = layer.get("maxWorkers") or layer.get("max_workers")
    if given is not None and most < least:
        lookup.warnings.append(f"maxWorkers ({given.source}) is below minWorkers: {least} run")
    fields["max_workers"] = max(least, most)
    fields["environment"] = assignments(fields["environment"]) if fields["environment"] else {}
    if (executable := fields["python_executable"]) is not None:
        fields["python_executable"] = shutil.which(executable)
        if fields["python_executable"] is None:
            lookup.problems.append(f'option.pythonExecutable is "{executable}": there is no such program')
    properties = _properties(sources, model_id)
    given = sources.model.get(ROLLING_BATCH.key)
    rolling_batch = given.word if given is not None else "disable"
    if rolling_batch == "auto" and _is_hugging_face(sources.model_dir, model_id):
        # LMI turns `auto` into `disable` if the model is a Hugging Face model and no engine of LMI is used.
        properties["rolling_batch"] = rolling_batch = "disable"
    return HandlerSettings(
        entry_point=entry_point,
        function=function,
        devices=devices,
        rolling_batch=rolling_batch != "disable",
        properties=properties,
        **fields,
        **packages,
    )


def handler_before_engine(sources: Sources, model_id: str | None, packages: Mapping[str, Any]) -> HandlerSettings:
    """Return the settings of a `handle` that is called before the engine.

    It has one worker, which sees all GPUs of the model.
    """
    devices = _worker_devices(sources, gpu_count())
    return HandlerSettings(
        entry_point=SERVICE_FOR_VLLM,
        async_mode=True,
        devices=(",".join(devices),) if devices else (),
        properties=_properties(sources, model_id),
        **packages,
    )


def _show_other_keys(sources: Sources) -> None:
    entries = sources.lookup.entries
    reported = {entry.name for entry in entries}
    for key, value in sources.model.items():
        if key not in reported and (key not in BY_KEY or BY_KEY[key].key not in reported):
            entries.append(SettingEntry(key, value.text, value.source, "for the handler"))


def _worker_devices(sources: Sources, gpus: int) -> tuple[str, ...]:
    load_on = sources.model.get("load_on_devices")
    each = 1
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        degree = sources.model.get(PREFIX + name) or sources.variables.get(name.upper())
        if degree is not None and degree.word == "max":
            each *= max(gpus, 1)
        elif degree is not None and degree.word.isdecimal():
            each *= int(degree.word)
    try:
        return device_groups(gpus, max(each, 1), load_on.text if load_on is not None else "*")
    except ValueError as error:
        sources.lookup.problems.append(f"the handler's workers cannot be placed: {error}")
        return ()


def _is_hugging_face(model_dir: Path, model_id: str | None) -> bool:
    """Return True if the model is a Hugging Face model. A hub id counts as one."""
    if model_id is None or model_id == str(model_dir):
        return location.has_model(model_dir)
    return location.is_hub_id(model_id) or location.has_model(Path(model_id))


def _properties(sources: Sources, model_id: str | None) -> dict[str, str]:
    """Return the properties that LMI gives to a handler: every setting of the model, without `option.`."""
    properties = {key.removeprefix(PREFIX): value.text for key, value in sources.model.items()}
    named = "model_id" in properties or "HF_MODEL_ID" in sources.variables
    if named and model_id is not None:
        properties["model_id"] = model_id
    for variable in ("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE", "HF_TASK"):
        if variable in sources.variables:
            properties.setdefault(variable.lower().removeprefix("hf_"), sources.variables[variable].text)
    return properties
