"""The fields of `ModelSettings`: which model is loaded, and the engine or the handler that serves it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from container.gpus import allowed_devices, device_groups, is_cpu
from container.settings import options
from container.settings.handler import SERVICE_FOR_VLLM, handler_before_engine, handler_settings
from container.settings.handler_code import MODEL_FN, defines, handler_code, model_code
from container.settings.options import (
    ASYNC_MODE,
    BATCH_SIZE,
    BY_KEY,
    DEFAULT,
    DRAFT_LENGTH,
    DRAFT_MODEL,
    ENGINE,
    ENTRY_POINT,
    ENVIRONMENT,
    FUNCTION,
    HANDLER_OPTIONS,
    MAX_ROLLING_BATCH_SIZE,
    MODEL_ID,
    PREFIX,
    RERANKING,
    ROLLING_BATCH,
    Lookup,
    Sources,
)
from container.settings.server import MODEL_NAME_OPTION
from container.settings.settings import SettingEntry
from container.settings.values import FALSE, FORMATTERS, HIDDEN, Value, assignments, is_true, json_value, names, quoted
from container.sources import location
from container.sources.location import ModelNotFound, SourceError, is_s3
from engines.adapters import ON_HUB
from engines.memory.parallelism import why_one_copy
from engines.vllm.arguments.table import allowed_instead
from engines.vllm.parsers.choice import NAMES as PARSERS
from engines.vllm.parsers.choice import name_fault

# The options of an engine's model that a handler's model has, too.
_SHARED_OPTIONS = frozenset(
    {
        *("batch_size", "max_batch_delay", "option.predict_timeout", "option.model_loading_timeout"),
        *("option.max_rolling_batch_size", "option.enable_lora"),
    }
)
_HANDLERS_ROLLING_BATCH = 32  # LMI's default of `option.max_rolling_batch_size` if none of its engines runs.
_DRAFT_LENGTH = 5  # Tokens that a draft model proposes at a time, as in LMI.
_SPECULATIVE = "speculative_config"
_PARALLEL_LOADING = f"{PREFIX}parallel_loading"
_NUMBERS_OF_COPIES = frozenset(
    {*(key for option in options.COPIES for key in option.keys)}
    | {f"{device}.{option.key}" for device in ("gpu", "cpu") for option in options.COPIES}
)
# SageMaker's toolkit reads this variable, and LMI does not. JumpStart sets it to 1 for each model.
_WORKERS_OF_SCRIPTS = "SAGEMAKER_MODEL_SERVER_WORKERS"
_TEMPLATES = frozenset({"chat_template"})
_NAME_FOR_HANDLERS = replace(MODEL_ID, aliases=())  # A custom handler may give `option.model` another meaning.


def model_fields(sources: Sources) -> dict[str, Any]:
    """Return the fields of `ModelSettings`, and add wrong settings to `sources.lookup.problems`."""
    function = str(sources.lookup.value(FUNCTION, sources.model) or FUNCTION.default)
    code = model_code(sources)
    entry_point = handler_code(sources, code, function)
    if entry_point is None:
        return _engine_model(sources, code)
    return _handler_model(sources, entry_point, function)


# A model that an engine serves


def _engine_model(sources: Sources, code: Path | None) -> dict[str, Any]:
    layer, lookup = sources.model, sources.lookup
    fields: dict[str, Any] = {"model_dir": sources.model_dir}
    arguments: dict[str, Value] = {}
    for option in options.SERVED:
        value = sources.value(option)
        if option.argument is None:
            fields[option.field] = value
        elif value is not None:
            given = next(layer[key] for key in option.keys if key in layer)
            arguments[option.argument] = Value(str(value), given.source)
    fields |= _package_fields(sources)
    fields["async_mode"] = lookup.value(ASYNC_MODE, layer)
    environment = sources.value(ENVIRONMENT)
    fields["environment"] = assignments(str(environment)) if environment else {}
    fields["served_model_names"] = names(str(fields.pop("served_model_name") or ""))
    fields["allowed_media_networks"] = names(str(fields["allowed_media_networks"] or ""))
    fields["stop_sequences"] = tuple(json.loads(fields.pop("stop_sequence") or "[]"))
    if fields["tensor_parallel_degree"] == "max":
        fields["tensor_parallel_degree"], fields["tensor_parallel_max"] = None, True
    _set_adapters(sources, fields)
    _set_pooling(sources, fields)
    _choose_engine(layer, fields, lookup)
    _set_formatters(layer, fields, code, lookup)
    for option in options.NOT_SERVED:
        sources.value(option)
    handle_before_engine = _has_handle_before_engine(sources, code)
    reads_names = code is not None or fields["djl_engine"]
    arguments |= other_arguments(layer, fields["rolling_batch"], lookup, reads_names=reads_names)
    if fields["rolling_batch"] != "disable":
        _check_json(arguments, lookup)
        _check_parsers(arguments, lookup)
    _set_draft_model(arguments, fields["rolling_batch"], lookup)
    _open_draft_model(arguments, sources)
    fields["engine_arguments"] = {name: value.text for name, value in arguments.items()}
    fields["engine_argument_sources"] = {name: value.source for name, value in arguments.items()}
    fields["devices"] = _engine_devices(sources, fields)
    _set_copies(sources, fields)
    _set_model(sources, fields, required=True)
    if handle_before_engine:
        packages = _package_fields(sources)
        fields["handler_before_engine"] = handler_before_engine(sources, fields["model_id"], packages)
    if "HF_TOKEN" in sources.variables:
        lookup.entries.append(SettingEntry("HF_TOKEN", HIDDEN, sources.variables["HF_TOKEN"].source))
    return fields


def _has_handle_before_engine(sources: Sources, code: Path | None) -> bool:
    """Return True if `model.py` may have a `handle` that is called before the engine."""
    given = sources.model.get(ENTRY_POINT.key) or sources.variables.get("DJL_ENTRY_POINT")
    if given is None or given.text.strip() != SERVICE_FOR_VLLM:
        return False
    return code is not None and code.name == "model.py" and defines(code, "handle")


def _set_adapters(sources: Sources, fields: dict[str, Any]) -> None:
    """Set the adapters that are registered at the start. They switch adapters on."""
    given = sources.model.get("option.lora_modules")
    adapters: list[dict[str, str]] = json.loads(fields["adapters"] or "[]")
    fields["adapters"] = {adapter["name"]: _adapter_source(adapter, sources.model_dir) for adapter in adapters}
    if given is None or not adapters:
        return
    for adapter in adapters:
        if fault := _adapter_fault(adapter, fields["adapters"][adapter["name"]]):
            sources.lookup.problems.append(f"{given.describe('option.lora_modules')}: {fault}")
    if "option.enable_lora" not in sources.model:
        fields["enable_lora"] = True
        sources.lookup.replace(SettingEntry("option.enable_lora", True, given.source, "for option.lora_modules"))
    elif not fields["enable_lora"]:
        off = sources.model["option.enable_lora"].describe("option.enable_lora")
        sources.lookup.problems.append(f"{off}, but {given.source} names adapters: give one of them")


def _adapter_source(adapter: Mapping[str, str], model_dir: Path) -> str:
    """Return the place of an adapter: a directory, `s3://` or `hf://`; "" if there is none."""
    path = adapter["path"]
    if is_s3(path):
        return path
    if os.path.isdir(model_dir / path):
        return str(model_dir / path)
    if "/" in path and location.is_hub_id(path):
        return f"{ON_HUB}{path}" + (f"@{adapter['revision']}" if "revision" in adapter else "")
    return ""


def _adapter_fault(adapter: Mapping[str, str], source: str) -> str:
    place = quoted("", adapter["path"])
    if not source:
        return (
            f"there is no directory {place}; allowed: a directory, a relative one below the model directory, "
            "s3://bucket/prefix/, or owner/name on the hub"
        )
    fault = location.json_file_fault(Path(source, "adapter_config.json")) if os.path.isabs(source) else ""
    return f"{place} is no adapter: {fault}" if fault else ""


def _set_pooling(sources: Sources, fields: dict[str, Any]) -> None:
    """Set the fields of models for vectors and scores."""
    is_djl, reranking = sources.value(ENGINE) in options.DJL_ENGINES, sources.value(RERANKING)
    if reranking and fields["task"] == "auto":
        fields["task"] = "classify"
    fields["vector_format"] = "vllm" if fields["async_mode"] else "djl"
    fields["djl_engine"] = is_djl
    fields["scores_in_order"] = is_djl or bool(reranking)
    if (is_djl or fields["task"] in ("embed", "classify")) and ROLLING_BATCH.key not in sources.model:
        # vLLM joins the requests of such models in any case, so that no dynamic batch is needed.
        fields["batch_size"] = 1


def _choose_engine(layer: Mapping[str, Value], fields: dict[str, Any], lookup: Lookup) -> None:
    """Set `rolling_batch`. A batch size above 1 means dynamic batch with every value of the option.

    In the asynchronous mode LMI's configurations set `rolling_batch=disable`. It only selects the schema there. The
    engine still batches requests.
    """
    given = layer.get(ROLLING_BATCH.key)
    batches = (fields["batch_size"] or 1) > 1
    if fields["async_mode"]:
        if batches:
            lookup.problems.append("option.async_mode is on, but batch_size is above 1: give one of them")
        if given is not None and fields["rolling_batch"] == "disable":
            fields["rolling_batch"] = "auto"
            lookup.replace(SettingEntry(ROLLING_BATCH.key, "auto", given.source, "asynchronous mode"))
        return
    if batches and fields["rolling_batch"] != "disable":
        if given is not None and given.word != "auto":
            lookup.warnings.append(
                f"batch_size above 1 takes precedence over option.rolling_batch ({given.source}): dynamic batch"
            )
        fields["rolling_batch"] = "disable"
        source = next(layer[key].source for key in BATCH_SIZE.keys if key in layer)
        lookup.replace(SettingEntry(ROLLING_BATCH.key, "disable", source, "dynamic batch"))
    if fields["rolling_batch"] == "disable":
        if batches and fields["enable_streaming"] not in (None, "false"):
            lookup.problems.append("option.enable_streaming is on, but batch_size is above 1: give one of them")
        return
    for key in ("max_batch_delay", "option.enable_streaming", "option.stop_sequence"):
        if key in layer and layer[key].word != "false":
            lookup.warnings.append(f"{key} ({layer[key].source}) is ignored: it belongs to dynamic batch")


def _set_formatters(layer: Mapping[str, Value], fields: dict[str, Any], code: Path | None, lookup: Lookup) -> None:
    if code is not None:
        fields["formatters"] = code
    name = fields["output_formatter"]
    if name is None or name in FORMATTERS:
        return
    if code is None:
        lookup.problems.append(
            f"{layer['option.output_formatter'].describe('option.output_formatter')}: not served by this version of "
            f"Slipway; allowed: json, jsonlines, sse, or a function of model.py, which is not in the model directory"
        )
    fields["formatter_function"], fields["output_formatter"] = name, None


def other_arguments(
    layer: Mapping[str, Value], rolling_batch: str, lookup: Lookup, *, reads_names: bool
) -> dict[str, Value]:
    """Handle keys that are not options of Slipway. Keys with `option.` go to the engine. Other keys have no effect.

    Args:
        layer: The keys and their values.
        rolling_batch: The value of the option.
        lookup: Gets the problems and warnings.
        reads_names: Code of the model, or another engine of DJL, may read names that Slipway does not know.
    """
    arguments: dict[str, Value] = {}
    for key, value in layer.items():
        name = key.removeprefix(PREFIX)
        if key in _NUMBERS_OF_COPIES:
            continue
        if key in options.IGNORED and not (rolling_batch == "disable" and key in options.DYNAMIC_BATCH_ARGUMENTS):
            lookup.ignore(key, value, options.IGNORED[key])
        elif key in BY_KEY:
            option = BY_KEY[key]
            for_handler = option in HANDLER_OPTIONS and option is not ASYNC_MODE
            if option is not ENVIRONMENT and for_handler and value.text.strip() != option.default:
                lookup.ignore(key, value, "it belongs to custom handlers, and the model has none")
        elif name and name != key:
            if key not in options.KNOWN:
                meant = options.meant_by(key, value)
                if not reads_names or name in options.KNOWN:  # With a prefix too many, LMI ignores a name, too.
                    stops = rolling_batch != "disable" and name not in options.KNOWN
                    lookup.unknown(key, value, meant, stops=stops)
                    continue
                if meant:
                    lookup.warnings.append(f"{key} ({value.place}): no setting of Slipway; did you mean {meant}?")
            if rolling_batch != "disable" and (allowed := allowed_instead(name, value.text)):
                lookup.problems.append(f"{value.describe(key)}; allowed: {allowed}")
            arguments[name] = value
            lookup.entries.append(SettingEntry(key, value.text, value.source, "for the engine"))
        elif meant := options.meant_by(key, value):  # LMI ignores a name without the prefix, too.
            lookup.unknown(key, value, meant, stops=False)
        else:
            hidden = replace(value, text=HIDDEN)  # The name may be that of a secret, misspelled.
            lookup.ignore(key, hidden, "the model has no such setting; options of the engine start with option.")
    return arguments


def _check_parsers(arguments: Mapping[str, Value], lookup: Lookup) -> None:
    """Check the names of vLLM's parsers of tool calls and reasoning."""
    texts = {name: value.text for name, value in arguments.items()}
    for kind in PARSERS:
        if fault := name_fault(kind, texts):
            lookup.problems.append(f"{arguments[kind].describe(f'{PREFIX}{kind}')}: {fault}")


