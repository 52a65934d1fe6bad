"""Reads and checks the settings of one model and its server, or of all models that a server starts with.

The first source that has a value counts. The order for a model is: SageMaker's variables, serving.properties,
OPTION_*, the server's default, the built-in default. The order for the server is: SageMaker's variables, SERVING_*, the
command line, the built-in default.
"""

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

from container.settings import options, server
from container.settings.environment import (
    SAGEMAKER_MODEL_KEYS,
    SERVER_DEFAULTS_OF_MODEL_KEYS,
    Environment,
    for_each_model,
    for_given_model,
    for_hub_model,
    option_layer,
    read_environment,
)
from container.settings.handler_code import OF_ENGINES
from container.settings.lookup import ALLOW_UNKNOWN, DEFAULT, Lookup, SettingEntry, Sources
from container.settings.model import other_arguments, read_model_config
from container.settings.options import BY_KEY
from container.settings.properties import read_properties
from container.settings.secure_mode import SecureMode, read_secure_mode
from container.settings.server import API_KEYS, LOAD_MODELS, read_server_config, server_layer
from container.settings.settings import ServerReport, Settings, SettingsError, Startup, StartupModel, UrlNotFound
from container.settings.values import Value, is_true, quoted
from container.sources import location
from container.sources.download import RemoteModels
from container.sources.location import ModelNotFound, SourceError, is_s3
from container.sources.remote_adapters import RemoteAdapters
from engines.settings.declaration import PREFIX
from engines.settings.engine_config import BATCH_SIZE, DJL_ENGINES, ENGINE, MODEL_ID, ROLLING_BATCH
from handlers.custom.settings import ENTRY_POINT, HANDLER_SETTINGS
from handlers.model_config import ModelConfig

# The order of settings in reports. It is the same as in the tables of docs/configuration.md.
_IN_TABLES = ("model_dir", *(setting.key for setting in (*server.SERVED, *options.ALL_OF_MODEL)))
_PLACES = {key: place for place, key in enumerate(_IN_TABLES)}
# Variables that name the model and take precedence over HF_MODEL_ID.
_MODEL_VARIABLES = frozenset(key.replace("option.", "OPTION_").upper() for key in MODEL_ID.keys)


def load_settings(
    model_dir: Path | str | Value | None,
    environment: Environment,
    command_line: Mapping[str, str] | None = None,
    arguments: Mapping[str, Value] | None = None,
) -> Settings:
    """Read and check all settings of one model and of the server.

    If the model is on S3, its files are fetched, except the weights.

    Args:
        model_dir: A directory, or an `s3://` URL. If it is not a `Value`, its source is --model-dir. If it is None,
            SERVING_MODEL_STORE counts. If that is not set, /opt/ml/model counts.
        environment: The environment variables.
        command_line: Server keys such as "port", "host", "model_name".
        arguments: Keys of the model, such as "batch_size", from the management API. They take precedence over all
            other sources.

    Raises:
        SettingsError: A setting is invalid. The error lists all faults.
    """
    lookup = _lookup(environment)
    variables = environment.variables
    layer = server_layer(variables, command_line or {}, lookup)
    offline = is_true(variables.get("DJL_OFFLINE"))
    remote = RemoteModels(environment.downloads, offline=offline)
    found = _model_dir(_place(model_dir, layer), variables, remote, lookup)
    sources = _sources(found, environment, layer, arguments or {}, remote, lookup)
    server_config = read_server_config(layer, lookup)
    config = read_model_config(sources)
    required, reserved = _memory(sources, "required_memory_mb"), _memory(sources, "reserved_memory_mb")
    secure_mode = read_secure_mode(variables, lookup.problems)
    if secure_mode is not None:
        secure_mode = _for_model(secure_mode, sources, config)
        lookup.problems += secure_mode.model_faults()
    if server_config.health_check_override and config.handler is not None:
        config = replace(config, handler=replace(config.handler, retry_threshold=sys.maxsize))
    if lookup.problems:
        raise SettingsError(lookup.problems, lookup.warnings)
    return Settings(
        server_config=server_config,
        config=config,
        entries=_in_order(lookup.entries),
        warnings=tuple(dict.fromkeys(lookup.warnings)),
        aliases=environment.aliases,
        required_memory=required,
        reserved_memory=reserved or 0,
        model_faults=None if secure_mode is None else secure_mode.model_faults,
        adapter_faults=None if secure_mode is None else secure_mode.adapter_faults,
        remote_models=remote.opened,
        remote_adapters=RemoteAdapters(config.model_loading_timeout, offline=offline, downloads=environment.downloads),
    )


