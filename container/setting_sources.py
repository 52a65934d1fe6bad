"""Reads serving.properties, the environment and the command line, and puts them in order of importance.

What goes before what (contracts/lmi.md 2.1): for the model, SageMaker's variables > serving.properties > OPTION_* >
the server's default > the built-in one; for the server, SageMaker's variables > SERVING_* > command line > built-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from container import model_location as location
from container import options, properties
from container.addresses import AddressError, expand_address
from container.aliases import AppliedAlias, read_variables, with_aliases
from container.masking import quoted
from container.option_parsers import TRUE
from container.properties import Value
from container.remote_models import RemoteModels, SourceError, is_s3
from container.resolution import DEFAULT, Resolution, SettingEntry
from container.sources.local_copy import download_dir

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
