"""`slipway local`, and `--local-endpoint` of `slipway serve`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from container import cli, logs
from container.server import http_server, listen
from deploy.local.container import ContainerProcess
from deploy.local.errors import REGION, RuntimeApiError
from deploy.local.parameters import ENDPOINT_NAME
from deploy.local.runtime import RuntimeApi
from deploy.local.settings import MEBIBYTE, LocalSettings

if TYPE_CHECKING:
    from container.app import Mount

logger = logging.getLogger(__name__)


async def run(settings: LocalSettings, host: str, port: int, child: ContainerProcess | None) -> int:
    """Serve until told to stop, or until the container that was started ends.

    Returns:
        The exit code: the container's, or 0 where it is none of ours.
    """
    try:
        listener = listen(host, port)
    except SystemExit:
        if child is not None:
            child.stop()
            await child.wait()
        raise
    api = RuntimeApi(settings, whole_container=True)
    server = http_server(api)
    watching = asyncio.create_task(child.wait()) if child is not None else None

    def on_signal(number: int) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        if child is None:
            server.should_exit = True
        else:
            child.stop()  # what it still streams goes through us, so we end after it

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if watching is not None:
        watching.add_done_callback(lambda _: setattr(server, "should_exit", True))
    with listener:
        await server.serve([listener])
    await api.close()
    if watching is None:
        return 0
    code = await watching
    if code:
        logger.error("the container ended with exit code %d", code)
    return code


_DEFAULT_NAME = "my-endpoint"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}

_EndpointNames = Annotated[list[str], typer.Option("--endpoint-name", "-e", help="An endpoint's name; repeatable.")]
_Components = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--component", help="An inference component that is the base model; repeatable."),
]
_Adapters = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--adapter", help="An inference component that is an adapter, NAME or NAME=SOURCE; repeatable."),
]
_ModelsDir = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--models-dir", help="Directory in which TargetModel is looked for."),
]
_AsyncOutput = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--async-output", help="Folder or s3:// URI for results of asynchronous invocations."),
]
_MaxPayload = Annotated[int, typer.Option(min=1, max=1024, help="MiB of a request's body and of an answer.")]
_Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds until the container has to answer.")]
_StreamTimeout = Annotated[float, typer.Option(min=0.1, help="Seconds until a stream has to be complete.")]
_LocalEndpoints = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--local-endpoint", help="Serve SageMaker's runtime API as well, for an endpoint of this name; repeatable."
    ),
]


def register(app: typer.Typer) -> None:
    """Add `local`, and give `serve` its option."""
    app.registered_commands = [command for command in app.registered_commands if command.callback is not cli.serve]
    app.command()(serve)
    app.command()(local)


def serve(
    model_dir: cli.ModelDir = None,
    port: cli.Port = None,
    host: cli.Host = None,
    model_name: cli.ModelName = None,
    local_endpoint: _LocalEndpoints = None,
    adapter: _Adapters = None,
    component: _Components = None,
    async_output: _AsyncOutput = None,
) -> None:
    """Serve a model until told to stop."""
    startup = cli.read_startup(model_dir, port, host, model_name)
    given = {"--adapter": adapter, "--component": component, "--async-output": async_output}
    if not local_endpoint:
        for option in (name for name, value in given.items() if value):
            raise typer.BadParameter("has no meaning without --local-endpoint", param_hint=option)
        cli.run(startup)
    mount = _mount(
        LocalSettings(
            container=_url(startup.server.host, startup.server.port),
            endpoints=_checked("--local-endpoint", local_endpoint),
            async_output=async_output,
            **_named(component, adapter),
        )
    )
    cli.run(startup, [mount])


def local(
    container: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="URL of a container that runs already; without it, one is started."),
    ] = None,
    model_dir: cli.ModelDir = None,
    model_name: cli.ModelName = None,
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port to listen on.")] = 8080,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    endpoint_name: _EndpointNames = [_DEFAULT_NAME],  # noqa: B006
    component: _Components = None,
    adapter: _Adapters = None,
    models_dir: _ModelsDir = None,
    async_output: _AsyncOutput = None,
    max_payload_mb: _MaxPayload = 25,
    timeout: _Timeout = 60.0,
    stream_timeout: _StreamTimeout = 480.0,
) -> None:
    """Serve SageMaker's runtime API on this machine, in front of a container."""
    import uvloop

    if container is not None and (model_dir is not None or model_name is not None):
        raise typer.BadParameter(
            "has a model already; leave --model-dir and --model-name out", param_hint="--container"
        )
    if container is not None and not container.startswith(("http://", "https://")):
        raise typer.BadParameter(f"is {container!r}; expected http://host:port", param_hint="--container")
    names, named = _checked("--endpoint-name", endpoint_name), _named(component, adapter)
    logs.configure("plain", "info")
    _hush()
    child = None
    if container is None:
        arguments = ["--model-dir", str(model_dir)] if model_dir is not None else []
        arguments += ["--model-name", model_name] if model_name is not None else []
        child = ContainerProcess(arguments)
        container = child.url
    settings = LocalSettings(
        container=container.rstrip("/"),
        endpoints=names,
        models_dir=models_dir,
        async_output=async_output,
        max_payload=max_payload_mb * MEBIBYTE,
        answer_timeout=timeout,
        stream_timeout=stream_timeout,
        **named,
    )
    typer.echo(_how_to_reach(_url(host, port), names))
    sys.exit(uvloop.run(run(settings, host, port, child)))


def _mount(settings: LocalSettings) -> Mount:
    from container.app import Mount
    from deploy.local.runtime import PREFIX, RuntimeApi

    typer.echo(_how_to_reach(settings.container, settings.endpoints))
    _hush()
    api = RuntimeApi(settings)
    return Mount(PREFIX, api, api.close)


def _hush() -> None:
    """The container has an access line for each call; httpx need not add its own."""
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _url(host: str, port: int) -> str:
    """Where a client on this machine reaches what listens there."""
    shown = _LOOPBACK.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _how_to_reach(url: str, names: tuple[str, ...]) -> str:
    return (
        f"SageMaker's runtime API at {url}; endpoints: {', '.join(names)}\n"
        f"export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n"
        f"export AWS_DEFAULT_REGION={REGION} AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local"
        "  # SDKs want some; any will do"
    )


def _named(components: list[str] | None, adapters: list[str] | None) -> dict[str, Any]:
    """The inference components."""
    pairs = [text.partition("=") for text in adapters or ()]
    _checked("--adapter", [name for name, _, _ in pairs])
    return {
        "components": frozenset(_checked("--component", components or [])),
        "adapters": {name: source for name, _, source in pairs},
    }


def _checked(option: str, names: list[str]) -> tuple[str, ...]:
    for name in names:
        if not name:
            raise typer.BadParameter("a name is missing", param_hint=option)
        try:
            ENDPOINT_NAME.check(name)
        except RuntimeApiError as error:
            raise typer.BadParameter(error.message, param_hint=option) from None
    return tuple(dict.fromkeys(names))
