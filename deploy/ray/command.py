"""`slipway ray`: replicas on a cluster of Ray, which is started where none is named."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated, Any

import typer

from container import cli
from container.settings.environment import KEY_VARIABLES
from deploy.ray import manifest

_PACKAGE = "ray[serve]==2.60.0"
"""pyproject.toml's extra `ray`."""
_OBJECT_STORE = 100 << 20
"""Bytes of a local cluster's object store; requests and replies do not go through it."""
_LOCAL = {
    # All on one machine: proxies are told of a replica's end in a fraction of a second.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # A busy machine takes longer than Serve's 5 s to start a process.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Lines that differ in a request's id are not the same.
    "RAY_DEDUP_LOGS": "0",
}


def register(app: typer.Typer) -> None:
    """Add `ray`."""
    app.command()(ray)


def ray(
    model_dir: cli.ModelDir = None,
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port of Serve's proxies.")] = 8080,
    host: Annotated[str, typer.Option(help="Address on which Serve's proxies listen.")] = "0.0.0.0",
    model_name: cli.ModelName = None,
    address: Annotated[
        str | None, typer.Option(help="A cluster's address, such as `auto`; a local one is started without it.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Serve application.")] = "slipway",
    replicas: Annotated[int | None, typer.Option(min=1, help="How many replicas.")] = None,
    min_replicas: Annotated[int | None, typer.Option(min=0, help="At least; 0 scales to zero.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="At most.")] = None,
    target: Annotated[float | None, typer.Option(help="Requests for each replica to scale to; 16.")] = None,
    upscale_delay: Annotated[float | None, typer.Option(help="Seconds before replicas are added; 10.")] = None,
    downscale_delay: Annotated[float | None, typer.Option(help="Seconds before replicas are removed; 300.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each replica; its parallel degrees say it otherwise.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="Processors that Ray counts for each replica; 1.")] = None,
    surge: Annotated[
        int | None, typer.Option(min=0, max=100, help="Percent of further replicas during an update; 0.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", help="NAME=VALUE, or NAME of a variable here, for the replicas; repeatable."),
    ] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard with a local cluster.")] = False,
    print_config: Annotated[bool, typer.Option(help="Print Serve's configuration, for `serve deploy`.")] = False,
    kuberay: Annotated[bool, typer.Option(help="Print a manifest of KubeRay's RayService.")] = False,
    image: Annotated[str | None, typer.Option(help="Image with Slipway and Ray, for --kuberay.")] = None,
) -> None:
    """Serve a model by replicas on Ray Serve."""
    given = {
        "model_dir": model_dir,
        "model_name": model_name,
        "replicas": replicas,
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target": target,
        "upscale_delay": upscale_delay,
        "gpus": gpus,
        "downscale_delay": downscale_delay,
        "cpus": cpus,
        "surge": surge,
    }
    options = {key: value for key, value in given.items() if value is not None}
    if (min_replicas is None) != (max_replicas is None):
        raise typer.BadParameter("is one of two that belong together", param_hint="--min-replicas, --max-replicas")
    if replicas is not None and min_replicas is not None:
        raise typer.BadParameter("has no meaning with --min-replicas", param_hint="--replicas")
    environment = _environment(env or [])
    lost = sorted(KEY_VARIABLES & os.environ.keys() - environment.keys())
    if lost and (print_config or kuberay or address is not None):
        raise typer.BadParameter(
            f"replicas elsewhere do not get {lost[0]} and would ask for no key: pass -e {lost[0]}, or unset it",
            param_hint="--env",
        )
    if print_config or kuberay:
        configuration = manifest.serve_configuration(name, options, environment, host, port)
        if kuberay:
            if image is None:
                raise typer.BadParameter("is needed for --kuberay", param_hint="--image")
            machines = (min_replicas or 0, max_replicas) if max_replicas else (replicas or 1, replicas or 1)
            configuration = manifest.ray_service(configuration, image, machines, gpus or 0)
        typer.echo(manifest.as_yaml(configuration), nl=False)
        return
    os.environ.update(environment)
    cli.read_startup(model_dir, None, None, model_name)  # what is wrong with the settings is said here
    _deploy(name, options, environment, host, port, address, dashboard=dashboard)


def _environment(variables: list[str]) -> dict[str, str]:
    pairs = {}
    for text in variables:
        name, given, value = text.partition("=")
        if not given and name not in os.environ:
            raise typer.BadParameter(f"{name} is not set here", param_hint="--env")
        pairs[name] = value if given else os.environ[name]
    return pairs


def _deploy(
    name: str,
    options: dict[str, Any],
    environment: dict[str, str],
    host: str,
    port: int,
    address: str | None,
    *,
    dashboard: bool,
) -> None:
    for variable, value in (manifest.CLUSTER | ({} if address else _LOCAL)).items():
        os.environ.setdefault(variable, value)  # before Ray is imported, which reads it then
    try:
        import ray
        from ray import serve
    except ImportError:
        typer.echo(f"slipway: Ray is not installed: pip install '{_PACKAGE}'", err=True)
        raise typer.Exit(1) from None
    from deploy.ray.deployment import application

    local: dict[str, Any] = {"include_dashboard": dashboard, "object_store_memory": _OBJECT_STORE}
    ray.init(address or "local", runtime_env={"env_vars": environment}, **({} if address else local))
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    try:
        serve.run(application(options), name=name, route_prefix="/")
    except RuntimeError as error:  # the replicas' log has the reason
        typer.echo(f"slipway: {error}", err=True)
        if not address:
            serve.shutdown()  # HAProxy would stay otherwise
        raise typer.Exit(1) from None
    if address:
        typer.echo(f"{name} is deployed; it goes on without this command")
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    typer.echo(f"{name} is served on port {port}, until this command is told to stop")
    stop.wait()
    serve.shutdown()
    ray.shutdown()
