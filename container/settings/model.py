"""The fields of `ModelSettings`: of an engine's model, or of a customer's handler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from container.devices import allowed_devices, gpu_count
from container.settings import handler as custom_code
from container.settings import options, server_options
from container.settings.handler import handler_settings, package_fields
from container.settings.options import ENTRY_POINT, FUNCTION, LEFTOVERS, TRANSFORMERS, Option
from container.settings.parsers import names
from container.settings.properties import HIDDEN, Value, quoted
from container.settings.sources import DEFAULT, Resolution, SettingEntry, Sources
from container.sources import location
from container.sources.download import RemoteModels
from container.sources.location import SourceError, is_s3

_PATHS = ("tokenizer", "hf_config_path")
_SPECULATIVE = "speculative_config"


def set_local_paths(fields: dict[str, Any], remote: RemoteModels, found: Resolution) -> None:
    """Put directories of this machine in the place of `s3://`; what cannot be had is added to `found.problems`."""
    arguments: dict[str, str] = fields["engine_arguments"]
    for name, text in list(arguments.items()):
        try:
            if name in _PATHS and is_s3(text):
                arguments[name] = str(remote.open(text))
            elif name == _SPECULATIVE:
                arguments[name] = _with_local_model(text, remote)
        except SourceError as error:
            source = fields["engine_argument_sources"][name]
            found.problems.append(f"option.{name} is {quoted(name, text)} ({source}): {error}")


def _with_local_model(text: str, remote: RemoteModels) -> str:
    """The engine says what is wrong with text that is no JSON object."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, str) or not is_s3(model):
        return text
    return json.dumps(config | {"model": str(remote.open(model))})


_MODEL_ID = options.BY_KEY["option.model_id"]


def set_model(sources: Sources, fields: dict[str, Any], found: Resolution, *, required: bool) -> None:
    """Turn option.model_id, or what stands in for it, into what is loaded; and name it.

    `required`: an engine has to have a model; a custom handler may bring its own, and makes of a value that names
    nothing here what it likes.
    """
    if "model_id" not in fields:
        fields["model_id"] = found.take(_MODEL_ID, sources.model, sources.variables)
    given = sources.model.get("option.model_id")
    variable = sources.variables.get("HF_MODEL_ID")
    if given is None and variable is not None and location.is_store_of(variable.text, (sources.model_dir,)):
        variable = None  # the same model, by the directory around it
    by_variable = given is None and variable is not None
    if given is not None and variable is not None and not _same_or_opened(given.text, variable.text, sources):
        found.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    _set_revision(sources, fields, by_variable, found)
    value = given or variable
    if value is None:
        _set_own_model(sources.model_dir, fields, found, required)
    elif fields["model_id"] is not None:
        try:
            fields["model_id"] = _resolved(fields["model_id"], sources)
        except (location.ModelNotFound, SourceError) as error:
            if required or isinstance(error, SourceError):
                found.problems.append(f"option.model_id is {quoted('', value.text)} ({value.source}): {error}")
    fields["name"] = found.take(server_options.MODEL_NAME_OPTION, sources.server)
    if fields["name"] is None and fields["model_id"] is not None:
        fields["name"] = location.model_name(fields["model_id"], sources.model_dir, by_variable)
        found.entries.append(SettingEntry("model_name", fields["name"], DEFAULT))


def _same_or_opened(given: str, variable: str, sources: Sources) -> bool:
    """Whether HF_MODEL_ID says the same, or is the directory that the other was read from."""
    return given.strip() == variable.strip() or sources.remote_models.has(variable)


def _resolved(text: str, sources: Sources) -> str:
    if is_s3(text):
        return str(sources.remote_models.open(text))
    return location.resolve_model_id(text, sources.model_dir)


def _set_revision(sources: Sources, fields: dict[str, Any], by_variable: bool, found: Resolution) -> None:
    """HF_REVISION belongs to HF_MODEL_ID (lmi.md 2.5); beside another model it would name the wrong commit."""
    revision = sources.variables.get("HF_REVISION")
    if revision is None or "option.revision" in sources.model:
        return
    if not by_variable:
        found.ignore("HF_REVISION", revision, "it goes with HF_MODEL_ID; use option.revision")
        return
    fields["revision"] = revision.text.strip()
    found.replace(SettingEntry("option.revision", fields["revision"], revision.source))


def _set_own_model(model_dir: Path, fields: dict[str, Any], found: Resolution, required: bool) -> None:
    if required and not location.has_model(model_dir):
        found.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({model_dir})"
        )
        return
    fields["model_id"] = str(model_dir)
    found.replace(SettingEntry("option.model_id", str(model_dir), DEFAULT, "the model directory"))


