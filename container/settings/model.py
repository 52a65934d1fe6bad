"""Reads `ModelConfig`: the model to load, and the engine or the handler that serves it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from container.gpus import allowed_devices, device_groups, is_cpu
from container.settings import options, server
from container.settings.handler import SERVICE_FOR_VLLM, handler_before_engine, handler_settings
from container.settings.handler_code import MODEL_FN, defines, handler_code, model_code
from container.settings.lookup import DEFAULT, Lookup, SettingEntry, Sources
from container.settings.options import BY_KEY
from container.settings.values import HIDDEN, Value, is_true, quoted
from container.sources import location
from container.sources.location import ModelNotFound, SourceError, is_s3
from engines.adapters import ON_HUB
from engines.memory.parallelism import why_one_copy
from engines.settings.declaration import PREFIX, declared
from engines.settings.engine_config import (
    BATCH_SIZE,
    DEVICES,
    DJL_ENGINES,
    DRAFT_LENGTH,
    DRAFT_MODEL,
    ENGINE,
    ENGINE_ARGUMENTS,
    LORA_MODULES,
    MAX_ROLLING_BATCH_SIZE,
    MODEL_ID,
    ROLLING_BATCH,
    TENSOR_PARALLEL_DEGREE,
    EngineConfig,
)
from engines.settings.parsers import FALSE, json_value
from engines.vllm.arguments.table import allowed_instead
from engines.vllm.parsers.choice import NAMES as PARSERS
from engines.vllm.parsers.choice import name_fault
from handlers.custom.settings import ENTRY_POINT, FUNCTION, PackageConfig
from handlers.lmi.settings import FORMATTERS, OUTPUT_FORMATTER, RERANKING, LmiConfig
from handlers.model_config import GROUPS, ModelConfig

# Engine settings that also apply to a model with a handler.
_SHARED = (
    *("batch_size", "max_batch_delay", "predict_timeout", "model_loading_timeout"),
    *("max_rolling_batch_size", "enable_lora"),
)
_REVISION, _ENABLE_LORA = (declared(EngineConfig)[name] for name in ("revision", "enable_lora"))
_HANDLERS_ROLLING_BATCH = 32  # LMI's default of `option.max_rolling_batch_size` for handlers.
_DRAFT_LENGTH = 5  # The number of tokens that a draft model proposes at a time, as in LMI.
_SPECULATIVE = "speculative_config"
_PARALLEL_LOADING = f"{PREFIX}parallel_loading"
_NUMBERS_OF_COPIES = frozenset(
    {key for setting in options.COPIES for key in setting.keys}
    | {f"{device}.{setting.key}" for device in ("gpu", "cpu") for setting in options.COPIES}
)
# SageMaker's toolkit reads this variable, but LMI does not. JumpStart sets it to 1 for each model.
_WORKERS_OF_SCRIPTS = "SAGEMAKER_MODEL_SERVER_WORKERS"
_NAME_FOR_HANDLERS = replace(MODEL_ID, aliases=())  # For a custom handler, `option.model` may mean something else.


def read_model_config(sources: Sources) -> ModelConfig:
    """Return the settings of the model. For an invalid setting, a problem is added and the default is kept."""
    function = sources.lookup.value(FUNCTION, sources.model) or str(FUNCTION.default)
    code = model_code(sources)
    entry_point = handler_code(sources, code, function)
    if entry_point is None:
        return _engine_model(sources, code)
    return _handler_model(sources, entry_point, function)


# A model that an engine serves


def _engine_model(sources: Sources, code: Path | None) -> ModelConfig:
    lookup = sources.lookup
    model_id, name, revision = _model(sources, required=True)
    degree = sources.value(TENSOR_PARALLEL_DEGREE)
    sources.value(DEVICES)
    config = sources.read(
        ModelConfig,
        name=name,
        model_dir=sources.model_dir,
        model_id=model_id,
        revision=revision,
        adapters=_adapters(sources),
        tensor_parallel_degree=None if degree == "max" else degree,
        tensor_parallel_max=degree == "max",
        devices=None,
        djl_engine=sources.value(ENGINE) in DJL_ENGINES,
        lmi=sources.read(LmiConfig, output_formatter=None),
        **{name: sources.read(group) for name, group in GROUPS.items() if group is not LmiConfig},
        formatters=code,
        packages=_packages(sources),
    )
    config = _with_adapters_on(sources, config)
    config = _for_vectors(sources, config)
    config = _with_engine_chosen(sources, config)
    config = replace(config, lmi=_with_formatter(sources, config.lmi, code))
    for setting in options.NOT_SERVED:
        sources.value(setting)
    arguments = _engine_arguments(sources, config)
    config = replace(
        config,
        engine_arguments={name: value.text for name, value in arguments.items()},
        engine_argument_sources={name: value.source for name, value in arguments.items()},
    )
    config = replace(config, devices=_engine_devices(sources, config))
    least, most = _copies(sources, config)
    config = replace(config, min_copies=least, max_copies=most)
    if _has_handle_before_engine(sources, code):
        before = handler_before_engine(sources, config.model_id, config.environment, config.packages)
        config = replace(config, handler_before_engine=before)
    if "HF_TOKEN" in sources.variables:
        lookup.entries.append(SettingEntry("HF_TOKEN", HIDDEN, sources.variables["HF_TOKEN"].source))
    return config


def _has_handle_before_engine(sources: Sources, code: Path | None) -> bool:
    """Return True if `model.py` may have a function `handle` that is called before the engine."""
    given = sources.model.get(ENTRY_POINT.key) or sources.variables.get("DJL_ENTRY_POINT")
    if given is None or given.text.strip() != SERVICE_FOR_VLLM:
        return False
    return code is not None and code.name == "model.py" and defines(code, "handle")


def _adapters(sources: Sources) -> dict[str, str]:
    """Return the locations of the adapters that are registered at startup, by name."""
    adapters = sources.value(LORA_MODULES) or ()
    places = {adapter["name"]: _adapter_source(adapter, sources.model_dir) for adapter in adapters}
    for adapter in adapters:
        if fault := _adapter_fault(adapter, places[adapter["name"]]):
            given = sources.model[LORA_MODULES.key].describe(LORA_MODULES.key)
            sources.lookup.problems.append(f"{given}: {fault}")
    return places


def _with_adapters_on(sources: Sources, config: ModelConfig) -> ModelConfig:
    """Enable adapters if any are registered at startup."""
    if config.enable_lora or not config.adapters:
        return config
    given = sources.model[LORA_MODULES.key]
    if _ENABLE_LORA.key in sources.model:
        off = sources.model[_ENABLE_LORA.key].describe(_ENABLE_LORA.key)
        sources.lookup.problems.append(f"{off}, but {given.source} names adapters: give one of them")
        return config
    sources.lookup.replace(SettingEntry(_ENABLE_LORA.key, True, given.source, f"for {LORA_MODULES.key}"))
    return replace(config, enable_lora=True)


def _adapter_source(adapter: Mapping[str, str], model_dir: Path) -> str:
    """Return the location of an adapter: a directory, `s3://` or `hf://`. Empty if it does not exist."""
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


def _for_vectors(sources: Sources, config: ModelConfig) -> ModelConfig:
    """Return the settings, adapted for models that compute vectors or scores."""
    reranking = sources.value(RERANKING) or False
    if reranking and config.task == "auto":
        config = replace(config, task="classify")
    if (config.djl_engine or config.task in ("embed", "classify")) and ROLLING_BATCH.key not in sources.model:
        # vLLM always batches the requests of such models, so dynamic batching is not needed.
        config = replace(config, batch_size=1)
    lmi = replace(
        config.lmi,
        vector_format="vllm" if config.lmi.async_mode else "djl",
        scores_in_order=config.djl_engine or reranking,
    )
    return replace(config, lmi=lmi)


def _with_engine_chosen(sources: Sources, config: ModelConfig) -> ModelConfig:
    """Choose `rolling_batch`. A batch size above 1 means dynamic batching, even if the option has another value.

    In asynchronous mode, LMI's configurations set `rolling_batch=disable`. In that mode, the value only selects a
    schema, and the engine still batches requests.
    """
    layer, lookup = sources.model, sources.lookup
    given = layer.get(ROLLING_BATCH.key)
    batches = config.batch_size > 1
    if config.lmi.async_mode:
        if batches:
            lookup.problems.append("option.async_mode is on, but batch_size is above 1: give one of them")
        if given is not None and config.rolling_batch == "disable":
            lookup.replace(SettingEntry(ROLLING_BATCH.key, "auto", given.source, "asynchronous mode"))
            return replace(config, rolling_batch="auto")
        return config
    if batches and config.rolling_batch != "disable":
        if given is not None and given.word != "auto":
            lookup.warnings.append(
                f"batch_size above 1 takes precedence over option.rolling_batch ({given.source}): dynamic batch"
            )
        config = replace(config, rolling_batch="disable")
        source = next(layer[key].source for key in BATCH_SIZE.keys if key in layer)
        lookup.replace(SettingEntry(ROLLING_BATCH.key, "disable", source, "dynamic batch"))
    if config.rolling_batch == "disable":
        if batches and config.enable_streaming != "false":
            lookup.problems.append("option.enable_streaming is on, but batch_size is above 1: give one of them")
        return config
    for key in ("max_batch_delay", "option.enable_streaming", "option.stop_sequence"):
        if key in layer and layer[key].word != "false":
            lookup.warnings.append(f"{key} ({layer[key].source}) is ignored: it belongs to dynamic batch")
    return config


def _with_formatter(sources: Sources, lmi: LmiConfig, code: Path | None) -> LmiConfig:
    """Return the settings with the output formatter: a built-in formatter, or a function of `model.py`."""
    name = sources.value(OUTPUT_FORMATTER)
    if name in FORMATTERS:
        return replace(lmi, output_formatter=name)
    if name is not None and code is None:
        given = sources.model[OUTPUT_FORMATTER.key].describe(OUTPUT_FORMATTER.key)
        sources.lookup.problems.append(
            f"{given}: not served by this version of Slipway; allowed: json, jsonlines, sse, or a function of "
            "model.py, which is not in the model directory"
        )
    return replace(lmi, formatter_function=name)


def _engine_arguments(sources: Sources, config: ModelConfig) -> dict[str, Value]:
    """Return the arguments of the engine, from options of LMI and from other keys."""
    layer, lookup = sources.model, sources.lookup
    arguments: dict[str, Value] = {}
    for name, setting in ENGINE_ARGUMENTS.items():
        if (value := sources.value(setting)) is not None:
            arguments[name] = Value(str(value), next(layer[key] for key in setting.keys if key in layer).source)
    reads_names = config.formatters is not None or config.djl_engine
    arguments |= other_arguments(layer, config.rolling_batch, lookup, reads_names=reads_names)
    if config.rolling_batch != "disable":
        _check_json(arguments, lookup)
        _check_parsers(arguments, lookup)
    _set_draft_model(arguments, config.rolling_batch, lookup)
    _open_draft_model(arguments, sources)
    return arguments


def other_arguments(
    layer: Mapping[str, Value], rolling_batch: str, lookup: Lookup, *, reads_names: bool
) -> dict[str, Value]:
    """Handle keys that are not options of Slipway. Keys with `option.` go to the engine. Other keys have no effect.

    Args:
        layer: The keys and their values.
        rolling_batch: The value of `option.rolling_batch`.
        lookup: Collects the problems and warnings.
        reads_names: Whether the model's code or an engine of DJL may read names that Slipway does not know.
    """
    arguments: dict[str, Value] = {}
    for key, value in layer.items():
        name = key.removeprefix(PREFIX)
        if key in _NUMBERS_OF_COPIES:
            continue
        if key in options.IGNORED and not (rolling_batch == "disable" and key in options.DYNAMIC_BATCH_ARGUMENTS):
            lookup.ignore(key, value, options.IGNORED[key])
        elif key in BY_KEY:
            setting = BY_KEY[key]
            if setting in options.OF_WORKERS and value.text.strip() != setting.default:
                lookup.ignore(key, value, "it belongs to custom handlers, and the model has none")
        elif name and name != key:
            if key not in options.KNOWN:
                meant = options.meant_by(key, value)
                if not reads_names or name in options.KNOWN:  # LMI ignores a name with a superfluous prefix, too.
                    stops = rolling_batch != "disable" and name not in options.KNOWN
                    lookup.unknown(key, value, meant, stops=stops)
                    continue
                if meant:
                    lookup.warnings.append(f"{key} ({value.place}): no setting of Slipway; did you mean {meant}?")
            if rolling_batch != "disable" and (allowed := allowed_instead(name, value.text)):
                lookup.problems.append(f"{value.describe(key)}; allowed: {allowed}")
            arguments[name] = value
            lookup.entries.append(SettingEntry(key, value.text, value.source, "for the engine"))
        elif key in server.SUGGESTED:  # LMI ignores such a key, too.
            hidden = replace(value, text=HIDDEN)  # The value may be a list of API keys.
            lookup.ignore(key, hidden, f"it is a setting of the server; use {server.variable(key)}")
        elif meant := options.meant_by(key, value):  # LMI ignores a name without the prefix, too.
            lookup.unknown(key, value, meant, stops=False)
        else:
            hidden = replace(value, text=HIDDEN)  # The key may be the misspelled name of a secret.
            lookup.ignore(key, hidden, "the model has no such setting; options of the engine start with option.")
    return arguments


def _check_parsers(arguments: Mapping[str, Value], lookup: Lookup) -> None:
    """Check the names of vLLM's parsers for tool calls and for reasoning."""
    texts = {name: value.text for name, value in arguments.items()}
    for kind in PARSERS:
        if fault := name_fault(kind, texts):
            lookup.problems.append(f"{arguments[kind].describe(f'{PREFIX}{kind}')}: {fault}")


