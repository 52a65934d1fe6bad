"""`--local-endpoint` of `slipway serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from container import cli
from container.app import Mount
from deploy.local.errors import REGION, RuntimeApiError
from deploy.local.invocation import LocalSettings
from deploy.local.parameters import check_endpoint_name
from deploy.local.runtime import PREFIX, RuntimeApi

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def register(app: typer.Typer) -> None:
    """Give `serve` its further options."""
    app.registered_commands = [command for command in app.registered_commands if command.callback is not cli.serve]
    app.command()(serve)


def serve(
    model_dir: cli.ModelDir = None,
    port: cli.Port = None,
    host: cli.Host = None,
    model_name: cli.ModelName = None,
    local_endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Serve SageMaker's runtime API as well, for an endpoint of this name; repeatable."),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="An inference component that is an adapter; repeatable.")
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option(help="An inference component that is the base model; repeatable.")
    ] = None,
) -> None:
    """Serve a model until told to stop."""
    startup = cli.read_startup(model_dir, port, host, model_name)
    if not local_endpoint:
        given = {"--adapter": adapter, "--component": component}
        for option in (name for name, value in given.items() if value):
            raise typer.BadParameter("has no meaning without --local-endpoint", param_hint=option)
        cli.run(startup)
    settings = LocalSettings(
        endpoints=_checked("--local-endpoint", local_endpoint),
        components=frozenset(_checked("--component", component or [])),
        adapters=frozenset(_checked("--adapter", adapter or [])),
    )
    url = _url(startup.server.host, startup.server.port)
    typer.echo(
        f"SageMaker's runtime API at {url}; endpoints: {', '.join(settings.endpoints)}\n"
        f"export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n"
        f"export AWS_DEFAULT_REGION={REGION} AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local"
        "  # SDKs want some; any will do"
    )
    cli.run(startup, [Mount(PREFIX, RuntimeApi(settings), settings.endpoints)])


def _url(host: str, port: int) -> str:
    """The URL under which a client on this machine reaches a listener."""
    return f"http://{_LOOPBACK.get(host, f'[{host}]' if ':' in host else host)}:{port}"


def _checked(option: str, names: list[str]) -> tuple[str, ...]:
    for name in names:
        try:
            check_endpoint_name(name)
        except RuntimeApiError as error:
            raise typer.BadParameter(error.message, param_hint=option) from None
    return tuple(dict.fromkeys(names))