_FORMATTERS = ("json", "jsonlines", "sse")
_FOR_HANDLERS = frozenset(
    {
        *("batch_size", "max_batch_delay", "option.predict_timeout", "option.model_loading_timeout"),
        *("option.max_rolling_batch_size", "option.enable_lora"),
    }
)
"""What a custom handler's model shares with an engine's."""
_HANDLERS_ROLLING_BATCH = 32
"""LMI's default where none of its own engines runs (lmi.md 2.8)."""


def model_fields(sources: Sources, found: Resolution) -> dict[str, Any]:
    """Fill the fields of `ModelSettings`; what is wrong is added to `found.problems`."""
    function = str(found.take(FUNCTION, sources.model) or FUNCTION.default)
    code = custom_code.find_code(sources.model_dir, function)
    entry_point = _entry_point(sources, code, found)
    if entry_point is not None:
        return _with_handler(sources, entry_point, found)
    return _with_engine(sources, code, found)


def _entry_point(sources: Sources, code: custom_code.Code | None, found: Resolution) -> str | None:
    """The handler's file or module; None where an engine serves."""
    given = sources.model.get(ENTRY_POINT.key) or sources.variables.get("DJL_ENTRY_POINT")
    text = found.take(ENTRY_POINT, sources.model, sources.variables)
    if text is None or given is None:
        return str(code.path) if code is not None and (code.has_handler or not _engine_has_model(sources)) else None
    name = str(text)
    if name in custom_code.BUILT_IN | custom_code.ASYNCHRONOUS | custom_code.FORMER:
        _use_built_in(name, given, sources, found)
        return None
    try:
        return custom_code.entry_point(name, sources.model_dir)
    except custom_code.CodeNotFound as error:
        found.problems.append(f'{ENTRY_POINT.key} is "{name}" ({given.source}): {error}')
        return name  # a handler was meant, so that nothing is said of a model that it does not need


def _engine_has_model(sources: Sources) -> bool:
    named = "option.model_id" in sources.model or "HF_MODEL_ID" in sources.variables
    return named or location.has_model(sources.model_dir)


def _use_built_in(name: str, given: Value, sources: Sources, found: Resolution) -> None:
    if name in custom_code.FORMER:
        found.warnings.append(f"{ENTRY_POINT.key} is {name} ({given.source}): option.rolling_batch chooses the engine")
    if name in custom_code.ASYNCHRONOUS:
        sources.model.setdefault(options.ENGINE_ASYNC_MODE.key, Value("true", given.source))
    if "trtllm" in name or name == "djl_python.tensorrt_llm":
        sources.model.setdefault("option.rolling_batch", Value("trtllm", given.source))


def _with_handler(sources: Sources, entry_point: str, found: Resolution) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir}
    for option in options.SERVED:
        if option.key in _FOR_HANDLERS and option.field is not None:
            fields[option.field] = found.take(option, sources.model, sources.variables)
    if not any(key in sources.model for key in _keys("option.max_rolling_batch_size")):
        fields["max_rolling_batch_size"] = _HANDLERS_ROLLING_BATCH
        found.replace(SettingEntry("option.max_rolling_batch_size", _HANDLERS_ROLLING_BATCH, "default"))
    set_model(sources, fields, found, required=False)
    fields["handler"] = handler_settings(sources, entry_point, fields, found)
    return fields


def _with_engine(sources: Sources, code: custom_code.Code | None, found: Resolution) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir, "engine_arguments": {}, "engine_argument_sources": {}}
    for option in options.SERVED:
        value = found.take(option, sources.model, sources.variables)
        if option.field is not None:
            fields[option.field] = value
        elif option.argument is not None and value is not None:
            _add_argument(fields, option.argument, str(value), _source(option, sources.model))
    fields.update(package_fields(sources, found))
    fields["async_mode"] = found.take(options.ENGINE_ASYNC_MODE, sources.model, sources.variables)
    fields["served_model_names"] = names(str(fields.pop("served_model_name") or ""))
    _set_batching(sources, fields, found)
    _set_formatters(sources, fields, code, found)
    for option in options.NOT_SERVED:
        found.take(option, sources.model, sources.variables)
    _take_leftovers(sources, fields, found)
    _take_others(sources, fields, found)
    set_local_paths(fields, sources.remote_models, found)
    _set_tensor_parallel(fields)
    _set_devices(fields, found)
    set_model(sources, fields, found, required=True)
    if "HF_TOKEN" in sources.variables:
        found.entries.append(SettingEntry("HF_TOKEN", HIDDEN, sources.variables["HF_TOKEN"].source))
    return fields