def _check_json(arguments: Mapping[str, Value], lookup: Lookup) -> None:
    """Check engine arguments that look like JSON objects.

    Chat templates are not checked, because a template may also begin with a brace.
    """
    for name, value in arguments.items():
        if value.text.lstrip().startswith("{") and name != "chat_template":
            try:
                json_value(value.text)
            except ValueError as error:
                lookup.problems.append(f"{value.describe(PREFIX + name)}: {error}; allowed: JSON")


def _set_draft_model(arguments: dict[str, Value], rolling_batch: str, lookup: Lookup) -> None:
    """Build vLLM's `speculative_config` from LMI's two options for a draft model."""
    draft = arguments.pop(DRAFT_MODEL.name, None)
    length = arguments.pop(DRAFT_LENGTH.name, None)
    if rolling_batch == "disable" or draft is None:
        reason = "it belongs to vLLM" if rolling_batch == "disable" else f"there is no {DRAFT_MODEL.key}"
        for key, value in ((DRAFT_MODEL.key, draft), (DRAFT_LENGTH.key, length)):
            if value is not None:
                lookup.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
                lookup.replace(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))
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
    """If the draft model is on S3 or in the model directory, replace its name by its local directory."""
    given = arguments.get(_SPECULATIVE)
    if given is None:
        return
    try:
        config = json_value(given.text)
    except ValueError:
        return  # `_check_json` reports the error.
    url = config.get("model") if isinstance(config, dict) else None
    if not isinstance(url, str) or not url:
        return
    if is_s3(url):
        try:
            directory = str(sources.remote.open(url))
        except SourceError as error:
            sources.lookup.problems.append(f"{given.describe(PREFIX + _SPECULATIVE)}: {error}")
            return
    elif os.path.isdir(sources.model_dir / url):
        directory = str(sources.model_dir / url)  # If `url` is an absolute path, this is the same path.
    else:
        return  # `url` is a hub id, or a missing directory. The engine reports a missing directory.
    if fault := location.model_fault(Path(directory)):
        sources.lookup.problems.append(f"{given.describe(PREFIX + _SPECULATIVE)}: {fault}")
    arguments[_SPECULATIVE] = Value(json.dumps(config | {"model": directory}), given.source)


