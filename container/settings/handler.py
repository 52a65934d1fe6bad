"""The settings of a customer's handler: `HandlerSettings`, and the properties that its first call sees."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container.devices import device_groups, gpu_count
from container.settings import options
from container.settings.options import HANDLER_OPTIONS, assignments
from container.settings.parsers import FALSE, TRUE
from container.settings.properties import Value, quoted
from container.settings.sources import Resolution, SettingEntry, Sources
from container.sources import location
from handlers.model_settings import HandlerSettings

BUILT_IN = frozenset({"djl_python.huggingface", "djl_python.tensorrt_llm"})
"""Names of LMI's own handlers whose work the engines do."""
ASYNCHRONOUS = frozenset({"djl_python.lmi_vllm.vllm_async_service", "djl_python.lmi_trtllm.trtllm_async_service"})
"""Those whose answers have the newer schema, as under `option.async_mode=true`."""
FORMER = frozenset(
    {"djl_python.deepspeed", "djl_python.tensorrt_llm_python", "djl_python.transformers_neuronx", "djl_python.tnx"}
)
"""Names of LMI's own handlers for text generation that LMI itself has given up."""
NOT_SERVED = {
    "djl_python.sklearn_handler": "only language models are served",
    "djl_python.xgboost_handler": "only language models are served",
    "djl_python.sagemaker": "only language models are served",
    "djl_python.stable_diffusion_inf2": "only language models are served",
    "djl_python.stable-diffusion": "only language models are served",
}


class CodeNotFound(Exception):
    """The entry point names nothing that can be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Code:
    """A file with Python code in the model directory."""

    path: Path
    has_handler: bool
    """It defines the handler function, as far as can be told from its text; a broken file counts as one that does,
    so that running it says what is wrong."""


def find_code(model_dir: Path, function: str) -> Code | None:
    """`model.py`, or `<directory>.py`, if it is there."""
    for name in ("model.py", f"{model_dir.name}.py"):
        path = model_dir / name
        if os.path.isfile(path):
            return Code(path, _defines(path, function))
    return None


def entry_point(text: str, model_dir: Path) -> str:
    """The absolute path of a file, or a module's name, for what `option.entryPoint` says.

    Raises:
        CodeNotFound: it is none of both.
    """
    if text in NOT_SERVED:
        raise CodeNotFound(f"not served by this version of Slipway; {NOT_SERVED[text]}")
    if "://" in text:
        raise CodeNotFound("not served by this version of Slipway; put the file into the model directory")
    if text.endswith(".py"):
        path = model_dir / text
        if not os.path.isfile(path):
            raise CodeNotFound("there is no such file in the model directory")
        return str(path)
    if not all(part.isidentifier() for part in text.split(".")):
        raise CodeNotFound("allowed: a file that ends in .py, or the name of a module")
    return text


def _defines(path: Path, function: str) -> bool:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    names = set(_names(tree.body))
    return function in names or "*" in names


def _names(body: Iterable[ast.AST]) -> Iterator[str]:
    """What a module's statements bind, those within other statements included.

    `*` stands for what cannot be told: a star import, `exec` and the like.
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
                yield from _names(ast.iter_child_nodes(node))


_BY_DEVICE = {"min_workers": "minWorkers", "max_workers": "maxWorkers"}


def handler_settings(
    sources: Sources, entry_point: str, model: Mapping[str, Any], found: Resolution
) -> HandlerSettings | None:
    """The handler's settings; None where something is wrong with them, which is then among the problems."""
    gpus = gpu_count()
    layer = _for_this_device(sources.model, "gpu" if gpus else "cpu")
    problems = len(found.problems)
    fields: dict[str, Any] = {
        option.field: found.take(option, layer, sources.variables) for option in HANDLER_OPTIONS if option.field
    }
    automatic = _is_auto(sources.model) and _has_config(sources.model_dir, model["model_id"])
    fields["rolling_batch"] = _rolling_batch(sources.model) and not automatic
    _record_others(sources.model, found)
    fields["devices"] = _devices(sources, gpus, found)
    if len(found.problems) > problems:
        return None
    _count_by_device(fields, max(len(fields["devices"]), 1))
    fields["environment"] = assignments(fields["environment"]) if fields["environment"] else {}
    fields["max_workers"] = _most_workers(fields, layer, found)
    fields["python_executable"] = _executable(fields["python_executable"], found)
    properties = _properties(sources, model)
    if automatic:
        properties["rolling_batch"] = "disable"
    return HandlerSettings(entry_point=entry_point, properties=properties, **package_fields(sources, found), **fields)


