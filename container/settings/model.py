"""The fields of `ModelSettings`: of a model that an engine serves, or of one with a handler of its own."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from container.devices import allowed_devices, device_groups, gpu_count
from container.settings import options
from container.settings.aliases import ALIASES
from container.settings.options import (
    ASYNC_MODE,
    BATCH_SIZE,
    BY_KEY,
    ENTRY_POINT,
    FUNCTION,
    HANDLER_OPTIONS,
    MAX_ROLLING_BATCH_SIZE,
    MODEL_ID,
    PREFIX,
    ROLLING_BATCH,
)
from container.settings.parsers import FALSE, FORMATTERS, assignments, names
from container.settings.properties import HIDDEN, Value, is_true, quoted
from container.settings.server_options import MODEL_NAME_OPTION
from container.settings.settings import SettingEntry
from container.settings.sources import DEFAULT, Lookup, Sources, did_you_mean
from container.sources import location
from container.sources.location import RemoteModels, SourceError, is_s3
from handlers.model_settings import HandlerSettings

_BUILT_IN = frozenset({"djl_python.huggingface", "djl_python.tensorrt_llm"})
"""LMI's own handlers, in whose place an engine serves."""
_ASYNCHRONOUS = frozenset({"djl_python.lmi_vllm.vllm_async_service", "djl_python.lmi_trtllm.trtllm_async_service"})
"""LMI's own handlers with the newer schema, as with `option.async_mode=true`."""
_FORMER = frozenset(
    {"djl_python.deepspeed", "djl_python.tensorrt_llm_python", "djl_python.transformers_neuronx", "djl_python.tnx"}
)
"""LMI's former handlers for text generation."""
_NOT_SERVED = frozenset(
    f"djl_python.{name}"
    for name in ("sklearn_handler", "xgboost_handler", "sagemaker", "stable_diffusion_inf2", "stable-diffusion")
)
"""LMI's handlers for other models than language models."""
_SHARED_OPTIONS = frozenset(
    {
        *("batch_size", "max_batch_delay", "option.predict_timeout", "option.model_loading_timeout"),
        *("option.max_rolling_batch_size", "option.enable_lora"),
    }
)
"""The options of an engine's model that a handler's model has, too."""
_HANDLERS_ROLLING_BATCH = 32
"""LMI's default of `option.max_rolling_batch_size` where none of its own engines runs."""
_KNOWN = frozenset({*(option.key for option in options.MODEL_OPTIONS), *(alias.key for alias in ALIASES)})
_LOCAL_PATHS = ("tokenizer", "hf_config_path")
"""Engine arguments that may be directories."""


def model_fields(sources: Sources, lookup: Lookup) -> dict[str, Any]:
    """The fields of `ModelSettings`; wrong values are added to `lookup.problems`."""
    function = str(lookup.value(FUNCTION, sources.model) or FUNCTION.default)
    code = _find_code(sources.model_dir)
    entry_point = _entry_point(sources, code, function, lookup)
    if entry_point is None:
        return _engine_model(sources, code, lookup)
    return _handler_model(sources, entry_point, function, lookup)


def _find_code(model_dir: Path) -> Path | None:
    """`model.py`, or `<directory>.py`, if it is there."""
    paths = (model_dir / "model.py", model_dir / f"{model_dir.name}.py")
    return next((path for path in paths if os.path.isfile(path)), None)


def _entry_point(sources: Sources, code: Path | None, function: str, lookup: Lookup) -> str | None:
    """The handler's file or module; None where an engine serves."""
    given = sources.model.get(ENTRY_POINT.key) or sources.variables.get("DJL_ENTRY_POINT")
    text = lookup.value(ENTRY_POINT, sources.model, sources.variables)
    if text is None or given is None:
        named = MODEL_ID.key in sources.model or "HF_MODEL_ID" in sources.variables
        has_model = named or location.has_model(sources.model_dir)
        return str(code) if code is not None and (_defines(code, function) or not has_model) else None
    name = str(text)
    if name in _BUILT_IN | _ASYNCHRONOUS | _FORMER:
        _use_engine(name, given, sources, lookup)
        return None
    fault = ""
    if name in _NOT_SERVED:
        fault = "not served by this version of Slipway; only language models are served"
    elif "://" in name:
        fault = "not served by this version of Slipway; put the file into the model directory"
    elif name.endswith(".py"):
        path = sources.model_dir / name
        if os.path.isfile(path):
            return str(path)
        fault = "there is no such file in the model directory"
    elif not all(part.isidentifier() for part in name.split(".")):
        fault = "allowed: a file that ends in .py, or the name of a module"
    if fault:
        lookup.problems.append(f"{given.describe(ENTRY_POINT.key)}: {fault}")
    return name  # also a wrong one: a handler was meant, and a missing model is no problem of its own


