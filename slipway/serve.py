"""`slipway serve` and `slipway config`."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from container.gpus import described_gpus, machine_gpus
from container.http.router import Mount
from container.models.placement import gpu_plan, hub_asked_once
from container.models.shown_parsers import with_parsers_shown
from container.observability import logs
from container.settings.command_line import ModelDir, ModelName, read_startup
from container.settings.report import startup_json, startup_text
from container.settings.settings import Startup
from deploy.local_endpoint.command import (
    Adapters,
    AsyncFailures,
    AsyncOutput,
    Capture,
    Components,
    LocalEndpoints,
    LocalOptions,
    S3Folder,
    local_endpoint_of,
    make_directory,
)

ModelArgument = Annotated[str | None, typer.Argument(help="The same as --model.", metavar="MODEL")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="The model: its name on the Hugging Face hub, a directory, or s3://."),
]
Port = Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on.", show_default="8080")]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.", show_default="0.0.0.0")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="API key, in addition to those in SERVING_API_KEYS_FILE. Each caller needs one of the keys. Repeatable.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log all lines of vLLM and other libraries.")]


def serve(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    model_dir: ModelDir = None,
    port: Port = None,
    host: Host = None,
    model_name: ModelName = None,
    api_key: ApiKeys = None,
    local_endpoint: LocalEndpoints = None,
    adapter: Adapters = None,
    component: Components = None,
    async_output: AsyncOutput = None,
    async_failures: AsyncFailures = None,
    s3_folder: S3Folder = None,
    capture: Capture = None,
    verbose: Verbose = False,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C."""
    startup = read_startup(
        model_dir,
        port,
        host,
        model_name,
        api_key,
        None if capture is None else str(capture),
        model=_one_model(model_argument, model),
        verbose=verbose,
    )
    if startup.server_config.capture is not None:
        make_directory("--capture", Path(startup.server_config.capture))
    options = LocalOptions(
        component=component,
        adapter=adapter,
        async_output=async_output,
        async_failures=async_failures,
        s3_folder=s3_folder,
        capture=capture if local_endpoint else None,
    )
    if local_endpoint:
        mount, greeting = local_endpoint_of(startup.server_config, local_endpoint, options)
        run(startup, [mount], greeting)
    for option in options.given():
        raise typer.BadParameter("has no meaning without --local-endpoint", param_hint=option)
    run(startup)


def run(startup: Startup, mounts: Sequence[Mount] = (), greeting: str = "") -> NoReturn:
    """Print the greeting, run the server, and exit with the server's exit code."""
    codes: list[int] = []

    def end() -> None:
        try:
            logs.flush()
        finally:
            if codes:
                os._exit(codes[0])

    # Exit functions run in reverse order, so `end` runs after all functions that are registered later.
    atexit.register(end)
    logging_as = startup.server_config.log_format, startup.server_config.log_level
    quiet = not startup.server_config.verbose and startup.server_config.log_level != "debug"
    logs.configure(*logging_as, redirect=True, quiet=quiet)
    logs.configure_vllm(*logging_as)
    if greeting:
        typer.echo(greeting)
    for warning in startup.warnings:
        logging.getLogger("container.settings.load").warning("%s", warning)
    from container import server

    codes.append(server.serve(startup, mounts))
    sys.exit(codes[0])


def _one_model(argument: str | None, option: str | None) -> str | None:
    """Return the model that is given as the argument or as --model."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"is {option!r}, but the argument is {argument!r}", param_hint="--model")
    return argument if option is None else option


def config(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    model_dir: ModelDir = None,
    port: Port = None,
    host: Host = None,
    model_name: ModelName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs of another machine to plan for, such as 4x24GiB.", metavar="GPUS")
    ] = None,
) -> None:
    """Show the effective settings and their sources, the parsers of the models, and the GPUs that the models take."""
    try:
        machine = machine_gpus() if gpus is None else described_gpus(gpus)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpus") from None
    model = _one_model(model_argument, model)
    startup = read_startup(model_dir, port, host, model_name, gpus=len(machine), model=model)
    os.environ.update(startup.exports)  # The libraries that read from the hub need these variables.
    with hub_asked_once([model.settings for model in startup.models]) as note:
        if note:
            typer.echo(f"slipway: note: {note}", err=True)
        startup = with_parsers_shown(startup)
        plan = gpu_plan([model.settings for model in startup.models], machine)
    typer.echo(startup_json(startup, plan) if as_json else startup_text(startup, plan))