def _engine_devices(sources: Sources, config: ModelConfig) -> tuple[int, ...] | None:
    """Return the GPUs that the engine may use.

    As in LMI, `load_on_devices` may list only the first GPU of each copy. The copy's other GPUs are then added.
    """
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
    degree, stages = config.tensor_parallel_degree, config.pipeline_parallel_degree
    if degree is None or not allowed or why_one_copy(config.engine_arguments):
        return allowed
    try:
        groups = device_groups(sources.gpus, degree * stages, load_on.text)
    except ValueError:
        return allowed  # There are too few GPUs. The engine reports this.
    return tuple(sorted({*allowed, *(int(device) for group in groups for device in group.split(","))}))


def _copies(sources: Sources, config: ModelConfig) -> tuple[int | None, int | None]:
    """Return the smallest and the largest number of copies. Warn about numbers that the engine cannot run."""
    lookup, layer = sources.lookup, _numbers_of_copies(sources)
    given = {setting.key: layer[key] for setting in options.COPIES for key in setting.keys if key in layer}
    if config.parallel_loading:
        given[_PARALLEL_LOADING] = sources.model[_PARALLEL_LOADING]
    least, most = (lookup.value(setting, layer) for setting in options.COPIES)
    if most == 0:
        lookup.warnings.append(f"maxWorkers ({given['maxWorkers'].source}) is 0, which is the default, as in LMI")
        most = None
    if least == 0:
        lookup.warnings.append(f"minWorkers ({given['minWorkers'].source}) is 0: one copy is always loaded")
        least = 1
    reason = _why_one_copy(config)
    if not reason and least is not None and most is not None and most < least:
        lookup.warnings.append(f"maxWorkers ({given['maxWorkers'].source}) is below minWorkers: {least} run")
        most = least
    takes_all = sources.one_model and sources.gpus > 0 and config.devices != ()
    if takes_all and (least or 1) == (most or 1) == 1:
        least = most = None  # In LMI, these numbers are per GPU: with 1, the default, each GPU may have a copy.
    largest = 1 if reason else most or (None if takes_all else least or 1)
    if most is None:
        note = "" if largest else "as many copies as the GPUs hold"
        if (value := given.get("maxWorkers")) is not None:
            lookup.replace(SettingEntry("maxWorkers", value.text, value.source, note))
        else:
            lookup.replace(SettingEntry("maxWorkers", largest, DEFAULT, note))
    if largest == 1:
        why = reason or "the model has one copy"
        numbers = {"minWorkers": least or 1, "maxWorkers": most or 1}
        vain = {key: value for key, value in given.items() if numbers.get(key) != 1}
        for key, value in vain.items():
            lookup.replace(SettingEntry(key, value.text, value.source, f"ignored: {why}"))
        if vain:
            named = ", ".join(f"{key} ({value.source})" for key, value in vain.items())
            lookup.warnings.append(f"{named} {'is' if len(vain) == 1 else 'are'} ignored: {why}")
    return None if reason else least, largest


