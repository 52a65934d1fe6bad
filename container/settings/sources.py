"""The sources of settings in their order of importance, and the value of an option among them.

Of the model: SageMaker's variables, serving.properties, OPTION_*, the server's default, the built-in default.
Of the server: SageMaker's variables, SERVING_*, the command line, the built-in default.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from container.settings.aliases import AppliedAlias, read_variables, with_aliases
from container.settings.options import BY_KEY, Option
from container.settings.parsers import Scalar
from container.settings.properties import (
    FILE_NAME,
    SERVER_DEFAULTS_OF_MODEL_KEYS,
    Value,
    is_true,
    option_layer,
    read_properties,
    sagemaker_model_layer,
    sagemaker_server_layer,
    serving_layer,
)
from container.settings.server_options import Address, AddressError
from container.settings.settings import SettingEntry
from container.sources import location
from container.sources.local_copy import download_dir
from container.sources.location import RemoteModels, SourceError, is_s3

DEFAULT = "default"
_NONE: Mapping[str, Value] = {}
_CLOSE = 0.92
"""Names that are more alike than this are taken for misspellings (`difflib`)."""


@dataclass(slots=True)
class Lookup:
    """Looks up the values of options, and collects entries of the report, warnings and problems."""

    entries: list[SettingEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def value(
        self, option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value] = _NONE
    ) -> Scalar | None:
        """The value of an option: from its keys in `layer`, else from its variables, else its default.

        None where there is no value, or where it is wrong, which is then among the problems.
        """
        given = [(key, layer[key]) for key in option.keys if key in layer]
        given = given or [(option.key, variables[name]) for name in option.variables if name in variables][:1]
        if not given:
            value = None if option.default is None else option.parser(option.default)
            if option.shows_default:
                self.entries.append(SettingEntry(option.key, value, DEFAULT))
            return value
        parsed = [self._parse(option, key, text) for key, text in given]
        if None in parsed:
            return None
        (key, first), value = given[0], parsed[0]
        for (other_key, other), other_value in zip(given[1:], parsed[1:], strict=True):
            if other_value == value:
                continue
            if not option.first_counts:
                self.problems.append(
                    f"{first.describe(key)}, but {other.describe(other_key)}; both are the same option: "
                    "give one of them"
                )
                return None
            self.warnings.append(f"{other_key} ({other.source}) is ignored: {first.describe(key)}")
        self.entries.append(SettingEntry(option.key, value, first.source))
        return value

    def ignore(self, key: str, value: Value, reason: str) -> None:
        """Record a value that has no effect, and warn."""
        self.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
        self.entries.append(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))

    def replace(self, entry: SettingEntry) -> None:
        """Put an entry in the place of the one with the same name."""
        self.entries = [entry if other.name == entry.name else other for other in self.entries]

    def _parse(self, option: Option, key: str, given: Value) -> Scalar | None:
        try:
            value = option.parser(given.text)
        except ValueError:
            self.problems.append(f"{given.describe(key)}; allowed: {option.allowed}")
            return None
        if option.serves is not None and value not in option.serves:
            self.problems.append(
                f"{given.describe(key)}: not served by this version of Slipway; {option.advice} "
                f"(served: {option.allowed})"
            )
            return None
        return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean <known name>?` for a name that is close to a known one, else empty."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ""


FOR_HUB_MODEL = with_aliases(("HF_MODEL_ID", "HF_REVISION"))
"""Variables that name the hub's model, with those of other containers."""
_FOR_ONE_MODEL = FOR_HUB_MODEL | {"SERVING_MODEL_NAME", "SERVING_MODEL_STORE", "SERVING_LOAD_MODELS"}