def _set_batching(sources: Sources, fields: dict[str, Any], found: Resolution) -> None:
    """A batch size chooses dynamic batch, whatever the engine is (lmi.md 2.8).

    In the asynchronous mode LMI's configurations have `rolling_batch=disable`, which there means only that it is not
    rolling batch's schema: the engine batches all the same.
    """
    fields["stop_sequences"] = _stop_sequences(fields.pop("stop_sequence", None))
    if fields["async_mode"]:
        if (fields["batch_size"] or 1) > 1:
            found.problems.append("option.async_mode is on, but batch_size is above 1: give one of them")
        if fields["rolling_batch"] == "disable":
            fields["rolling_batch"] = "auto"
            source = sources.model["option.rolling_batch"].source
            found.replace(SettingEntry("option.rolling_batch", "auto", source, "asynchronous mode"))
        return
    if (fields["batch_size"] or 1) > 1 and fields["rolling_batch"] != "disable":
        given = sources.model.get("option.rolling_batch")
        if given is not None and given.text.strip().lower() != "auto":
            found.warnings.append(
                f"batch_size above 1 goes before option.rolling_batch ({given.source}): dynamic batch"
            )
        fields["rolling_batch"] = "disable"
        source = next(sources.model[key].source for key in _keys("batch_size") if key in sources.model)
        found.replace(SettingEntry("option.rolling_batch", "disable", source, "dynamic batch"))
    if fields["rolling_batch"] == "disable":
        if fields["enable_streaming"] not in (None, "false") and (fields["batch_size"] or 1) > 1:
            found.problems.append("option.enable_streaming is on, but batch_size is above 1: give one of them")
        return
    for key in ("max_batch_delay", "option.enable_streaming", "option.stop_sequence"):
        given = sources.model.get(key)
        if given is not None and given.text.strip().lower() != "false":
            found.warnings.append(f"{key} ({given.source}) is ignored: it belongs to dynamic batch")


def _keys(key: str) -> tuple[str, ...]:
    option = options.BY_KEY[key]
    return (option.key, *option.aliases)


def _stop_sequences(text: str | None) -> tuple[str, ...]:
    return tuple(json.loads(text)) if text else ()


def _set_formatters(sources: Sources, fields: dict[str, Any], code: custom_code.Code | None, found: Resolution) -> None:
    if code is not None:
        fields["formatters"] = code.path
    name = fields["output_formatter"]
    if name is None or name in _FORMATTERS:
        return
    if code is None:
        given = sources.model["option.output_formatter"]
        found.problems.append(
            f"option.output_formatter is {quoted('', given.text)} ({given.source}): not served by this version of "
            f"Slipway; allowed: json, jsonlines, sse, or a function of model.py, which is not in the model directory"
        )
    fields["formatter_function"], fields["output_formatter"] = name, None


def _take_leftovers(sources: Sources, fields: dict[str, Any], found: Resolution) -> None:
    arguments = {option.key for option in TRANSFORMERS} if fields["rolling_batch"] == "disable" else set()
    for option in LEFTOVERS:
        if option.key not in arguments:
            found.take(option, sources.model, sources.variables)
        elif (value := sources.model.get(option.key)) is not None:
            _pass_on(option.key, value, fields, found)
    for option in options.HANDLER:
        value = sources.model.get(option.key)
        if option in (ENTRY_POINT, FUNCTION) or option.key == options.ENGINE_ASYNC_MODE.key or value is None:
            continue
        if value.text.strip() != option.default:
            found.ignore(option.key, value, "it belongs to custom handlers, and the model has none")


def _take_others(sources: Sources, fields: dict[str, Any], found: Resolution) -> None:
    """What Slipway does not know: `option.<name>` is the engine's, anything else goes nowhere."""
    for key, value in sources.model.items():
        if key in options.BY_KEY:
            continue
        name = key.removeprefix(options.PREFIX)
        if name and name != key:
            _pass_on(key, value, fields, found)
            continue
        meant = f"{options.PREFIX}{key}"
        hint = f"; {meant} is meant" if meant in options.BY_KEY else "; options of the engine start with option."
        found.ignore(key, value, f"the model has no such setting{hint}")


def _pass_on(key: str, value: Value, fields: dict[str, Any], found: Resolution) -> None:
    _add_argument(fields, key.removeprefix(options.PREFIX), value.text, value.source)
    found.entries.append(SettingEntry(key, value.text, value.source, "for the engine"))


def _source(option: Option, layer: Mapping[str, Value]) -> str:
    return next(layer[key].source for key in (option.key, *option.aliases) if key in layer)


def _add_argument(fields: dict[str, Any], name: str, text: str, source: str) -> None:
    fields["engine_arguments"][name] = text
    fields["engine_argument_sources"][name] = source


def _set_devices(fields: dict[str, Any], found: Resolution) -> None:
    load_on, gpus = str(fields["devices"] or "*").strip(), gpu_count()
    fields["devices"] = None
    if load_on == "*" or not gpus:
        return
    try:
        fields["devices"] = allowed_devices(gpus, load_on)
    except ValueError as error:
        found.problems.append(f"load_on_devices is {quoted('', load_on)}: {error}")


def _set_tensor_parallel(fields: dict[str, Any]) -> None:
    if fields["tensor_parallel_degree"] == "max":
        fields["tensor_parallel_degree"], fields["tensor_parallel_max"] = None, True
