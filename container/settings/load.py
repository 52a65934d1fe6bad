"""Which models a server starts with, and their settings. Source: contracts/lmi.md section 2.6."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from container.devices import gpu_count
from container.settings import likely_names, options, server_options
from container.settings.aliases import AppliedAlias, overruled, read_variables
from container.settings.handler import is_offline
from container.settings.model import model_fields
from container.settings.parsers import names
from container.settings.properties import FILE_NAME, SERVER_DEFAULTS_OF_MODEL_KEYS, Value, quoted, read_properties
from container.settings.secure_mode import GivenModel, SecureMode, check_model, read_secure_mode
from container.settings.server_options import LOAD_MODELS_OPTION, Address, AddressError
from container.settings.sources import (
    FOR_HUB_MODEL,
    Resolution,
    SettingEntry,
    Sources,
    for_every_model,
    read_sources,
    server_layer,
)
from container.sources import location
from container.sources.download import RemoteModel
from container.sources.location import UrlNotFound, is_s3, model_place
from handlers.model_settings import ModelSettings

__all__ = ["ServerSettings", "SettingEntry", "Settings", "SettingsError", "load_server", "load_settings"]

SAGEMAKER_METADATA = Path("/opt/ml/.sagemaker_infra/endpoint-metadata.json")
"""There on SageMaker only (lmi.md 2.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the process listens, queues, logs and ends. `container.settings.server_options` says what each is."""

    host: str = "0.0.0.0"
    port: int = 8080
    job_queue_size: int = 1000
    max_request_size: int = 67108864
    """Bytes."""
    request_read_timeout: float = 60.0
    """Seconds."""
    drain_timeout: float = 20.0
    """Seconds."""
    fail_fast: bool = False
    stall_timeout: float = 60.0
    """Seconds; 0: a stalled engine is not looked for."""
    fail_fast_when_stalled: bool = False
    log_format: Literal["plain", "json"] = "plain"
    log_level: str = "info"
    log_prompts: bool = False
    request_id_header: str = "x-request-id"
    allow_multi_status: bool = False
    health_check_override: bool = False
    workers_health_check: bool = False
    management_address: str | None = None
    """None: the main listener serves the management API."""
    multi_model: bool = False
    """The server starts without a model, and its platform loads and unloads them."""
    coalesce_above: int = 32
    error_rate_wlm: str | None = None
    """This and the following: `container.error_rates` reads them."""
    error_rate_server: str | None = None
    error_rate_model: str | None = None
    error_rate_any: str | None = None
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    model_aliases: tuple[str, ...] = ("dummy", "tgi")
    throttle_error_http_code: int = 503
    wlm_error_http_code: int = 503
    server_error_http_code: int = 500


@dataclass(frozen=True, slots=True)
class DeclaredMemory:
    """What is said of a model's memory, in MiB (contracts/lmi.md 2.9 and 2.10)."""

    required: int | None = None
    """None: to be estimated."""
    reserved: int = 500
    """What has to stay free."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a model and of its server, with the record of where each came from."""

    server: ServerSettings
    model: ModelSettings
    entries: tuple[SettingEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: DeclaredMemory = DeclaredMemory()
    secure_mode: SecureMode | None = None
    given: GivenModel | None = None
    """What the secure mode looks at, again when weights have been fetched; None without it."""
    remote_models: tuple[RemoteModel, ...] = ()
    """Their weights are to be fetched before the model is loaded."""
    aliases: tuple[AppliedAlias, ...] = ()
    """Environment variables that stood for others."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the libraries below are to see."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The server's settings alone."""

    server: ServerSettings
    entries: tuple[SettingEntry, ...]
    warnings: tuple[str, ...]
    aliases: tuple[AppliedAlias, ...]
    exports: Mapping[str, str] = field(default_factory=dict)
    """As those of `Settings`, for models that come later."""


class SettingsError(Exception):
    """The settings cannot be used; `problems` names each one: the option, its source, its value, what is allowed.

    `warnings` has what else was found: what is ignored may well be why something else is missing.
    """

    def __init__(self, problems: Iterable[str], warnings: Iterable[str] = ()) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        self.warnings = tuple(dict.fromkeys(warnings))
        super().__init__("\n".join(self.problems))


def load_settings(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str] | None = None,
    arguments: Mapping[str, Value] | None = None,
) -> Settings:
    """Read and check all settings of one model and of the server; of a model on S3, all but the weights are fetched.

    `model_dir` is --model-dir, a directory or `s3://`, or a value that says where else it was given; without it
    SERVING_MODEL_STORE counts, else /opt/ml/model.
    `command_line` holds server keys such as "port", "host", "model_name". `arguments`: keys of the model, such as
    "batch_size", that go before all other sources, as those of the management API do.

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    found = Resolution()
    sources = read_sources(model_dir, environ, command_line or {}, found, arguments or {})
    server = _server_fields(sources.server, found)
    model = model_fields(sources, found)
    _warn_of_names(environ, sources, model, found)
    memory = _declared_memory(sources, found)
    secure_mode = read_secure_mode(sources.variables, found.problems)
    given = None if secure_mode is None else _given_model(sources, model)
    if secure_mode is not None and given is not None:
        found.problems += check_model(secure_mode, given)
    if server["health_check_override"] and model.get("handler") is not None:
        model["handler"] = replace(model["handler"], retry_threshold=sys.maxsize)
    if found.problems:
        raise SettingsError(found.problems, found.warnings)
    return Settings(
        ServerSettings(**server),
        ModelSettings(**model),
        tuple(found.entries),
        tuple(dict.fromkeys(found.warnings)),
        memory,
        secure_mode,
        given,
        sources.remote_models.opened,
        sources.aliases,
        _exports(sources.variables),
    )


def _warn_of_names(environ: Mapping[str, str], sources: Sources, model: Mapping[str, Any], found: Resolution) -> None:
    """Of variables and options that do nothing, and were probably meant to."""
    by_setting = {entry.name: entry.source for entry in found.entries}
    found.warnings.extend(filter(None, (overruled(alias, by_setting) for alias in sources.aliases)))
    found.warnings.extend(likely_names.unknown_variables(environ))
    if model.get("rolling_batch") != "disable" and "engine_arguments" in model:
        found.warnings.extend(likely_names.unknown_options(model["engine_arguments"], model["engine_argument_sources"]))


def _exports(variables: Mapping[str, Value]) -> dict[str, str]:
    """What the libraries read by themselves, where it was given under another name."""
    exports = {}
    if (token := variables.get("HF_TOKEN")) is not None:
        exports["HF_TOKEN"] = token.text.strip()
    if is_offline(variables):
        exports["HF_HUB_OFFLINE"] = "1"
    return exports


def load_server(environ: Mapping[str, str], command_line: Mapping[str, str]) -> ServerReport:
    """Read and check the server's settings alone, of a server that has no model yet or several.

    Raises:
        SettingsError: something is wrong; all that is wrong is listed.
    """
    found = Resolution()
    variables, applied = read_variables(environ, found.problems, found.warnings)
    layer = server_layer(variables, command_line, found)
    for key in (*SERVER_DEFAULTS_OF_MODEL_KEYS, *(option.key for option in server_options.FOR_MODEL)):
        layer.pop(key, None)
    server = _server_fields(layer, found)
    found.warnings.extend(likely_names.unknown_variables(environ))
    read_secure_mode(variables, found.problems)
    if found.problems:
        raise SettingsError(found.problems, found.warnings)
    warnings = tuple(dict.fromkeys(found.warnings))
    return ServerReport(ServerSettings(**server), tuple(found.entries), warnings, applied, _exports(variables))


def _declared_memory(sources: Sources, found: Resolution) -> DeclaredMemory:
    """`gpu.required_memory_mb` and the like go before `required_memory_mb` on such a machine (lmi.md 2.10)."""
    values = {option.key: found.take(option, sources.model) for option in options.MEMORY}
    device = "gpu." if gpu_count() else "cpu."
    required, reserved = (
        next((value for value in (values[device + key], values[key]) if value is not None), None)
        for key in ("required_memory_mb", "reserved_memory_mb")
    )
    return DeclaredMemory(None if required is None else int(required), int(reserved or 0))


def _given_model(sources: Sources, model: Mapping[str, Any]) -> GivenModel:
    directories = [sources.model_dir]
    if model.get("model_id") is not None and os.path.isdir(model["model_id"]):
        directories.append(Path(model["model_id"]))
    fetched = tuple(remote.directory for remote in sources.remote_models.opened)
    return GivenModel(sources.given, sources.variables, tuple(dict.fromkeys(directories)), fetched)


def _server_fields(layer: dict[str, Value], found: Resolution) -> dict[str, Any]:
    if "request_id_header_key" not in layer and os.path.exists(SAGEMAKER_METADATA):
        layer["request_id_header_key"] = Value("X-Amzn-SageMaker-Inference-Id", "default on SageMaker")
    fields: dict[str, Any] = {
        option.field: found.take(option, layer) for option in server_options.SERVED if option.field
    }
    fields["model_aliases"] = names(str(fields["model_aliases"]))
    for option in (server_options.LOAD_MODELS_OPTION, *server_options.NOT_SERVED, *server_options.LEFTOVERS):
        found.take(option, layer)
    _check_management(layer, fields, found)
    known = {option.key for option in server_options.SERVER_OPTIONS}
    known |= {option.key for option in server_options.FOR_MODEL} | {*server_options.ADDRESS_KEYS}
    for key in sorted(layer.keys() - known):
        if layer[key].source.startswith("command line"):
            found.problems.append(f"{layer[key].source}: there is no such option")
        else:
            found.ignore(key, layer[key], "the server has no such setting" + likely_names.server_hint(key, layer[key]))
    return fields


def _check_management(layer: Mapping[str, Value], fields: dict[str, Any], found: Resolution) -> None:
    """A management address that is the main listener's own is no other listener."""
    management = layer.get("management_address")
    if management is None:
        return
    try:
        address = Address.parse(management)
    except AddressError as error:
        found.problems.append(str(error))
        return
    inference = layer.get("inference_address")
    same = inference is not None and inference.text == management.text
    if same or (address.host, address.port) == (fields["host"], str(fields["port"])):
        fields["management_address"] = None


_WORD = r"[A-Za-z0-9_.-]"
_ENTRY = re.compile(
    rf"(?:\[?(?P<name>{_WORD}+)(?::(?P<version>{_WORD}*))?(?::(?P<engine>\w*))?(?::(?P<devices>[^\]=]*))?\]?=)?(?P<url>.+)"
)


@dataclass(frozen=True, slots=True)
class StartupModel:
    """One model, and what it is known by."""

    settings: Settings
    url: str
    version: str | None = None

    @property
    def title(self) -> str:
        """Its name, and its version if it has one."""
        name = self.settings.model.name
        return f"{name}:{self.version}" if self.version else name


@dataclass(frozen=True, slots=True)
class Startup:
    """All that a server starts with."""

    server: ServerSettings
    models: tuple[StartupModel, ...]
    report: ServerReport | None = None
    """Where the server's settings came from, if not from those of its one model."""

    @property
    def exports(self) -> dict[str, str]:
        """Environment variables that the libraries below are to see; also where a model is yet to come."""
        given = [self.report.exports if self.report else {}, *(model.settings.exports for model in self.models)]
        return {name: text for one in given for name, text in one.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of all settings, each once."""
        said = [*(self.report.warnings if self.report else ()), *(w for m in self.models for w in m.settings.warnings)]
        return tuple(dict.fromkeys(said))


def load_startup(model_dir: Path | str | None, environ: Mapping[str, str], command_line: Mapping[str, str]) -> Startup:
    """Find the models and read their settings; the arguments are those of `load_settings`.

    Raises:
        SettingsError: something is wrong; all that is wrong with the first model that has problems is listed.
    """
    found = Resolution()
    variables, _ = read_variables(environ, found.problems, found.warnings)
    layer = server_layer(variables, command_line, found)
    if "multi_model" in layer and load_server(environ, command_line).server.multi_model:
        return _several(environ, command_line)
    listed = layer.get("load_models")
    if model_dir is None and listed is not None and str(LOAD_MODELS_OPTION.parser(listed.text)) != "ALL":
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


def _several(
    environ: Mapping[str, str], command_line: Mapping[str, str], models: Iterable[StartupModel] = ()
) -> Startup:
    report = load_server(environ, {key: text for key, text in command_line.items() if key != "model_name"})
    loaded = tuple(models)
    names = [(model.settings.model.name, model.version) for model in loaded]
    for name, version in names:
        if names.count((name, version)) > 1:
            raise SettingsError((f"two models are called {name}: give them names with SERVING_LOAD_MODELS",))
    return Startup(report.server, loaded, report)


def _model(
    directory: Path | str, name: str | None, environ: Mapping[str, str], command_line: Mapping[str, str]
) -> StartupModel:
    name = name or location.name_of_url(str(directory))
    return StartupModel(further_settings(directory, name, environ, command_line), str(directory))


def _listed(value: Value, environ: Mapping[str, str], command_line: Mapping[str, str]) -> Iterator[StartupModel]:
    if str(LOAD_MODELS_OPTION.parser(value.text)) == "NONE":
        return
    for text in re.split(r"[,\s]+", value.text.strip()):
        entry = _ENTRY.fullmatch(text)
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
    """Whether HF_MODEL_ID names a model beside the one that the directory holds (contracts/lmi.md 2.6)."""
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
    """The model directory of a model that has none: no file of another one's may count for it."""
    path = tempfile.mkdtemp(prefix="slipway-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