def _defines(path: Path, function: str) -> bool:
    """Whether a file seems to define the function; true of a broken file, so that running it says what is wrong."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    bound = set(_bound_names(tree.body))
    return function in bound or "*" in bound


def _bound_names(body: Iterable[ast.AST]) -> Iterator[str]:
    """The names that a module's statements bind, those within other statements included.

    `*` stands for names that cannot be told: of a star import, `exec` and the like.
    """
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                yield from (one for inner in ast.walk(node) if isinstance(inner, ast.Global) for one in inner.names)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)):
                yield name
            case ast.Call(func=ast.Name(id="exec" | "globals")):
                yield "*"
            case _:
                yield from _bound_names(ast.iter_child_nodes(node))


def _use_engine(name: str, given: Value, sources: Sources, lookup: Lookup) -> None:
    """Set what the name of one of LMI's own handlers implies."""
    if name in _FORMER:
        lookup.warnings.append(f"{ENTRY_POINT.key} is {name} ({given.source}): option.rolling_batch chooses the engine")
    if name in _ASYNCHRONOUS:
        sources.model.setdefault(ASYNC_MODE.key, Value("true", given.source))
    if "trtllm" in name or name == "djl_python.tensorrt_llm":
        sources.model.setdefault(ROLLING_BATCH.key, Value("trtllm", given.source))


def _engine_model(sources: Sources, code: Path | None, lookup: Lookup) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir, "engine_arguments": {}, "engine_argument_sources": {}}
    for option in options.SERVED:
        value = lookup.value(option, sources.model, sources.variables)
        if option.argument is None:
            fields[option.field] = value
        elif value is not None:
            given = next(sources.model[key] for key in option.keys if key in sources.model)
            _add_argument(fields, option.argument, Value(str(value), given.source))
    fields |= _package_fields(sources, lookup)
    fields["async_mode"] = lookup.value(ASYNC_MODE, sources.model)
    fields["served_model_names"] = names(str(fields.pop("served_model_name") or ""))
    fields["stop_sequences"] = tuple(json.loads(fields.pop("stop_sequence") or "[]"))
    if fields["tensor_parallel_degree"] == "max":
        fields["tensor_parallel_degree"], fields["tensor_parallel_max"] = None, True
    _choose_engine(sources.model, fields, lookup)
    _set_formatters(sources.model, fields, code, lookup)
    for option in options.NOT_SERVED:
        lookup.value(option, sources.model, sources.variables)
    _pass_other_keys(sources.model, fields, lookup)
    _open_remote_paths(fields, sources.remote_models, lookup)
    fields["devices"] = _engine_devices(str(fields["devices"] or "*").strip(), lookup)
    _set_model(sources, fields, lookup, required=True)
    if "HF_TOKEN" in sources.variables:
        lookup.entries.append(SettingEntry("HF_TOKEN", HIDDEN, sources.variables["HF_TOKEN"].source))
    return fields


def _add_argument(fields: dict[str, Any], name: str, value: Value) -> None:
    fields["engine_arguments"][name] = value.text
    fields["engine_argument_sources"][name] = value.source


def _choose_engine(layer: Mapping[str, Value], fields: dict[str, Any], lookup: Lookup) -> None:
    """Set `rolling_batch`: a batch size above 1 means dynamic batch, whatever the option says.

    In the asynchronous mode `rolling_batch=disable`, as LMI's configurations have it, only selects the schema; the
    engine batches all the same.
    """
    given = layer.get(ROLLING_BATCH.key)
    if given is not None and given.word == "tnx":
        lookup.warnings.append(f"{given.describe(ROLLING_BATCH.key)}: it runs on vLLM")
        lookup.replace(SettingEntry(ROLLING_BATCH.key, "vllm", given.source, "it runs on vLLM"))
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


def _pass_other_keys(layer: Mapping[str, Value], fields: dict[str, Any], lookup: Lookup) -> None:
    """Hand other keys to the engine if they begin with `option.`, and warn of those that have no effect."""
    handler_keys = {option.key for option in HANDLER_OPTIONS if option is not ASYNC_MODE}
    ignored = dict(options.IGNORED)
    if fields["rolling_batch"] == "disable":
        for key in options.DYNAMIC_BATCH_ARGUMENTS:
            del ignored[key]
    for key, value in layer.items():
        name = key.removeprefix(PREFIX)
        if key in ignored:
            if value.word == options.IGNORED_SILENTLY.get(key):
                lookup.entries.append(SettingEntry(key, value.text, value.source))
            else:
                lookup.ignore(key, value, ignored[key])
        elif key in handler_keys:
            if value.text.strip() != BY_KEY[key].default:
                lookup.ignore(key, value, "it belongs to custom handlers, and the model has none")
        elif key in BY_KEY:
            continue
        elif name and name != key:
            _add_argument(fields, name, value)
            lookup.entries.append(SettingEntry(key, value.text, value.source, "for the engine"))
        else:
            known = f"{PREFIX}{key}" in BY_KEY
            hint = f"{PREFIX}{key} is meant" if known else "options of the engine start with option."
            lookup.ignore(key, value, f"the model has no such setting; {hint}")