def _check_json(arguments: Mapping[str, Value], lookup: Lookup) -> None:
    """Check the engine arguments that are JSON objects. A chat template may begin as an object does."""
    for name, value in arguments.items():
        if value.text.lstrip().startswith("{") and name not in _TEMPLATES:
            try:
                json_value(value.text)
            except ValueError as error:
                lookup.problems.append(f"{value.describe(PREFIX + name)}: {error}; allowed: JSON")


def _set_draft_model(arguments: dict[str, Value], rolling_batch: str, lookup: Lookup) -> None:
    """Make the `speculative_config` of vLLM from the two options of LMI for a draft model."""
    draft = arguments.pop(str(DRAFT_MODEL.argument), None)
    length = arguments.pop(str(DRAFT_LENGTH.argument), None)
    if rolling_batch == "disable" or draft is None:
        reason = "it belongs to vLLM" if rolling_batch == "disable" else f"there is no {DRAFT_MODEL.key}"
        for option, value in ((DRAFT_MODEL, draft), (DRAFT_LENGTH, length)):
            if value is not None:
                lookup.warnings.append(f"{option.key} ({value.source}) is ignored: {reason}")
                lookup.replace(SettingEntry(option.key, value.text, value.source, f"ignored: {reason}"))
        return
    if (other := arguments.get(_SPECULATIVE)) is not None:
        lookup.problems.append(
            f"{draft.describe(DRAFT_MODEL.key)}, but {other.describe(PREFIX + _SPECULATIVE)}: give one of them"
        )
        return
    tokens = _DRAFT_LENGTH if length is None else int(length.text)
    config = {"model": draft.text.strip(), "num_speculative_tokens": tokens}
    arguments[_SPECULATIVE] = Value(json.dumps(config), draft.source)


