"""`slipway local`, and `--local-endpoint` of `slipway serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Annotated

import typer

from container import cli, logs
from container.http.cross_site import KnownHosts
from container.http.router import Mount, Router
from container.settings.values import names
from deploy.local.errors import REGION, RuntimeApiError
from deploy.local.parameters import check_endpoint_name
from deploy.local.runtime_api import PREFIX, RuntimeApi
from deploy.local.settings import MEBIBYTE, LocalSettings

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}

_Adapters = Annotated[list[str] | None, typer.Option(help="An inference component that is an adapter; repeatable.")]
_Components = Annotated[
    list[str] | None, typer.Option(help="An inference component that is the base model; repeatable.")
]


def register(app: typer.Typer) -> None:
    """Add `local`, and give `serve` its further options."""
    app.registered_commands = [command for command in app.registered_commands if command.callback is not cli.serve]
    app.command()(serve)
    app.command()(local)


def serve(
    model_dir: cli.ModelDir = None,
    port: cli.Port = None,
    host: cli.Host = None,
    model_name: cli.ModelName = None,
    api_key: cli.ApiKeys = None,
    local_endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Serve SageMaker's runtime API as well, for an endpoint of this name; repeatable."),
    ] = None,
    adapter: _Adapters = None,
    component: _Components = None,
) -> None:
    """Serve a model until told to stop."""
    startup = cli.read_startup(model_dir, port, host, model_name, api_key)
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
    mount = Mount(PREFIX, RuntimeApi(settings, KnownHosts(startup.server.allowed_hosts)), settings.endpoints)
    cli.run(startup, [mount], _greeting(startup.server.host, startup.server.port, settings))


def local(
    container: Annotated[str, typer.Option(help="URL of the container.")],
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port to listen on.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    endpoint_name: Annotated[
        list[str], typer.Option("--endpoint-name", "-e", help="An endpoint's name; repeatable.")
    ] = ["my-endpoint"],  # noqa: B006
    component: _Components = None,
    adapter: _Adapters = None,
    max_payload_mb: Annotated[
        int, typer.Option(min=1, max=1024, help="MiB of a request's body and of an answer.")
    ] = 25,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until the container has to answer.")] = 60.0,
    stream_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a stream has to be complete.")] = 480.0,
) -> None:
    """Serve SageMaker's runtime API on this machine, in front of a container that runs already."""
    import uvloop

    if not container.startswith(("http://", "https://")):
        raise typer.BadParameter(f"is {container!r}; expected http://host:port", param_hint="--container")
    settings = LocalSettings(
        endpoints=_checked("--endpoint-name", endpoint_name),
        components=frozenset(_checked("--component", component or [])),
        adapters=frozenset(_checked("--adapter", adapter or [])),
        max_payload=max_payload_mb * MEBIBYTE,
        answer_timeout=timeout,
        stream_timeout=stream_timeout,
    )
    logs.configure("plain", "info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the container has an access line for each call
    typer.echo(_greeting(host, port, settings))
    uvloop.run(_run(container.rstrip("/"), settings, host, port))


async def _run(url: str, settings: LocalSettings, host: str, port: int) -> None:
    from container.server import http_server, listen
    from deploy.local.remote_container import RemoteContainer

    hosts = KnownHosts(names(os.environ.get("SERVING_ALLOWED_HOSTS", "")))
    container = RemoteContainer(url, hosts)
    server = http_server(Router(container, [Mount(PREFIX, RuntimeApi(settings, hosts))]))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    with listen(host, port) as listener:
        await server.serve([listener])
    await container.close()


def _greeting(host: str, port: int, settings: LocalSettings) -> str:
    url = _url(host, port)
    return (
        f"SageMaker's runtime API at {url}; endpoints: {', '.join(settings.endpoints)}\n"
        f"export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n"
        f"export AWS_DEFAULT_REGION={REGION} AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local"
        "  # SDKs want some; any will do"
    )


def _url(host: str, port: int) -> str:
    return f"http://{_LOOPBACK.get(host, f'[{host}]' if ':' in host else host)}:{port}"


def _checked(option: str, names: list[str]) -> tuple[str, ...]:
    for name in names:
        try:
            check_endpoint_name(name)
        except RuntimeApiError as error:
            raise typer.BadParameter(error.message, param_hint=option) from None
    return tuple(dict.fromkeys(names))