def setting_faults(
    environ: Mapping[str, str], model_dir: Path | None = None, *, has_code: bool = False
) -> tuple[list[str], list[str]]:
    """Return the problems and warnings of a container's settings that do not depend on its model or its machine.

    Args:
        environ: The environment variables of the container.
        model_dir: The model directory, from which serving.properties is read. None if it is not on this machine.
        has_code: Whether the model may include code. Such code may serve the model and give any option its own meaning.
    """
    environment = read_environment(environ, 0)
    lookup = _lookup(environment)
    layer = server_layer(environment.variables, {}, lookup)
    sources = _sources(model_dir, environment, layer, {}, RemoteModels(environment.downloads, offline=True), lookup)
    layer.pop(server.API_KEYS_FILE.key, None)  # The path is in the container, so the file is not on this machine.
    read_server_config(layer, lookup)
    for setting in (*HANDLER_SETTINGS.values(), *options.MEMORY):
        sources.value(setting)
    given = sources.model.get(ENTRY_POINT.key) or environment.variables.get("DJL_ENTRY_POINT")
    if has_code or (given is not None and given.text.strip() not in OF_ENGINES):
        return lookup.problems, lookup.warnings
    for setting in (*options.SERVED, *options.NOT_SERVED):
        sources.value(setting)
    is_djl = sources.value(ENGINE) in DJL_ENGINES
    batching, size = (sources.model.get(key) for key in (ROLLING_BATCH.key, BATCH_SIZE.key))
    batches = size is not None and size.word != BATCH_SIZE.default
    other_arguments(
        sources.model, "disable" if batches else batching.word if batching else "", lookup, reads_names=is_djl
    )
    return lookup.problems, lookup.warnings


def load_server(environment: Environment, command_line: Mapping[str, str]) -> ServerReport:
    """Read and check the settings of a server that has several models, or no model yet.

    Raises:
        SettingsError: A setting is invalid.
    """
    lookup = _lookup(environment)
    variables = environment.variables
    layer = server_layer(variables, command_line, lookup)
    for key in (*SERVER_DEFAULTS_OF_MODEL_KEYS, *(option.key for option in server.FOR_MODELS)):
        layer.pop(key, None)
    server_config = read_server_config(layer, lookup)
    read_secure_mode(variables, lookup.problems)
    if lookup.problems:
        raise SettingsError(lookup.problems, lookup.warnings)
    return ServerReport(
        server_config=server_config,
        entries=_in_order(lookup.entries),
        warnings=tuple(dict.fromkeys(lookup.warnings)),
        aliases=environment.aliases,
    )


def _in_order(entries: Iterable[SettingEntry]) -> tuple[SettingEntry, ...]:
    """Return the entries in the order of the tables. Entries of no table, such as engine arguments, are last."""
    return tuple(sorted(entries, key=lambda entry: _PLACES.get(entry.name, len(_PLACES))))


def _lookup(environment: Environment) -> Lookup:
    allows_unknown = is_true(environment.variables.get(ALLOW_UNKNOWN))
    return Lookup(
        warnings=list(environment.warnings), problems=list(environment.problems), allows_unknown=allows_unknown
    )


# The model directory and its settings


def _place(model_dir: Path | str | Value | None, layer: Mapping[str, Value]) -> Value | None:
    """Return the model directory as it was given. None if it was not given."""
    if isinstance(model_dir, Path | str):
        return Value(str(model_dir), "command line: --model-dir")
    return model_dir or layer.get("model_store")