def _open_draft_model(arguments: dict[str, Value], sources: Sources) -> None:
    """Replace the `s3://` URL of a draft model, or its path in the model directory, by a local directory."""
    given = arguments.get(_SPECULATIVE)
    if given is None:
        return
    try:
        config = json_value(given.text)
    except ValueError:
        return  # `_check_json` reports the fault.
    url = config.get("model") if isinstance(config, dict) else None
    if not isinstance(url, str) or not url:
        return
    if is_s3(url):
        try:
            directory = str(sources.open_remote(url))
        except SourceError as error:
            sources.lookup.problems.append(f"{given.describe(PREFIX + _SPECULATIVE)}: {error}")
            return
    elif os.path.isdir(sources.model_dir / url):
        directory = str(sources.model_dir / url)  # An absolute path stays unchanged.
    else:
        return  # It is a hub id, or the engine reports that the directory is missing.
    if fault := location.model_fault(Path(directory)):
        sources.lookup.problems.append(f"{given.describe(PREFIX + _SPECULATIVE)}: {fault}")
    arguments[_SPECULATIVE] = Value(json.dumps(config | {"model": directory}), given.source)


def _engine_devices(sources: Sources, fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the GPUs that the engine may use. As in LMI, `load_on_devices` may have the first GPU of each copy."""
    load_on, lookup = sources.model.get("load_on_devices"), sources.lookup
    if load_on is None or load_on.word in ("", "*"):
        return None
    if not sources.gpus:
        if not is_cpu(load_on.text):
            lookup.warnings.append(f"load_on_devices ({load_on.source}) is ignored: there are no GPUs")
        return None
    try:
        allowed = allowed_devices(sources.gpus, load_on.text)
    except ValueError as error:
        lookup.problems.append(f"{load_on.describe('load_on_devices')}: {error}")
        return None
    degree, stages = fields["tensor_parallel_degree"], fields["pipeline_parallel_degree"]
    if degree is None or stages is None or not allowed or why_one_copy(fields["engine_arguments"]):
        return allowed
    try:
        groups = device_groups(sources.gpus, degree * stages, load_on.text)
    except ValueError:
        return allowed  # The engine reports that they are too few.
    return tuple(sorted({*allowed, *(int(device) for group in groups for device in group.split(","))}))


def _set_copies(sources: Sources, fields: dict[str, Any]) -> None:
    """Set how many copies of the model there are. Warn of numbers that the engine cannot have."""
    lookup, layer = sources.lookup, _numbers_of_copies(sources)
    given = {option.key: layer[key] for option in options.COPIES for key in option.keys if key in layer}
    if fields["parallel_loading"]:
        given[_PARALLEL_LOADING] = sources.model[_PARALLEL_LOADING]
    least, most = (
        None if (number := lookup.value(option, layer)) is None else int(number) for option in options.COPIES
    )
    if most == 0:
        lookup.warnings.append(f"maxWorkers ({given['maxWorkers'].source}) is 0, which is the default, as in LMI")
        most = None
    if least == 0:
        lookup.warnings.append(f"minWorkers ({given['minWorkers'].source}) is 0: one copy is always loaded")
        least = 1
    reason = _why_one_copy(fields)
    if not reason and least is not None and most is not None and most < least:
        lookup.warnings.append(f"maxWorkers ({given['maxWorkers'].source}) is below minWorkers: {least} run")
        most = least
    takes_all = sources.one_model and sources.gpus > 0 and fields["devices"] != ()
    if takes_all and (least or 1) == (most or 1) == 1:
        least = most = None  # In LMI, both numbers count for each GPU, and 1 is the default.
    fields["min_copies"] = None if reason else least
    fields["max_copies"] = 1 if reason else most or (None if takes_all else least or 1)
    if most is None:
        note = "" if fields["max_copies"] else "as many copies as the GPUs hold"
        if (value := given.get("maxWorkers")) is not None:
            lookup.replace(SettingEntry("maxWorkers", value.text, value.source, note))
        else:
            lookup.replace(SettingEntry("maxWorkers", fields["max_copies"], DEFAULT, note))
    if fields["max_copies"] == 1:
        reason = reason or "the model has one copy"
        numbers = {"minWorkers": least or 1, "maxWorkers": most or 1}
        vain = {key: value for key, value in given.items() if numbers.get(key) != 1}
        for key, value in vain.items():
            lookup.replace(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))
        if vain:
            named = ", ".join(f"{key} ({value.source})" for key, value in vain.items())
            lookup.warnings.append(f"{named} {'is' if len(vain) == 1 else 'are'} ignored: {reason}")


def _numbers_of_copies(sources: Sources) -> dict[str, Value]:
    """Return the model's settings, without the number of workers that is for scripts only."""
    layer = sources.workers()
    for option in options.COPIES:
        value = layer.get(option.key)
        if value is None or not value.source.endswith(_WORKERS_OF_SCRIPTS):
            continue
        other = sources.given.get(option.key) or sources.variables.get(f"SERVING_{option.field.upper()}")
        layer = {key: each for key, each in layer.items() if key != option.key} | ({option.key: other} if other else {})
        if option is options.COPIES[0]:
            reason = "it is for scripts; maxWorkers counts the copies of a model"
            if value.word != "1":
                sources.lookup.warnings.append(f"{_WORKERS_OF_SCRIPTS} ({value.source}) is ignored: {reason}")
            sources.lookup.entries.append(
                SettingEntry(_WORKERS_OF_SCRIPTS, value.text, value.source, f"ignored: {reason}")
            )
    return layer


def _why_one_copy(fields: Mapping[str, Any]) -> str:
    """Return why the model cannot have several copies; "" if it can."""
    if fields["rolling_batch"] == "disable":
        return "dynamic batch runs one copy of the model"
    argument = why_one_copy(fields["engine_arguments"])
    return f"with {PREFIX}{argument} the model has one copy" if argument else ""


# A model with a custom handler


def _handler_model(sources: Sources, entry_point: str, function: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir}
    for option in options.SERVED:
        if option.key in _SHARED_OPTIONS:
            fields[option.field] = sources.value(option)
    if not any(key in sources.model for key in MAX_ROLLING_BATCH_SIZE.keys):
        fields["max_rolling_batch_size"] = _HANDLERS_ROLLING_BATCH
        sources.lookup.replace(SettingEntry(MAX_ROLLING_BATCH_SIZE.key, _HANDLERS_ROLLING_BATCH, DEFAULT))
    fields["model_id"] = sources.value(_NAME_FOR_HANDLERS)
    _set_model(sources, fields, required=False)
    path, given = Path(entry_point), sources.model.get(ROLLING_BATCH.key)
    is_script = path.is_file() and defines(path, MODEL_FN) and not defines(path, function)
    if is_script and given is not None and given.word != "disable":
        # The functions of a script take one request.
        sources.lookup.ignore(ROLLING_BATCH.key, given, f"{path.name} has {MODEL_FN} and no `{function}`")
        sources.model[ROLLING_BATCH.key] = Value("disable", given.source)
    fields["handler"] = handler_settings(sources, entry_point, function, fields["model_id"], _package_fields(sources))
    return fields


# Fields of models with an engine and of models with a custom handler


def _set_model(sources: Sources, fields: dict[str, Any], *, required: bool) -> None:
    """Set `model_id` to the model to load, and the model's name.

    Args:
        required: Add a problem if no model is given or the model is not found. It is False for a custom handler, which
            may bring its own model and may give `option.model_id` another meaning.
    """
    lookup = sources.lookup
    keys = MODEL_ID.keys if required else _NAME_FOR_HANDLERS.keys
    given = next((sources.model[key] for key in keys if key in sources.model), None)
    variable = sources.variables.get("HF_MODEL_ID")
    if given is None and variable is not None and location.is_store_of(variable.text, (sources.model_dir,)):
        variable = None  # The variable names the directory around the same model.
    if given is not None and variable is not None:
        # Both name the same model, or the variable names a folder on S3 whose serving.properties names the model.
        is_same = given.text.strip() == variable.text.strip() or sources.is_open(variable.text)
        if not is_same:
            lookup.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    by_variable = given is None and variable is not None
    _set_revision(sources, fields, by_variable)
    value = given or variable
    if value is not None and fields["model_id"] is not None:
        try:
            if is_s3(fields["model_id"]):
                fields["model_id"] = str(sources.open_remote(fields["model_id"]))
            else:
                fields["model_id"] = location.resolve_model_id(fields["model_id"], sources.model_dir)
        except (ModelNotFound, SourceError) as error:
            if required or isinstance(error, SourceError):
                lookup.problems.append(f"{value.describe(MODEL_ID.key)}: {error}")
    elif value is None and not sources.has_model_dir:
        pass  # It is reported, and may have named the model.
    elif value is None and required and not location.has_model(sources.model_dir):
        lookup.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({sources.model_dir})"
        )
    elif value is None:
        fields["model_id"] = str(sources.model_dir)
        lookup.replace(SettingEntry(MODEL_ID.key, str(sources.model_dir), DEFAULT, "the model directory"))
    if required:
        _check_model(fields, value, lookup)
    fields["name"] = lookup.value(MODEL_NAME_OPTION, sources.server)
    if fields["name"] is None and fields["model_id"] is not None:
        fields["name"] = location.model_name(fields["model_id"], sources.model_dir, by_variable)
        lookup.entries.append(SettingEntry("model_name", fields["name"], DEFAULT))


