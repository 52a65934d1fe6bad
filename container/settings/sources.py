"""Reads serving.properties, the environment and the command line, and puts them in order of importance.

What goes before what (contracts/lmi.md 2.1): for the model, SageMaker's variables > serving.properties > OPTION_* >
the server's default > the built-in one; for the server, SageMaker's variables > SERVING_* > command line > built-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from container.settings import options, properties
from container.settings.aliases import AppliedAlias, read_variables, with_aliases
from container.settings.options import Option
from container.settings.parsers import TRUE, Scalar
from container.settings.properties import Value, quoted
from container.settings.server_options import AddressError, expand_address
from container.sources import location
from container.sources.download import RemoteModels, download_dir
from container.sources.location import SourceError, is_s3

DEFAULT = "default"
_NONE: Mapping[str, Value] = {}


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One line of the report on settings."""

    name: str
    value: Scalar | None
    source: str
    """"default", or what was written and where, such as "environment: OPTION_DTYPE"."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Given:
    key: str
    value: Value

    def __str__(self) -> str:
        return f"{self.key} is {quoted(self.key, self.value.text)} ({self.value.source})"


@dataclass(slots=True)
class Resolution:
    """Collects entries, warnings and problems while values are looked up."""

    entries: list[SettingEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value] = _NONE) -> Scalar | None:
        """The value of an option: from its keys in `layer`, else its variables, else its default.

        None where there is no value, or where it is wrong, which is then among the problems.
        """
        given = _given(option, layer, variables)
        if not given:
            return self._default(option)
        parsed = [self._parse(option, one) for one in given]
        if any(value is None for value in parsed):
            return None
        for other, value in zip(given[1:], parsed[1:], strict=True):
            if value == parsed[0]:
                continue
            if not option.first_counts:
                self.problems.append(f"{given[0]}, but {other}; both are the same option: give one of them")
                return None
            self.warnings.append(f"{other.key} ({other.value.source}) is ignored: {given[0]}")
        return self._accept(option, given[0], parsed[0])

    def ignore(self, key: str, value: Value, reason: str) -> None:
        """Record a value that goes nowhere, and warn."""
        self.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
        self.entries.append(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))

    def replace(self, entry: SettingEntry) -> None:
        """Put a better entry in the place of the one with its name."""
        self.entries = [entry if other.name == entry.name else other for other in self.entries]

    def _default(self, option: Option) -> Scalar | None:
        value = option.parser(option.default) if option.default else None
        if not option.ignored:
            self.entries.append(SettingEntry(option.key, value, DEFAULT))
        return value

    def _parse(self, option: Option, given: _Given) -> Scalar | None:
        try:
            value = option.parser(given.value.text)
        except ValueError:
            self.problems.append(f"{given}; allowed: {option.allowed}")
            return None
        if option.serves is not None and value not in option.serves:
            self.problems.append(
                f"{given}: not served by this version of Slipway; {option.advice} (served: {option.allowed})"
            )
            return None
        return value

    def _accept(self, option: Option, given: _Given, value: Scalar | None) -> Scalar | None:
        note = "" if given.value.text.strip().lower() in option.quiet else option.remark
        if note:
            self.warnings.append(f"{given}: {note}")
        self.entries.append(SettingEntry(option.key, value, given.value.source, note))
        return value


def _given(option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value]) -> list[_Given]:
    given = [_Given(key, layer[key]) for key in (option.key, *option.aliases) if key in layer]
    return given or list(_from_variables(option, variables))


def _from_variables(option: Option, variables: Mapping[str, Value]) -> Iterator[_Given]:
    for name in option.variables:
        if name in variables:
            yield _Given(option.key, variables[name])
            return


FOR_HUB_MODEL = with_aliases(("HF_MODEL_ID", "HF_REVISION"))
"""Variables that name the hub's model, by whatever container's name."""
_FOR_ONE_MODEL = FOR_HUB_MODEL | {"SERVING_MODEL_NAME", "SERVING_MODEL_STORE", "SERVING_LOAD_MODELS"}
"""Variables that are about one model or about which there are; all others are for every model of the server."""


def for_every_model(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the environment counts for a further model of the server (contracts/lmi.md 2.1)."""
    return {name: text for name, text in environ.items() if name not in _FOR_ONE_MODEL}