def _model_dir(
    place: Value | None, variables: Mapping[str, Value], remote: RemoteModels, lookup: Lookup
) -> Path | None:
    """Return the model directory. If the given place is missing or cannot be read, add a problem and return None."""
    if place is not None and is_s3(place.text):
        return _remote_dir("model directory", place, remote, lookup)
    try:
        directory, *others = _directories(place)
    except ModelNotFound as error:
        lookup.problems.append(str(error))
        return None
    if others:
        listed = ", ".join(model.name for model in (directory, *others))
        lookup.problems.append(f"model directory: {directory.parent} holds several models ({listed}): name one")
    hub_model = variables.get("HF_MODEL_ID")
    if (
        hub_model is not None
        and is_s3(hub_model.text)
        and not _MODEL_VARIABLES & variables.keys()
        and not location.is_model_dir(directory)
    ):  # As in LMI, HF_MODEL_ID then names the model directory.
        return _remote_dir("HF_MODEL_ID", hub_model, remote, lookup)
    lookup.entries.append(SettingEntry("model_dir", str(directory), place.source if place is not None else DEFAULT))
    return directory


def _directories(place: Value | None) -> tuple[Path, ...]:
    """Return the model directories at a place. If `place` is None, the default directory counts.

    Raises:
        ModelNotFound: The place does not exist, or is a URL that is not served.
    """
    if place is None:
        return location.models_in(location.DEFAULT_MODEL_DIR)
    try:
        return location.models_in(location.existing_directory(place.text))
    except ModelNotFound as error:
        raise ModelNotFound(f"model directory ({place.source}): {error}") from None


def _remote_dir(name: str, place: Value, remote: RemoteModels, lookup: Lookup) -> Path | None:
    try:
        directory = remote.open(place.text)
    except SourceError as error:
        lookup.problems.append(f"{place.describe(name)}: {error}")
        return None
    lookup.entries.append(SettingEntry("model_dir", str(directory), place.source, f"of {place.text.strip()}"))
    return directory


def _sources(
    found: Path | None,
    environment: Environment,
    layer: dict[str, Value],
    arguments: Mapping[str, Value],
    remote: RemoteModels,
    lookup: Lookup,
) -> Sources:
    """Return the texts of the model's settings.

    `layer` contains the server's settings. Keys in it that concern the model are removed.
    """
    variables = environment.variables
    directory = found or location.DEFAULT_MODEL_DIR
    from_environment = option_layer(variables, lookup.problems)
    in_file = read_properties(found, lookup.problems) if found is not None else {}
    empty = {key: value for key, value in in_file.items() if _is_unset(key, value)}
    lookup.warnings += [f"{key} ({value.source}) is ignored: it is empty" for key, value in empty.items()]
    given = from_environment | {key: value for key, value in in_file.items() if key not in empty}
    from_sagemaker = {key: variables[name] for name, key in SAGEMAKER_MODEL_KEYS if name in variables}
    model = {**given, **from_sagemaker, **arguments}
    for key in ("download_dir", "model_store"):
        layer.pop(key, None)
    for key in SERVER_DEFAULTS_OF_MODEL_KEYS:
        default, option = layer.pop(key, None), BY_KEY[key]
        if default is not None and not any(name in model for name in option.keys):
            model[option.key] = default
    for key in arguments:
        for alias in BY_KEY[key].aliases if key in BY_KEY else ():
            model.pop(alias, None)  # Another source may have given the same setting under an alias.
    if (queue := model.pop("job_queue_size", None)) is not None:
        layer["job_queue_size"] = queue
    return Sources(
        directory,
        found is not None,
        variables,
        layer,
        model,
        {**given, **arguments},
        tuple(empty),
        remote,
        environment.gpus,
        environment.one_model,
        lookup,
    )


def _is_unset(key: str, value: Value) -> bool:
    """Return True if an option is empty. It then counts as unset, like an empty variable."""
    known = key in BY_KEY or key == "job_queue_size" or key.startswith((PREFIX, "gpu.", "cpu."))
    return known and not value.text.strip()


# Values derived from the settings