def _check_model(fields: Mapping[str, Any], given: Value | None, lookup: Lookup) -> None:
    """Check the directory of a model that an engine loads. With `hf_config_path`, its configuration is elsewhere."""
    directory = fields["model_id"]
    if directory is None or not os.path.isdir(directory) or "hf_config_path" in fields["engine_arguments"]:
        return
    if fault := location.model_fault(Path(directory)):
        shown = f"model directory ({directory})" if given is None else given.describe(MODEL_ID.key)
        lookup.problems.append(f"{shown}: {fault}")


def _set_revision(sources: Sources, fields: dict[str, Any], by_variable: bool) -> None:
    """Set `revision` from HF_REVISION if HF_MODEL_ID selects the model. For another model it is ignored."""
    revision = sources.variables.get("HF_REVISION")
    if revision is None or "option.revision" in sources.model:
        return
    if not by_variable:
        sources.lookup.ignore("HF_REVISION", revision, "it goes with HF_MODEL_ID; use option.revision")
        return
    fields["revision"] = revision.text.strip()
    sources.lookup.replace(SettingEntry("option.revision", fields["revision"], revision.source))


def _package_fields(sources: Sources) -> dict[str, Any]:
    wanted = sources.variables.get("STANDARD_AUTO_INSTALL_REQ")
    fields: dict[str, Any] = {
        "offline": is_true(sources.variables.get("DJL_OFFLINE")),
        "install_requirements": wanted is None or wanted.word not in FALSE,
    }
    if (arguments := sources.variables.get("STANDARD_PIP_ARGS")) is not None:
        try:
            fields["pip_arguments"] = tuple(shlex.split(arguments.text))
        except ValueError as error:
            sources.lookup.problems.append(
                f"{arguments.describe('STANDARD_PIP_ARGS')}: {error}; allowed: arguments of pip install as in a shell"
            )
    return fields
