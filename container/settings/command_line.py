"""The options of the commands that start a server, and the settings that are read from them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from container.settings.load import load_startup
from container.settings.settings import SettingsError, Startup
from container.sources.location import is_s3

ModelDir = Annotated[
    str | None,
    typer.Option(
        "--model-dir",
        "-m",
        help="Directory, or s3://, with the model or its serving.properties.",
        show_default="/opt/ml/model",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model-name", help="Name of the model in routes and in /ping.", show_default="from the model"),
]


def read_startup(
    model_dir: str | None,
    port: int | None,
    host: str | None,
    model_name: str | None,
    api_keys: Sequence[str] | None = None,
    capture: str | None = None,
    gpus: int | None = None,
    *,
    model: str | None = None,
    verbose: bool = False,
) -> Startup:
    """Read the settings of the server and its models. If they are invalid, print the faults and exit with code 2.

    `gpus` is the number of GPUs. If it is None, the GPUs that this process sees are counted. `model` is a model
    directory or a hub model.
    """
    if model is not None and (is_s3(model) or os.path.isdir(model)):
        if model_dir is not None:
            raise typer.BadParameter(
                "names a directory, and so does --model-dir: give one of them", param_hint="--model"
            )
        model_dir, model = model, None
    given: dict[str, Any] = {"port": port, "host": host, "model_name": model_name, "capture": capture}
    if verbose:
        given["verbose"] = "true"
    if api_keys:
        given["api_keys"] = json.dumps(list(api_keys))
    command_line = {name: str(value) for name, value in given.items() if value is not None}
    try:
        return load_startup(model_dir, os.environ, command_line, gpus, model)
    except SettingsError as error:
        for problem in error.problems:
            typer.echo(f"slipway: {problem}", err=True)
        for warning in error.warnings:
            typer.echo(f"slipway: warning: {warning}", err=True)
        sys.exit(2)
