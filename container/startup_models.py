"""Which models a server starts with, and their settings. Source: contracts/lmi.md section 2.6."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from container import model_location as location
from container.aliases import read_variables
from container.masking import quoted
from container.model_url import UrlNotFound, model_place
from container.properties import FILE_NAME, Value, read_properties
from container.resolution import Resolution
from container.server_options import LOAD_MODELS_OPTION
from container.setting_sources import FOR_HUB_MODEL, for_every_model, server_layer
from container.settings import ServerReport, ServerSettings, Settings, SettingsError, load_server, load_settings
from container.sources.s3_url import is_s3

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