def _memory(sources: Sources, key: str) -> int | None:
    """Return a size in MiB. `gpu.<key>` takes precedence over `<key>` if there are GPUs, and `cpu.<key>` if not."""
    values = {option.key: sources.value(option) for option in options.MEMORY if option.key.endswith(key)}
    own = values[f"{'gpu' if sources.gpus else 'cpu'}.{key}"]
    return values[key] if own is None else own


def _for_model(mode: SecureMode, sources: Sources, config: ModelConfig) -> SecureMode:
    directories, handler_config = [sources.model_dir], config.handler
    if os.path.isdir(config.model_id):
        directories.append(Path(config.model_id))
    return replace(
        mode,
        keys=sources.given,
        variables=sources.variables,
        directories=tuple(dict.fromkeys(directories)),
        fetched=tuple(fetched.directory for fetched in sources.remote.opened),
        handler=Path(handler_config.entry_point)
        if handler_config is not None and os.path.isabs(handler_config.entry_point)
        else None,
    )


# The models of a server


def load_startup(
    model_dir: Path | str | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str],
    gpus: int | None = None,
    model: str | None = None,
) -> Startup:
    """Read the environment, find the models, and read their settings.

    Args:
        model_dir: See `load_settings`.
        environ: The environment variables of the process.
        command_line: See `load_settings`.
        gpus: See `read_environment`.
        model: A hub model that replaces the models that variables name.

    Raises:
        SettingsError: A setting is invalid.
    """
    environment = read_environment(environ, gpus)
    if model is not None:
        environment = for_given_model(environment, Value(model, "command line: --model"), _MODEL_VARIABLES)
    of_one_model = replace(environment, one_model=True)
    variables = environment.variables
    layer = server_layer(variables, command_line, Lookup())  # Faults are reported when the settings are read.
    if "multi_model" in layer and load_server(environment, command_line).server_config.multi_model:
        return _several(environment, command_line, [])
    listed = layer.get("load_models")
    if model_dir is None and listed is not None and LOAD_MODELS.parser(listed.text) != "ALL":
        entries = [] if LOAD_MODELS.parser(listed.text) == "NONE" else re.split(r"[,\s]+", listed.text)
        urls = [text for text in entries if text]
        read_for = of_one_model if len(urls) + ("HF_MODEL_ID" in variables) == 1 else environment
        models = [*_listed(urls, listed.source, read_for, command_line), *_from_hub(read_for, command_line)]
        return _several(environment, command_line, models)
    try:
        directories = _directories(_place(model_dir, layer))
    except ModelNotFound:
        directories = ()  # The fault is reported when the settings are read.
    if len(directories) < 2 and not _has_another(directories, variables):
        settings = load_settings(model_dir, of_one_model, command_line)
        models = [StartupModel(settings, str(settings.config.model_dir))]
        return Startup(settings.server_config, tuple(models), None, environment, command_line)
    name = layer["model_name"].text if "model_name" in layer else None
    if len(directories) > 1 and name is not None:
        listing = ", ".join(directory.name for directory in directories)
        raise SettingsError((f"model_name is {quoted('', name)}, but there are several models ({listing})",))
    models = [_one_of_several(str(directory), name, environment, command_line) for directory in directories]
    hub = variables.get("HF_MODEL_ID")
    if hub is None or not location.is_store_of(hub.text, directories):
        models += _from_hub(environment, command_line)
    return _several(environment, command_line, models)


def further_settings(
    url: Value,
    name: str,
    environment: Environment,
    command_line: Mapping[str, str],
    arguments: Mapping[str, Value] | None = None,
) -> Settings:
    """Read the settings of one of several models. The models share the environment and the command line.

    Args:
        url: An absolute path, a `file://` URL with such a path, or an `s3://` URL.
        name: The model's name.
        environment: See `load_settings`.
        command_line: See `load_settings`.
        arguments: See `load_settings`.

    Raises:
        UrlNotFound: The URL has another scheme, or leads to nothing.
        SettingsError: A setting is invalid.
    """
    place = url.text
    if not is_s3(place):
        directory = location.path_of_url(place)
        if directory is None:
            raise UrlNotFound(f"url is {quoted('url', place)}; allowed: an absolute path, file:// and one, or s3://")
        if not os.path.isdir(directory):  # `isdir` is also False for a path that is too long or cannot be searched.
            raise UrlNotFound(f"url is {quoted('url', place)}: there is no such directory")
        place = str(directory)
    line = _for_each_model(command_line) | {"model_name": name}
    return load_settings(Value(place, url.source), for_each_model(environment), line, arguments)