def _open_remote_paths(fields: dict[str, Any], remote: RemoteModels, lookup: Lookup) -> None:
    """Put directories of this machine in the place of `s3://`."""
    arguments: dict[str, str] = fields["engine_arguments"]
    for name, text in list(arguments.items()):
        try:
            if name in _LOCAL_PATHS and is_s3(text):
                arguments[name] = str(remote.open(text))
            elif name == "speculative_config":
                arguments[name] = _with_local_model(text, remote)
        except SourceError as error:
            given = Value(text, fields["engine_argument_sources"][name])
            lookup.problems.append(f"{given.describe(PREFIX + name)}: {error}")


def _with_local_model(text: str, remote: RemoteModels) -> str:
    """The configuration with the directory of its model; the engine says what is wrong with other text."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, str) or not is_s3(model):
        return text
    return json.dumps(config | {"model": str(remote.open(model))})


def _engine_devices(load_on: str, lookup: Lookup) -> tuple[int, ...] | None:
    gpus = gpu_count()
    if load_on == "*" or not gpus:
        return None
    try:
        return allowed_devices(gpus, load_on)
    except ValueError as error:
        lookup.problems.append(f"load_on_devices is {quoted('', load_on)}: {error}")
        return None


def misspelt_options(fields: Mapping[str, Any]) -> Iterator[str]:
    """A warning for each engine argument whose name is close to that of a known option.

    The engine itself warns of arguments that it does not have.
    """
    for name, source in fields.get("engine_argument_sources", {}).items():
        key = PREFIX + name
        if key not in BY_KEY and key not in _KNOWN and (hint := did_you_mean(key.lower(), _KNOWN)):
            yield f"{key} ({source}) goes to the engine as it is{hint}"


def _set_model(sources: Sources, fields: dict[str, Any], lookup: Lookup, *, required: bool) -> None:
    """Set `model_id` to what is loaded, and the model's name.

    `required`: without a model, or with one that is not found, there is a problem. A custom handler may bring its own
    model, and may give `option.model_id` another meaning.
    """
    if "model_id" not in fields:
        fields["model_id"] = lookup.value(MODEL_ID, sources.model, sources.variables)
    given = sources.model.get(MODEL_ID.key)
    variable = sources.variables.get("HF_MODEL_ID")
    if given is None and variable is not None and location.is_store_of(variable.text, (sources.model_dir,)):
        variable = None  # the same model, by the directory around it
    if given is not None and variable is not None:
        # The same model, or the one in S3 whose serving.properties names the other.
        is_same = given.text.strip() == variable.text.strip() or sources.remote_models.has(variable.text)
        if not is_same:
            lookup.ignore("HF_MODEL_ID", variable, f"one model is served, that of {given.source}")
    by_variable = given is None and variable is not None
    _set_revision(sources, fields, by_variable, lookup)
    value = given or variable
    if value is not None and fields["model_id"] is not None:
        try:
            fields["model_id"] = _resolved(fields["model_id"], sources)
        except (location.ModelNotFound, SourceError) as error:
            if required or isinstance(error, SourceError):
                lookup.problems.append(f"{value.describe(MODEL_ID.key)}: {error}")
    elif value is None and required and not location.has_model(sources.model_dir):
        lookup.problems.append(
            f"there is no model: give option.model_id in serving.properties or HF_MODEL_ID in the environment, or put "
            f"the model with its {location.CONFIG_FILE} into the model directory ({sources.model_dir})"
        )
    elif value is None:
        fields["model_id"] = str(sources.model_dir)
        lookup.replace(SettingEntry(MODEL_ID.key, str(sources.model_dir), DEFAULT, "the model directory"))
    fields["name"] = lookup.value(MODEL_NAME_OPTION, sources.server)
    if fields["name"] is None and fields["model_id"] is not None:
        fields["name"] = location.model_name(fields["model_id"], sources.model_dir, by_variable)
        lookup.entries.append(SettingEntry("model_name", fields["name"], DEFAULT))


def _resolved(text: str, sources: Sources) -> str:
    if is_s3(text):
        return str(sources.remote_models.open(text))
    return location.resolve_model_id(text, sources.model_dir)


def _set_revision(sources: Sources, fields: dict[str, Any], by_variable: bool, lookup: Lookup) -> None:
    """HF_REVISION belongs to HF_MODEL_ID; beside another model it would name the wrong commit."""
    revision = sources.variables.get("HF_REVISION")
    if revision is None or "option.revision" in sources.model:
        return
    if not by_variable:
        lookup.ignore("HF_REVISION", revision, "it goes with HF_MODEL_ID; use option.revision")
        return
    fields["revision"] = revision.text.strip()
    lookup.replace(SettingEntry("option.revision", fields["revision"], revision.source))


def _handler_model(sources: Sources, entry_point: str, function: str, lookup: Lookup) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_dir": sources.model_dir}
    for option in options.SERVED:
        if option.key in _SHARED_OPTIONS:
            fields[option.field] = lookup.value(option, sources.model, sources.variables)
    if not any(key in sources.model for key in MAX_ROLLING_BATCH_SIZE.keys):
        fields["max_rolling_batch_size"] = _HANDLERS_ROLLING_BATCH
        lookup.replace(SettingEntry(MAX_ROLLING_BATCH_SIZE.key, _HANDLERS_ROLLING_BATCH, DEFAULT))
    _set_model(sources, fields, lookup, required=False)
    handler = _handler_fields(sources, fields["model_id"], lookup)
    if handler is not None:
        fields["handler"] = HandlerSettings(entry_point=entry_point, function=function, **handler)
    return fields


def _handler_fields(sources: Sources, model_id: str | None, lookup: Lookup) -> dict[str, Any] | None:
    """The fields of `HandlerSettings`; None where something is wrong with them, which is then among the problems."""
    problems = len(lookup.problems)
    gpus = gpu_count()
    device = "gpu" if gpus else "cpu"
    own = {key: sources.model.get(f"{device}.{key}") for key in ("minWorkers", "maxWorkers")}
    layer = sources.model | {key: value for key, value in own.items() if value is not None}
    fields: dict[str, Any] = {
        option.field: lookup.value(option, layer, sources.variables) for option in HANDLER_OPTIONS
    }
    reported = {entry.name for entry in lookup.entries}
    for key, value in sources.model.items():
        if key not in reported and (key not in BY_KEY or BY_KEY[key].key not in reported):
            lookup.entries.append(SettingEntry(key, value.text, value.source, "for the handler"))
    fields["devices"] = _worker_devices(sources, gpus, lookup)
    if len(lookup.problems) > problems:
        return None
    for name in ("min_workers", "max_workers"):  # both are for each device
        fields[name] *= max(len(fields["devices"]), 1)
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
    properties = _handler_properties(sources, model_id)
    given = sources.model.get(ROLLING_BATCH.key)
    rolling_batch = given.word if given is not None else "disable"
    if rolling_batch == "auto" and _is_hugging_face(sources.model_dir, model_id):
        # LMI makes `disable` of `auto` where there is a Hugging Face model and its own engine is not used.
        properties["rolling_batch"] = rolling_batch = "disable"
    fields["rolling_batch"] = rolling_batch != "disable"
    return fields | _package_fields(sources, lookup) | {"properties": properties}


def _worker_devices(sources: Sources, gpus: int, lookup: Lookup) -> tuple[str, ...]:
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
        lookup.problems.append(f"the handler's workers cannot be placed: {error}")
        return ()


def _is_hugging_face(model_dir: Path, model_id: str | None) -> bool:
    """Whether there is a Hugging Face model; a hub id is taken for one."""
    if model_id is None or model_id == str(model_dir):
        return location.has_model(model_dir)
    return location.is_hub_id(model_id) or location.has_model(Path(model_id))


def _handler_properties(sources: Sources, model_id: str | None) -> dict[str, str]:
    """What LMI tells a handler: every setting of the model, without `option.`."""
    properties = {key.removeprefix(PREFIX): value.text for key, value in sources.model.items()}
    named = "model_id" in properties or "HF_MODEL_ID" in sources.variables
    if named and model_id is not None:
        properties["model_id"] = model_id
    for variable in ("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE"):
        if variable in sources.variables:
            properties.setdefault(variable.lower(), sources.variables[variable].text)
    return properties


def _package_fields(sources: Sources, lookup: Lookup) -> dict[str, Any]:
    """How the packages of `requirements.txt` are installed."""
    wanted = sources.variables.get("STANDARD_AUTO_INSTALL_REQ")
    arguments = sources.variables.get("STANDARD_PIP_ARGS")
    fields: dict[str, Any] = {
        "offline": is_true(sources.variables.get("DJL_OFFLINE")),
        "install_requirements": wanted is None or wanted.word not in FALSE,
        "pip_arguments": (),
    }
    if arguments is not None:
        try:
            fields["pip_arguments"] = tuple(shlex.split(arguments.text))
        except ValueError as error:
            lookup.problems.append(
                f"{arguments.describe('STANDARD_PIP_ARGS')}: {error}; allowed: arguments of pip install as in a shell"
            )
    return fields
