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
from container.properties import Value
from container.resolution import DEFAULT, Resolution, SettingEntry

_FOR_ONE_MODEL = ("HF_MODEL_ID", "HF_REVISION", "SERVING_MODEL_NAME", "SERVING_MODEL_STORE", "SERVING_LOAD_MODELS")
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


def read_sources(
    model_dir: Path | None,
    environ: Mapping[str, str],
    command_line: Mapping[str, str],
    found: Resolution,
    arguments: Mapping[str, Value],
) -> Sources:
    """Read everything and put it in order; what is wrong with it is added to `found.problems`."""
    variables = properties.read_environment(environ, found.problems)
    server = server_layer(variables, command_line, found)
    directory = _model_dir(model_dir, server.pop("model_store", None), found)
    file = properties.read_properties(directory / properties.FILE_NAME)
    found.problems.extend(file.problems)
    found.warnings.extend(file.warnings)
    written = properties.option_layer(variables, found.problems)
    model = properties.merged(
        arguments,
        properties.sagemaker_model_layer(variables),
        file.values,
        written,
        {
            model_key: server.pop(key)
            for key, model_key in properties.SERVER_DEFAULTS_OF_MODEL_KEYS.items()
            if key in server
        },
    )
    for key in arguments:
        for alias in options.BY_KEY[key].aliases if key in options.BY_KEY else ():
            model.pop(alias, None)  # another source's, for the same
    if (queue := model.pop("job_queue_size", None)) is not None:
        server["job_queue_size"] = queue
    return Sources(directory, variables, server, model, properties.merged(arguments, file.values, written))


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


def _model_dir(given: Path | None, store: Value | None, found: Resolution) -> Path:
    try:
        directory = location.find_model_dir(given, store)
    except location.ModelNotFound as error:
        found.problems.append(str(error))
        return given or location.DEFAULT_MODEL_DIR
    source = "command line: --model-dir" if given else store.source if store else DEFAULT
    found.entries.append(SettingEntry("model_dir", str(directory), source))
    return directory