def _numbers_of_copies(sources: Sources) -> dict[str, Value]:
    """Return the model's settings. A number of workers that is meant for scripts only is left out."""
    layer = sources.workers()
    for setting in options.COPIES:
        value = layer.get(setting.key)
        if value is None or not value.source.endswith(_WORKERS_OF_SCRIPTS):
            continue
        other = sources.given.get(setting.key) or sources.variables.get(f"SERVING_{setting.aliases[0].upper()}")
        layer = {key: each for key, each in layer.items() if key != setting.key}
        if other is not None:
            layer[setting.key] = other
        if setting is options.COPIES[0]:
            reason = "it is for scripts; maxWorkers counts the copies of a model"
            if value.word != "1":
                sources.lookup.warnings.append(f"{_WORKERS_OF_SCRIPTS} ({value.source}) is ignored: {reason}")
            sources.lookup.entries.append(
                SettingEntry(_WORKERS_OF_SCRIPTS, value.text, value.source, f"ignored: {reason}")
            )
    return layer


def _why_one_copy(config: ModelConfig) -> str:
    """Return why the model cannot have several copies. Empty if it can."""
    if config.rolling_batch == "disable":
        return "dynamic batch runs one copy of the model"
    argument = why_one_copy(config.engine_arguments)
    return f"with {PREFIX}{argument} the model has one copy" if argument else ""