def _for_each_model(command_line: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in command_line.items() if key not in ("model_name", API_KEYS.key)}


def _several(environment: Environment, command_line: Mapping[str, str], models: list[StartupModel]) -> Startup:
    report = load_server(environment, {key: text for key, text in command_line.items() if key != "model_name"})
    titles = [(model.settings.config.name, model.version) for model in models]
    for name, version in titles:
        if titles.count((name, version)) > 1:
            raise SettingsError((f"two models are called {name}: give them names with SERVING_LOAD_MODELS",))
    return Startup(report.server_config, tuple(models), report, environment, command_line)


def _one_of_several(
    place: str, name: str | None, environment: Environment, command_line: Mapping[str, str]
) -> StartupModel:
    url = Value(place, "command line: --model-dir")
    return StartupModel(further_settings(url, name or location.name_of_url(place), environment, command_line), place)


_WORD = r"[A-Za-z0-9_.-]"
# An entry of SERVING_LOAD_MODELS: `[<name>:<version>:<engine>:<devices>]=<url>`.
_LISTED = re.compile(
    rf"(?:\[?(?P<name>{_WORD}+)(?::(?P<version>{_WORD}*))?(?::(?P<engine>\w*))?(?::(?P<devices>[^\]=/]*))?\]?=)?(?P<url>.+)"
)


def _listed(
    texts: Iterable[str], place: str, environment: Environment, command_line: Mapping[str, str]
) -> Iterator[StartupModel]:
    for text in texts:
        entry = _LISTED.fullmatch(text)
        assert entry is not None  # Every text matches: the whole text may be a URL.
        source = f"{place}: {text}"
        given = {"engine": entry["engine"], "load_on_devices": entry["devices"]}
        arguments = {key: Value(part, source) for key, part in given.items() if part}
        name = entry["name"] or location.name_of_url(entry["url"])
        try:
            settings = further_settings(Value(entry["url"], source), name, environment, command_line, arguments)
        except UrlNotFound as error:
            raise SettingsError((f"load_models has {quoted('', text)} ({place}): {error}",)) from None
        yield StartupModel(settings, entry["url"], entry["version"] or None)


def _has_another(directories: tuple[Path, ...], variables: Mapping[str, Value]) -> bool:
    """Return True if HF_MODEL_ID names a model, and the directory contains or names another model."""
    hub = variables.get("HF_MODEL_ID")
    if hub is None or not directories or _MODEL_VARIABLES & variables.keys():
        return False
    if location.is_store_of(hub.text, directories):
        return False
    (directory,) = directories
    properties = read_properties(directory, [])
    given = {key: value for key, value in properties.items() if not _is_unset(key, value)}
    own = next((given[key] for key in MODEL_ID.keys if key in given), None)
    if own is not None:
        return own.text.strip() != hub.text.strip()
    return location.has_model(directory) and Path(hub.text.strip()) != directory


def _from_hub(environment: Environment, command_line: Mapping[str, str]) -> Iterator[StartupModel]:
    hub = environment.variables.get("HF_MODEL_ID")
    if hub is None:
        return
    url = hub.text.strip()
    if is_s3(url) or os.path.isdir(url):
        yield _one_of_several(url if is_s3(url) else os.path.abspath(url), None, environment, command_line)
        return
    # The hub model gets an empty model directory, so that files of other models do not count.
    empty = tempfile.mkdtemp(prefix="slipway-")
    atexit.register(shutil.rmtree, empty, ignore_errors=True)
    settings = load_settings(empty, for_hub_model(environment), _for_each_model(command_line))
    yield StartupModel(settings, url, temporary=Path(empty))
