"""Reads and checks the settings: of one model and its server, and of all models that a server starts with."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from container.devices import gpu_count
from container.settings import options, server_options
from container.settings.aliases import KNOWN_VARIABLES, PREFIXES, overruled, read_variables
from container.settings.model import misspelt_options, model_fields
from container.settings.parsers import names
from container.settings.properties import (
    FILE_NAME,
    SERVER_DEFAULTS_OF_MODEL_KEYS,
    Value,
    is_true,
    quoted,
    read_properties,
)
from container.settings.secure_mode import GivenModel, check_model, read_secure_mode
from container.settings.server_options import LOAD_MODELS, Address, AddressError
from container.settings.settings import (
    DeclaredMemory,
    ServerReport,
    ServerSettings,
    Settings,
    SettingsError,
    Startup,
    StartupModel,
)
from container.settings.sources import (
    FOR_HUB_MODEL,
    Lookup,
    Sources,
    did_you_mean,
    for_every_model,
    read_sources,
    server_layer,
)
from container.sources import location
from container.sources.location import UrlNotFound, model_place
from container.sources.s3_url import is_s3
from handlers.model_settings import ModelSettings

SAGEMAKER_METADATA = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")
"""A file that is there on SageMaker only."""


def load_settings(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str] | None = None,
    arguments: Mapping[str, Value] | None = None,
) -> Settings:
    """Read and check all settings of one model and of the server; of a model on S3, all but the weights are fetched.

    Args:
        model_dir: --model-dir, a directory or `s3://`, or a value that says where else it was given; without it
            SERVING_MODEL_STORE counts, else /opt/ml/model
        environ: the environment
        command_line: server keys such as "port", "host", "model_name"
        arguments: keys of the model, such as "batch_size", that take precedence over all sources (the management API's)

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    lookup = Lookup()
    sources = read_sources(model_dir, environ, command_line or {}, lookup, arguments or {})
    server = _server_fields(sources.server, lookup)
    model = model_fields(sources, lookup)
    source_of = {entry.name: entry.source for entry in lookup.entries}
    lookup.warnings.extend(filter(None, (overruled(alias, source_of) for alias in sources.aliases)))
    lookup.warnings.extend(_misspelt_variables(environ))
    lookup.warnings.extend(misspelt_options(model))
    memory = _declared_memory(sources, lookup)
    secure_mode = read_secure_mode(sources.variables, lookup.problems)
    given = None if secure_mode is None else _given_model(sources, model)
    if secure_mode is not None and given is not None:
        lookup.problems += check_model(secure_mode, given)
    if server["health_check_override"] and model.get("handler") is not None:
        model["handler"] = replace(model["handler"], retry_threshold=sys.maxsize)
    if lookup.problems:
        raise SettingsError(lookup.problems, lookup.warnings)
    return Settings(
        ServerSettings(**server),
        ModelSettings(**model),
        tuple(lookup.entries),
        tuple(dict.fromkeys(lookup.warnings)),
        sources.aliases,
        _exports(sources.variables),
        memory,
        secure_mode,
        given,
        sources.remote_models.opened,
    )


def load_server(environ: Mapping[str, str], command_line: Mapping[str, str]) -> ServerReport:
    """Read and check the server's settings alone, of a server that has no model yet or several.

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    lookup = Lookup()
    variables, aliases = read_variables(environ, lookup.problems, lookup.warnings)
    layer = server_layer(variables, command_line, lookup)
    for key in (*SERVER_DEFAULTS_OF_MODEL_KEYS, *(option.key for option in server_options.FOR_MODELS)):
        layer.pop(key, None)
    server = _server_fields(layer, lookup)
    lookup.warnings.extend(_misspelt_variables(environ))
    read_secure_mode(variables, lookup.problems)
    if lookup.problems:
        raise SettingsError(lookup.problems, lookup.warnings)
    warnings = tuple(dict.fromkeys(lookup.warnings))
    return ServerReport(ServerSettings(**server), tuple(lookup.entries), warnings, aliases, _exports(variables))


def _server_fields(layer: dict[str, Value], lookup: Lookup) -> dict[str, Any]:
    if "request_id_header_key" not in layer and os.path.exists(SAGEMAKER_METADATA):
        layer["request_id_header_key"] = Value("X-Amzn-SageMaker-Inference-Id", "default on SageMaker")
    fields: dict[str, Any] = {option.field: lookup.value(option, layer) for option in server_options.SERVED}
    fields["model_aliases"] = names(str(fields["model_aliases"]))
    for option in (LOAD_MODELS, *server_options.NOT_SERVED):
        lookup.value(option, layer)
    if "management_address" in layer and _is_main_listener(layer, fields, lookup):
        fields["management_address"] = None
    for key, value in sorted(layer.items()):
        if key in server_options.IGNORED:
            lookup.ignore(key, value, server_options.IGNORED[key])
        elif key in server_options.KEYS:
            continue
        elif value.source.startswith("command line"):
            lookup.problems.append(f"{value.source}: there is no such option")
        else:
            hint = did_you_mean(f"SERVING_{key.upper()}", {f"SERVING_{known.upper()}" for known in server_options.KEYS})
            lookup.ignore(key, value, f"the server has no such setting{hint}")
    return fields


def _is_main_listener(layer: Mapping[str, Value], fields: Mapping[str, Any], lookup: Lookup) -> bool:
    """Whether the management address is the one of the main listener."""
    management, inference = layer["management_address"], layer.get("inference_address")
    try:
        address = Address.parse(management)
    except AddressError as error:
        lookup.problems.append(str(error))
        return False
    same_text = inference is not None and inference.text == management.text
    return same_text or (address.host, address.port) == (fields["host"], str(fields["port"]))


def _misspelt_variables(environ: Iterable[str]) -> Iterator[str]:
    """A warning for each unknown variable whose name is close to that of a known one."""
    for name in sorted(environ):
        if name in KNOWN_VARIABLES or name.startswith(PREFIXES):
            continue
        if hint := did_you_mean(name, KNOWN_VARIABLES):
            yield f"environment: {name} is unknown and has no effect{hint}"


def _exports(variables: Mapping[str, Value]) -> dict[str, str]:
    exports = {}
    if (token := variables.get("HF_TOKEN")) is not None:
        exports["HF_TOKEN"] = token.text.strip()
    if is_true(variables.get("DJL_OFFLINE")):
        exports["HF_HUB_OFFLINE"] = "1"
    return exports


def _declared_memory(sources: Sources, lookup: Lookup) -> DeclaredMemory:
    """On a machine with GPUs `gpu.required_memory_mb` and the like take precedence, else those with `cpu.`."""
    values = {option.key: lookup.value(option, sources.model) for option in options.MEMORY}
    device = "gpu." if gpu_count() else "cpu."
    required, reserved = (
        values[key] if values[device + key] is None else values[device + key]
        for key in ("required_memory_mb", "reserved_memory_mb")
    )
    return DeclaredMemory(None if required is None else int(required), int(reserved or 0))


def _given_model(sources: Sources, model: Mapping[str, Any]) -> GivenModel:
    directories = [sources.model_dir]
    if model.get("model_id") is not None and os.path.isdir(model["model_id"]):
        directories.append(Path(model["model_id"]))
    fetched = tuple(remote.directory for remote in sources.remote_models.opened)
    return GivenModel(sources.given, sources.variables, tuple(dict.fromkeys(directories)), fetched)


def load_startup(model_dir: Path | str | None, environ: Mapping[str, str], command_line: Mapping[str, str]) -> Startup:
    """Find the models and read their settings; the arguments are those of `load_settings`.

    Raises:
        SettingsError: something is wrong; all that is wrong with the first model that has problems is listed.
    """
    lookup = Lookup()
    variables, _ = read_variables(environ, lookup.problems, lookup.warnings)
    layer = server_layer(variables, command_line, lookup)
    if "multi_model" in layer and load_server(environ, command_line).server.multi_model:
        return _several(environ, command_line, [])
    listed = layer.get("load_models")
    if model_dir is None and listed is not None and LOAD_MODELS.parser(listed.text) != "ALL":
        models = [*_listed(listed, environ, command_line), *_from_hub(variables, environ, command_line)]
        return _several(environ, command_line, models)
    try:
        directories = location.find_model_dirs(model_dir, layer.get("model_store"))
    except location.ModelNotFound:
        directories = ()  # reading the settings says what is wrong
    if len(directories) < 2 and not _has_another(directories, variables):
        settings = load_settings(model_dir, environ, command_line)
        return Startup(settings.server, (StartupModel(settings, str(settings.model.model_dir)),))
    name = command_line.get("model_name") or environ.get("SERVING_MODEL_NAME")
    if len(directories) > 1 and name is not None:
        listing = ", ".join(directory.name for directory in directories)
        raise SettingsError((f"model_name is {quoted('', name)}, but there are several models ({listing})",))
    models = [_model(directory, name, environ, command_line) for directory in directories]
    hub = variables.get("HF_MODEL_ID")
    if hub is None or not location.is_store_of(hub.text, directories):
        models += _from_hub(variables, environ, command_line)
    return _several(environ, command_line, models)


def further_settings(
    directory: Path | str | Value,
    name: str,
    environ: Mapping[str, str],
    command_line: Mapping[str, str],
    arguments: Mapping[str, Value] | None = None,
) -> Settings:
    """The settings of one model of several: its own file under the same environment and server settings.

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    return load_settings(directory, for_every_model(environ), {**command_line, "model_name": name}, arguments)


def _several(environ: Mapping[str, str], command_line: Mapping[str, str], models: list[StartupModel]) -> Startup:
    report = load_server(environ, {key: text for key, text in command_line.items() if key != "model_name"})
    titles = [(model.settings.model.name, model.version) for model in models]
    for name, version in titles:
        if titles.count((name, version)) > 1:
            raise SettingsError((f"two models are called {name}: give them names with SERVING_LOAD_MODELS",))
    return Startup(report.server, tuple(models), report)


def _model(
    directory: Path | str, name: str | None, environ: Mapping[str, str], command_line: Mapping[str, str]
) -> StartupModel:
    name = name or location.name_of_url(str(directory))
    return StartupModel(further_settings(directory, name, environ, command_line), str(directory))


_WORD = r"[A-Za-z0-9_.-]"
_LISTED = re.compile(
    rf"(?:\[?(?P<name>{_WORD}+)(?::(?P<version>{_WORD}*))?(?::(?P<engine>\w*))?(?::(?P<devices>[^\]=]*))?\]?=)?(?P<url>.+)"
)
"""An entry of SERVING_LOAD_MODELS: `[<name>:<version>:<engine>:<devices>]=<url>`."""


def _listed(value: Value, environ: Mapping[str, str], command_line: Mapping[str, str]) -> Iterator[StartupModel]:
    if LOAD_MODELS.parser(value.text) == "NONE":
        return
    for text in re.split(r"[,\s]+", value.text.strip()):
        entry = _LISTED.fullmatch(text)
        assert entry is not None  # any text is at least a url
        try:
            directory = model_place(entry["url"])
        except UrlNotFound as error:
            raise SettingsError((f"load_models has {quoted('', text)} ({value.source}): {error}",)) from None
        given = {"engine": entry["engine"], "load_on_devices": entry["devices"]}
        arguments = {key: Value(part, f"{value.source}: {text}") for key, part in given.items() if part}
        name = entry["name"] or location.name_of_url(entry["url"])
        place = Value(str(directory), f"{value.source}: {text}")
        settings = further_settings(place, name, environ, command_line, arguments)
        yield StartupModel(settings, entry["url"], entry["version"] or None)


def _has_another(directories: tuple[Path, ...], variables: Mapping[str, Value]) -> bool:
    """Whether HF_MODEL_ID names a model beside the one that the directory holds."""
    hub = variables.get("HF_MODEL_ID")
    if hub is None or not directories or "OPTION_MODEL_ID" in variables:
        return False
    if location.is_store_of(hub.text, directories):
        return False
    (directory,) = directories
    own = read_properties(directory / FILE_NAME).values.get("option.model_id")
    if own is not None:
        return own.text.strip() != hub.text.strip()
    return location.has_model(directory) and Path(hub.text.strip()) != directory


def _from_hub(
    variables: Mapping[str, Value], environ: Mapping[str, str], command_line: Mapping[str, str]
) -> Iterator[StartupModel]:
    hub = variables.get("HF_MODEL_ID")
    if hub is None:
        return
    url = hub.text.strip()
    if is_s3(url) or Path(url).is_dir():
        place = url if is_s3(url) else Path(url).absolute()
        yield _model(place, None, environ, command_line)
        return
    own = for_every_model(environ) | {name: environ[name] for name in FOR_HUB_MODEL if name in environ}
    line = {key: text for key, text in command_line.items() if key != "model_name"}
    yield StartupModel(load_settings(_empty_directory(), own, line), url)


def _empty_directory() -> Path:
    """The model directory of a model of the hub, so that no other model's files count for it."""
    path = tempfile.mkdtemp(prefix="slipway-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