# A model with a custom handler


def _handler_model(sources: Sources, entry_point: str, function: str) -> ModelConfig:
    model_id, name, revision = _model(sources, required=False)
    packages = _packages(sources)
    config = sources.read(
        ModelConfig,
        only=_SHARED,
        name=name,
        model_dir=sources.model_dir,
        model_id=model_id,
        revision=revision,
    )
    if not any(key in sources.model for key in MAX_ROLLING_BATCH_SIZE.keys):
        config = replace(config, max_rolling_batch_size=_HANDLERS_ROLLING_BATCH)
        sources.lookup.replace(SettingEntry(MAX_ROLLING_BATCH_SIZE.key, _HANDLERS_ROLLING_BATCH, DEFAULT))
    path, given = Path(entry_point), sources.model.get(ROLLING_BATCH.key)
    is_script = path.is_file() and defines(path, MODEL_FN) and not defines(path, function)
    if is_script and given is not None and given.word != "disable":
        # A script handles one request at a time.
        sources.lookup.ignore(ROLLING_BATCH.key, given, f"{path.name} has {MODEL_FN} and no `{function}`")
        sources.model[ROLLING_BATCH.key] = Value("disable", given.source)
    return replace(config, handler=handler_settings(sources, entry_point, function, model_id, packages))


