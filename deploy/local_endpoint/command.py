"""`slipway local`, and the options of `slipway serve` for a local endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from container.http.cross_site import KnownHosts
from container.http.router import Mount, Router
from container.observability import logs
from container.settings.server import ServerConfig, url_of
from container.sources.location import S3Url, SourceError
from deploy.local_endpoint.errors import REGION, RuntimeApiError
from deploy.local_endpoint.parameters import check_endpoint_name, is_server_url
from deploy.local_endpoint.runtime_api import PREFIX, RuntimeApi
from deploy.local_endpoint.settings import MEBIBYTE, LocalSettings
from deploy.local_endpoint.storage import folder_url
from engines.settings.parsers import names

_DRAIN_SECONDS = ServerConfig().drain_timeout
_S3_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

LocalEndpoints = Annotated[
    list[str] | None,
    typer.Option(help="Serve SageMaker's runtime API as well, for an endpoint of this name; repeatable."),
]
Adapters = Annotated[
    list[str] | None, typer.Option(help="Name of an inference component that stands for a LoRA adapter; repeatable.")
]
Components = Annotated[
    list[str] | None, typer.Option(help="Name of an inference component that stands for the base model; repeatable.")
]

AsyncOutput = Annotated[
    str | None,
    typer.Option(
        help="s3:// folder for the answers of asynchronous calls. Without --s3-folder, it is a folder in the real S3."
    ),
]
AsyncFailures = Annotated[
    str | None,
    typer.Option(help="s3:// folder for the failures of asynchronous calls. Default: the folder of the answers."),
]
S3Folder = Annotated[
    Path | None,
    typer.Option(help="Directory that takes the place of S3: s3://bucket/key is the file bucket/key in it."),
]
Capture = Annotated[
    Path | None,
    typer.Option(
        help="Directory in which requests and answers are recorded. Calls of a local endpoint have the form of "
        "SageMaker's data capture."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options that `slipway local` and `slipway serve` share, as given by the user."""

    component: list[str] | None
    adapter: list[str] | None
    async_output: str | None
    async_failures: str | None
    s3_folder: Path | None
    capture: Path | None

    def given(self) -> list[str]:
        """Return the options that were given."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return [f"--{name.replace('_', '-')}" for name, value in options.items() if value]

    def settings(self, option: str, endpoints: list[str], **limits: Any) -> LocalSettings:
        """Return the settings of the local endpoint.

        Args:
            option: The option that lists the names of the endpoints.
            limits: Further fields of `LocalSettings`.

        Raises:
            typer.BadParameter: An option's value is not allowed.
        """
        places: dict[str, Any] = {
            "async_output": _s3_folder("--async-output", self.async_output),
            "async_failures": _s3_folder("--async-failures", self.async_failures),
            "s3_folder": make_directory("--s3-folder", self.s3_folder),
            "capture": make_directory("--capture", self.capture),
        }
        return LocalSettings(
            endpoints=_checked(option, endpoints),
            components=frozenset(_checked("--component", self.component or [])),
            adapters=frozenset(_checked("--adapter", self.adapter or [])),
            uses_s3=places["async_output"] is not None or any(os.environ.get(name) for name in _S3_VARIABLES),
            **{name: place for name, place in places.items() if place is not None},
            **limits,
        )


def local_endpoint_of(server_config: ServerConfig, endpoints: list[str], options: LocalOptions) -> tuple[Mount, str]:
    """Return SageMaker's runtime API in front of the server, and a text that tells users how to reach the API."""
    settings = options.settings("--local-endpoint", endpoints)
    _silence_httpx()
    api = RuntimeApi(settings, KnownHosts(server_config.allowed_hosts))
    return Mount(PREFIX, api, settings.endpoints, api.drain), _greeting(
        server_config.host, server_config.port, settings
    )


