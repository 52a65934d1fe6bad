"""Reads serving.properties, the environment and the command line, and puts them in order of importance.

What goes before what (contracts/lmi.md 2.1): for the model, SageMaker's variables > serving.properties > OPTION_* >
the server's default > the built-in one; for the server, SageMaker's variables > SERVING_* > command line > built-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from container import model_location as location
from container import properties
from container.addresses import AddressError, expand_address
from container.properties import Value
from container.resolution import DEFAULT, Resolution, SettingEntry


@dataclass(slots=True)
class Sources:
    """Everything that was read."""

    model_dir: Path
    variables: Mapping[str, Value]
    server: dict[str, Value]
    model: dict[str, Value]


def read_sources(
    model_dir: Path | None, environ: Mapping[str, str], command_line: Mapping[str, str], found: Resolution
) -> Sources:
    """Read everything and put it in order; what is wrong with it is added to `found.problems`."""
    variables = properties.read_environment(environ, found.problems)
    server = _server_layer(variables, command_line, found)
    directory = _model_dir(model_dir, server.pop("model_store", None), found)
    file = properties.read_properties(directory / properties.FILE_NAME)
    found.problems.extend(file.problems)
    found.warnings.extend(file.warnings)
    model = properties.merged(
        properties.sagemaker_model_layer(variables),
        file.values,
        properties.option_layer(variables, found.problems),
        {
            model_key: server.pop(key)
            for key, model_key in properties.SERVER_DEFAULTS_OF_MODEL_KEYS.items()
            if key in server
        },
    )
    if (queue := model.pop("job_queue_size", None)) is not None:
        server["job_queue_size"] = queue
    return Sources(directory, variables, server, model)


def _server_layer(
    variables: Mapping[str, Value], command_line: Mapping[str, str], found: Resolution
) -> dict[str, Value]:
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