# Models with an engine and models with a custom handler


def _model(sources: Sources, *, required: bool) -> tuple[str, str, str | None]:
    """Return the model to load, its name, and its revision. The model and the name are empty if no model is found.

    Args:
        required: Whether to add a problem if no model is given or the model is not found. False for a custom handler:
            it may bring its own model, and `option.model_id` may have another meaning.
    """
    lookup = sources.lookup
    setting = MODEL_ID if required else _NAME_FOR_HANDLERS
    model_id = sources.value(setting)
    given = next((sources.model[key] for key in setting.keys if key in sources.model), None)
    variable = _model_variable(sources, given)
    by_variable = given is None and variable is not None
    revision = _revision(sources, by_variable=by_variable, required=required)
    value = given or variable
    if value is not None and model_id is not None:
        try:
            if is_s3(model_id):
                model_id = str(sources.remote.open(model_id))
            else:
                model_id = location.resolve_model_id(model_id, sources.model_dir)
        except (ModelNotFound, SourceError) as error:
            if required or isinstance(error, SourceError):
                lookup.problems.append(f"{value.describe(MODEL_ID.key)}: {error}")
    elif value is None and not sources.has_model_dir:
        pass  # The model directory, which may name the model, is missing. This is already reported.
    elif value is None and required and not location.has_model(sources.model_dir):
        lookup.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({sources.model_dir})"
        )
    elif value is None:
        model_id = str(sources.model_dir)
        lookup.replace(SettingEntry(MODEL_ID.key, model_id, DEFAULT, "the model directory"))
    # If `hf_config_path` is set, the model's configuration is in another place.
    has_config = model_id is not None and os.path.isdir(model_id) and f"{PREFIX}hf_config_path" not in sources.model
    if required and has_config and (fault := location.model_fault(Path(str(model_id)))):
        shown = f"model directory ({model_id})" if value is None else value.describe(MODEL_ID.key)
        lookup.problems.append(f"{shown}: {fault}")
    name = lookup.value(server.MODEL_NAME, sources.server)
    if name is None and model_id is not None:
        name = location.model_name(model_id, sources.model_dir, by_variable)
        lookup.entries.append(SettingEntry("model_name", name, DEFAULT))
    return model_id or "", name or "", revision


def _model_variable(sources: Sources, given: Value | None) -> Value | None:
    """Return the value of HF_MODEL_ID if it names the model. Warn if another source names the model."""
    variable = sources.variables.get("HF_MODEL_ID")
    if variable is None or (given is None and not location.is_store_of(variable.text, (sources.model_dir,))):
        return variable
    if given is not None:
        # HF_MODEL_ID is not ignored if it names the same model as the other source, or the folder on S3 whose
        # serving.properties is the other source.
        is_same = given.text.strip() == variable.text.strip() or sources.remote.has(variable.text)
        if not is_same:
            sources.lookup.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    return None  # Another source names the model, or the variable names the parent of the model directory.


def _revision(sources: Sources, *, by_variable: bool, required: bool) -> str | None:
    """Return the revision. HF_REVISION counts only if HF_MODEL_ID selects the model. Otherwise it is ignored."""
    revision = sources.value(_REVISION) if required else None
    variable = sources.variables.get("HF_REVISION")
    if variable is None or _REVISION.key in sources.model:
        return revision
    if not by_variable:
        sources.lookup.ignore("HF_REVISION", variable, "it goes with HF_MODEL_ID; use option.revision")
        return revision
    text = variable.text.strip()
    sources.lookup.replace(SettingEntry(_REVISION.key, text, variable.source))
    return text


def _packages(sources: Sources) -> PackageConfig:
    wanted = sources.variables.get("STANDARD_AUTO_INSTALL_REQ")
    pip_arguments: tuple[str, ...] = ()
    if (arguments := sources.variables.get("STANDARD_PIP_ARGS")) is not None:
        try:
            pip_arguments = tuple(shlex.split(arguments.text))
        except ValueError as error:
            sources.lookup.problems.append(
                f"{arguments.describe('STANDARD_PIP_ARGS')}: {error}; allowed: arguments of pip install as in a shell"
            )
    return PackageConfig(
        offline=is_true(sources.variables.get("DJL_OFFLINE")),
        install_requirements=wanted is None or wanted.word not in FALSE,
        pip_arguments=pip_arguments,
    )