@dataclass(slots=True)
class Sources:
    """Everything that was read."""

    model_dir: Path
    variables: Mapping[str, Value]
    server: dict[str, Value]
    model: dict[str, Value]
    given: Mapping[str, Value]
    """What whoever brings the model says of it: its file, the environment and the management API."""
    remote_models: RemoteModels
    aliases: tuple[AppliedAlias, ...]
    """Variables that stand for others, and do so here."""


def read_sources(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str],
    found: Resolution,
    arguments: Mapping[str, Value],
) -> Sources:
    """Read everything and put it in order; what is wrong with it is added to `found.problems`."""
    variables, applied = read_variables(environ, found.problems, found.warnings)
    server = server_layer(variables, command_line, found)
    server.pop("download_dir", None)
    remote = RemoteModels(download_dir(environ), offline=_is_true(variables.get("DJL_OFFLINE")))
    directory = _model_dir(model_dir, server.pop("model_store", None), variables, remote, found)
    file = properties.read_properties(directory / properties.FILE_NAME)
    found.problems.extend(file.problems)
    found.warnings.extend(file.warnings)
    written = properties.option_layer(variables, found.problems)
    model = properties.merged(
        arguments,
        properties.sagemaker_model_layer(variables),
        file.values,
        written,
    )
    for key, model_key in properties.SERVER_DEFAULTS_OF_MODEL_KEYS.items():
        default = server.pop(key, None)
        if default is not None and not any(name in model for name in _names_of(model_key)):
            model[model_key] = default
    for key in arguments:
        for alias in _names_of(key)[1:]:
            model.pop(alias, None)  # another source's, for the same
    if (queue := model.pop("job_queue_size", None)) is not None:
        server["job_queue_size"] = queue
    given = properties.merged(arguments, file.values, written)
    return Sources(directory, variables, server, model, given, remote, applied)


def _names_of(key: str) -> tuple[str, ...]:
    """The key and its aliases."""
    option = options.BY_KEY.get(key)
    return (key,) if option is None else (key, *option.aliases)


def _is_true(value: Value | None) -> bool:
    return value is not None and value.text.strip().lower() in TRUE


def server_layer(
    variables: Mapping[str, Value], command_line: Mapping[str, str], found: Resolution
) -> dict[str, Value]:
    """The server's keys; what is wrong with them is added to `found.problems`."""
    given = {key: Value(text, f"command line: --{key.replace('_', '-')}") for key, text in command_line.items() if text}
    layers = [
        properties.sagemaker_server_layer(variables, found.problems),
        properties.serving_layer(variables, found.problems),
        given,
    ]
    for layer in layers:
        _expand(layer, found)
    return properties.merged(*layers)


def _expand(layer: dict[str, Value], found: Resolution) -> None:
    try:
        expand_address(layer)
    except AddressError as error:
        found.problems.append(str(error))


def _model_dir(
    given: Path | str | Value | None,
    store: Value | None,
    variables: Mapping[str, Value],
    remote: RemoteModels,
    found: Resolution,
) -> Path:
    if isinstance(given, Path | str):
        given = Value(str(given), "command line: --model-dir")
    place = given or store
    if place is not None and is_s3(place.text):
        return _remote_dir("model directory", place, remote, found)
    try:
        directory = location.find_model_dir(given.text if given is not None else None, store)
    except location.ModelNotFound as error:
        found.problems.append(str(error))
        return Path(given.text) if given is not None else location.DEFAULT_MODEL_DIR
    named = variables.get("HF_MODEL_ID")
    if named is not None and is_s3(named.text) and _is_its_own(directory, variables):
        return _remote_dir("HF_MODEL_ID", named, remote, found)
    found.entries.append(SettingEntry("model_dir", str(directory), place.source if place is not None else DEFAULT))
    return directory


def _is_its_own(directory: Path, variables: Mapping[str, Value]) -> bool:
    """Whether HF_MODEL_ID is a model directory, as in LMI, rather than the model of the directory that is here."""
    return "OPTION_MODEL_ID" not in variables and not location.is_model_dir(directory)


def _remote_dir(what: str, place: Value, remote: RemoteModels, found: Resolution) -> Path:
    try:
        directory = remote.open(place.text)
    except SourceError as error:
        found.problems.append(f"{what} is {quoted('', place.text)} ({place.source}): {error}")
        return location.DEFAULT_MODEL_DIR
    found.entries.append(SettingEntry("model_dir", str(directory), place.source, f"of {place.text.strip()}"))
    return directory
