"""The command line: `slipway serve | config | sample-model | local | ray | replay | explain | deploy | ...`."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from deploy.local_endpoint.command import local
from deploy.ray.command import ray
from deploy.sagemaker import commands as sagemaker
from replay.command import replay
from replay.explain import explain
from slipway.black_box import blackbox
from slipway.serve import config, serve

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipway {version('slipway')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models behind the contracts of LMI, OpenAI, TGI, TEI and Triton, and deploy them."""


app.command()(serve)
app.command()(config)
app.command()(blackbox)


@app.command()
def sample_model() -> None:
    """Create the sample model if it does not exist, and print its directory."""
    from container.sources.sample_model import SampleModelError, prepare

    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        typer.echo(prepare())
    except SampleModelError as error:
        typer.echo(f"slipway: {error}", err=True)
        sys.exit(1)


app.command()(local)
app.command()(ray)
app.command()(replay)
app.command()(explain)
sagemaker.register(app)


def main() -> None:
    """The console script `slipway`."""
    app()