def local(
    container: Annotated[str, typer.Option(help="URL of the container.")],
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port to listen on.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    endpoint_name: Annotated[
        list[str], typer.Option("--endpoint-name", "-e", help="Name of an endpoint; repeatable.")
    ] = ["my-endpoint"],  # noqa: B006
    component: Components = None,
    adapter: Adapters = None,
    async_output: AsyncOutput = None,
    async_failures: AsyncFailures = None,
    s3_folder: S3Folder = None,
    capture: Capture = None,
    max_payload_mb: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum size of a request's body, and of a whole answer, in MiB.")
    ] = 25,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Maximum seconds until an answer is complete, or a stream begins.")
    ] = 60.0,
    stream_timeout: Annotated[float, typer.Option(min=0.1, help="Maximum seconds until a stream is complete.")] = 480.0,
    allowed_hosts: Annotated[
        str,
        typer.Option(
            envvar="SERVING_ALLOWED_HOSTS",
            help="Further host names under which browsers may reach this server, separated by commas.",
        ),
    ] = "",
) -> None:
    """Serve SageMaker's runtime API on this machine, in front of a running container."""
    import uvloop

    if not is_server_url(container):
        raise typer.BadParameter(f"is {container!r}; expected http://host:port", param_hint="--container")
    options = LocalOptions(
        component=component,
        adapter=adapter,
        async_output=async_output,
        async_failures=async_failures,
        s3_folder=s3_folder,
        capture=capture,
    )
    settings = options.settings(
        "--endpoint-name",
        endpoint_name,
        max_payload=max_payload_mb * MEBIBYTE,
        answer_timeout=timeout,
        stream_timeout=stream_timeout,
    )
    logs.configure("plain", "info")
    _silence_httpx()
    typer.echo(_greeting(host, port, settings))
    uvloop.run(_run(container.rstrip("/"), settings, KnownHosts(names(allowed_hosts)), host, port))


async def _run(url: str, settings: LocalSettings, hosts: KnownHosts, host: str, port: int) -> None:
    from container.server import http_server, listen
    from deploy.local_endpoint.remote_container import RemoteContainer

    container = RemoteContainer(url, hosts)
    api = RuntimeApi(settings, hosts)
    server = http_server(Router(container, [Mount(PREFIX, api)]), _DRAIN_SECONDS)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        if server.should_exit:
            server.drop_connections()  # The second signal ends running calls.
        server.should_exit = True
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with listen(host, port) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        deadline = loop.time() + _DRAIN_SECONDS
        await asyncio.gather(serving, api.drain(_DRAIN_SECONDS))
    await api.drain(max(0.0, deadline - loop.time()))  # Records of the last calls may not be written yet.
    stopping.cancel()
    await container.close()


def _silence_httpx() -> None:
    """Keep httpx's lines out of the log. The container already logs each call."""
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _greeting(host: str, port: int, settings: LocalSettings) -> str:
    url = url_of(host, port)
    return (
        f"SageMaker's runtime API at {url}; endpoints: {', '.join(settings.endpoints)}\n"
        f"export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME={url}\n"
        f"export AWS_DEFAULT_REGION={REGION} AWS_ACCESS_KEY_ID=local AWS_SECRET_ACCESS_KEY=local"
        "  # SDKs want some; any will do"
    )


def _checked(option: str, names: list[str]) -> tuple[str, ...]:
    for name in names:
        try:
            check_endpoint_name(name)
        except RuntimeApiError as error:
            raise typer.BadParameter(error.message, param_hint=option) from None
    return tuple(dict.fromkeys(names))


def _s3_folder(option: str, text: str | None) -> S3Url | None:
    if text is None:
        return None
    try:
        return folder_url(text)
    except SourceError as error:
        raise typer.BadParameter(f"is {text!r}: {error}", param_hint=option) from None


def make_directory(option: str, path: Path | None) -> Path | None:
    """Create the directory that an option names, and return its absolute path.

    Raises:
        typer.BadParameter: The directory cannot be created.
    """
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot be made: {error}", param_hint=option) from None
    return path.absolute()