def package_fields(sources: Sources, found: Resolution) -> dict[str, Any]:
    """How the packages of `requirements.txt` are installed (lmi.md 2.15; sagemaker_hosting.md 10)."""
    arguments = sources.variables.get("STANDARD_PIP_ARGS")
    wanted = sources.variables.get("STANDARD_AUTO_INSTALL_REQ")
    fields: dict[str, Any] = {"offline": is_offline(sources.variables), "pip_arguments": ()}
    fields["install_requirements"] = wanted is None or wanted.text.strip().lower() not in FALSE
    if arguments is not None:
        try:
            fields["pip_arguments"] = tuple(shlex.split(arguments.text))
        except ValueError as error:
            found.problems.append(
                f"STANDARD_PIP_ARGS is {quoted(arguments.source, arguments.text)} ({arguments.source}): {error}; "
                "allowed: arguments of pip install as in a shell"
            )
    return fields


def is_offline(variables: Mapping[str, Value]) -> bool:
    """Whether packages are to be installed without an index (lmi.md 2.15)."""
    offline = variables.get("DJL_OFFLINE")
    return offline is not None and offline.text.strip().lower() in TRUE


def _for_this_device(layer: Mapping[str, Value], device: str) -> dict[str, Value]:
    """`gpu.minWorkers` and the like go before `minWorkers` on such a machine (lmi.md 2.10)."""
    own = {key: layer[f"{device}.{key}"] for key in _BY_DEVICE.values() if f"{device}.{key}" in layer}
    return {**layer, **own}


def _devices(sources: Sources, gpus: int, found: Resolution) -> tuple[str, ...]:
    load_on = sources.model.get("load_on_devices")
    degrees = [
        sources.model.get(f"option.{name}") or sources.variables.get(name.upper())
        for name in ("tensor_parallel_degree", "pipeline_parallel_degree")
    ]
    each = 1
    for degree in degrees:
        text = degree.text.strip().lower() if degree is not None else "1"
        each *= max(gpus, 1) if text == "max" else int(text) if text.isdecimal() else 1
    try:
        return device_groups(gpus, max(each, 1), load_on.text if load_on is not None else "*")
    except ValueError as error:
        found.problems.append(f"the handler's workers cannot be placed: {error}")
        return ()


def _count_by_device(fields: dict[str, Any], devices: int) -> None:
    """`minWorkers` and `maxWorkers` are for each device."""
    for name in _BY_DEVICE:
        fields[name] *= devices


def _rolling_batch(layer: Mapping[str, Value]) -> bool:
    """A handler that the settings give a rolling batch is called with all active requests (lmi.md 7.7)."""
    value = layer.get("option.rolling_batch")
    return value is not None and value.text.strip().lower() != "disable"


def _most_workers(fields: Mapping[str, Any], layer: Mapping[str, Value], found: Resolution) -> int:
    least, most = fields["min_workers"], fields["max_workers"]
    given = layer.get("maxWorkers") or layer.get("max_workers")
    if given is not None and most < least:
        found.warnings.append(f"maxWorkers ({given.source}) is below minWorkers: {least} run")
    return int(max(least, most))


def _executable(text: Any, found: Resolution) -> str | None:
    if text is None:
        return None
    path = shutil.which(str(text))
    if path is None:
        found.problems.append(f'option.pythonExecutable is "{text}": there is no such program')
    return path


def _is_auto(layer: Mapping[str, Value]) -> bool:
    value = layer.get("option.rolling_batch")
    return value is not None and value.text.strip().lower() == "auto"


def _has_config(model_dir: Path, model_id: str | None) -> bool:
    """Whether there is a Hugging Face model, for which LMI makes `disable` of `auto` where its own engine is not used
    (lmi.md 2.8); a hub id is taken for one."""
    if model_id is None or model_id == str(model_dir):
        return location.has_model(model_dir)
    return location.is_hub_id(model_id) or location.has_model(Path(model_id))


def _record_others(layer: Mapping[str, Value], found: Resolution) -> None:
    recorded = {entry.name for entry in found.entries}
    for key, value in layer.items():
        known = options.BY_KEY.get(key)
        if key not in recorded and (known is None or known.key not in recorded):
            found.entries.append(SettingEntry(key, value.text, value.source, "for the handler"))


def _properties(sources: Sources, model: Mapping[str, Any]) -> dict[str, str]:
    """What LMI tells a handler: every setting of the model, without `option.` (lmi.md 7.1)."""
    properties = {key.removeprefix(options.PREFIX): value.text for key, value in sources.model.items()}
    named = "model_id" in properties or "HF_MODEL_ID" in sources.variables
    if named and model["model_id"] is not None:
        properties["model_id"] = model["model_id"]
    for variable in ("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE"):
        if variable in sources.variables:
            properties.setdefault(variable.lower(), sources.variables[variable].text)
    return properties