def for_every_model(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables but those that say which models there are; they count for each model of a server with several."""
    return {name: text for name, text in environ.items() if name not in _FOR_ONE_MODEL}


@dataclass(slots=True)
class Sources:
    """The texts of all settings by key, each from the most important source that has it."""

    model_dir: Path
    variables: Mapping[str, Value]
    server: dict[str, Value]
    model: dict[str, Value]
    given: Mapping[str, Value]
    """Keys of the model from its file, the environment and the management API, for the secure mode."""
    remote_models: RemoteModels
    aliases: tuple[AppliedAlias, ...]


def read_sources(
    model_dir: Path | str | Value | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str],
    lookup: Lookup,
    arguments: Mapping[str, Value],
) -> Sources:
    """Read all sources; what is wrong with them is added to `lookup.problems`. See `load.load_settings`."""
    variables, aliases = read_variables(environ, lookup.problems, lookup.warnings)
    server = server_layer(variables, command_line, lookup)
    server.pop("download_dir", None)
    remote = RemoteModels(download_dir(environ), offline=is_true(variables.get("DJL_OFFLINE")))
    directory = _model_dir(model_dir, server.pop("model_store", None), variables, remote, lookup)
    file = read_properties(directory / FILE_NAME)
    lookup.problems.extend(file.problems)
    lookup.warnings.extend(file.warnings)
    from_variables = option_layer(variables, lookup.problems)
    # The last one that has a key counts.
    model = {**from_variables, **file.values, **sagemaker_model_layer(variables), **arguments}
    for key, model_key in SERVER_DEFAULTS_OF_MODEL_KEYS.items():
        default = server.pop(key, None)
        if default is not None and not any(name in model for name in BY_KEY[model_key].keys):
            model[model_key] = default
    for key in arguments:
        for alias in BY_KEY[key].aliases if key in BY_KEY else ():
            model.pop(alias, None)  # another source's, for the same
    if (queue := model.pop("job_queue_size", None)) is not None:
        server["job_queue_size"] = queue
    given = {**from_variables, **file.values, **arguments}
    return Sources(directory, variables, server, model, given, remote, aliases)


def server_layer(variables: Mapping[str, Value], command_line: Mapping[str, str], lookup: Lookup) -> dict[str, Value]:
    """The server's keys; what is wrong with them is added to `lookup.problems`."""
    given = {key: Value(text, f"command line: --{key.replace('_', '-')}") for key, text in command_line.items() if text}
    serving = serving_layer(variables, lookup.problems)
    sagemaker = sagemaker_server_layer(variables, lookup.problems)
    if (address := serving.get("inference_address")) is not None:
        try:
            parsed = Address.parse(address, "inference_address")
        except AddressError as error:
            lookup.problems.append(str(error))
        else:
            serving.setdefault("host", Value(parsed.host, address.source))
            serving.setdefault("port", Value(parsed.port, address.source))
    return {**given, **serving, **sagemaker}


def _model_dir(
    given: Path | str | Value | None,
    store: Value | None,
    variables: Mapping[str, Value],
    remote: RemoteModels,
    lookup: Lookup,
) -> Path:
    if isinstance(given, Path | str):
        given = Value(str(given), "command line: --model-dir")
    place = given or store
    if place is not None and is_s3(place.text):
        return _remote_dir("model directory", place, remote, lookup)
    try:
        directory = location.find_model_dir(given.text if given is not None else None, store)
    except location.ModelNotFound as error:
        lookup.problems.append(str(error))
        return Path(given.text) if given is not None else location.DEFAULT_MODEL_DIR
    hub_model = variables.get("HF_MODEL_ID")
    if (
        hub_model is not None
        and is_s3(hub_model.text)
        and "OPTION_MODEL_ID" not in variables
        and not location.is_model_dir(directory)
    ):  # as in LMI, it is the model directory then
        return _remote_dir("HF_MODEL_ID", hub_model, remote, lookup)
    lookup.entries.append(SettingEntry("model_dir", str(directory), place.source if place is not None else DEFAULT))
    return directory


def _remote_dir(name: str, place: Value, remote: RemoteModels, lookup: Lookup) -> Path:
    try:
        directory = remote.open(place.text)
    except SourceError as error:
        lookup.problems.append(f"{place.describe(name)}: {error}")
        return location.DEFAULT_MODEL_DIR
    lookup.entries.append(SettingEntry("model_dir", str(directory), place.source, f"of {place.text.strip()}"))
    return directory
