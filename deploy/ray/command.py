"""`slipway ray`: serves a model with replicas on a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated, Any

import typer

from container.settings.command_line import ModelDir, ModelName, read_startup
from container.settings.environment import KEY_VARIABLES
from deploy.ray.kuberay import RAY, ray_service
from deploy.ray.serve_config import BALANCE, CLUSTER, balance_by_prefix, serve_configuration
from deploy.yaml_text import as_yaml

_OBJECT_STORE = 100 << 20  # The size of a local cluster's object store in bytes. Requests and replies do not use it.
_LOCAL = {
    # A stopping replica accepts requests for this time, until the proxies know that it stops. On one machine, they know
    # it within a fraction of a second.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # A busy machine needs more than Serve's default of 5 s to start a proxy.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Ray would drop log lines that differ only in the id of a request.
    "RAY_DEDUP_LOGS": "0",
}


def ray(
    model_dir: ModelDir = None,
    port: Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port of Serve's proxies.")] = 8080,
    host: Annotated[str, typer.Option(help="Address on which Serve's proxies listen.")] = "0.0.0.0",
    model_name: ModelName = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a cluster, such as `auto`. Default: start a local cluster.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Serve application.")] = "slipway",
    replicas: Annotated[int | None, typer.Option(min=1, help="Number of replicas. Default: 1.")] = None,
    min_replicas: Annotated[
        int | None, typer.Option(min=0, help="Smallest number of replicas. 0 allows scaling to zero.")
    ] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Largest number of replicas.")] = None,
    target: Annotated[
        float | None,
        typer.Option(min=0.01, help="Average number of requests per replica at which autoscaling aims. Default: 16."),
    ] = None,
    upscale_delay: Annotated[
        float | None, typer.Option(min=0, help="Seconds of higher load before replicas are added. Default: 10.")
    ] = None,
    downscale_delay: Annotated[
        float | None, typer.Option(min=0, help="Seconds of lower load before replicas are removed. Default: 300.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each replica. Default: the number that its parallel degrees need."),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, help="Processors that Ray reserves for each replica. Default: 1.")
    ] = None,
    surge: Annotated[
        int | None, typer.Option(min=0, max=100, help="Additional replicas during an update, in percent. Default: 0.")
    ] = None,
    prefix_bytes: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=8192,
            help="Send requests to the same replica if the first bytes of their bodies are equal. The value is the "
            "number of bytes. Default: send each request to the replica with the fewest connections. Not with "
            "--address or --print-config.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            help="Environment variable of the replicas: NAME=VALUE, or NAME to copy it from here. Repeatable.",
        ),
    ] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard with a local cluster.")] = False,
    print_config: Annotated[bool, typer.Option(help="Print the configuration file for `serve deploy`.")] = False,
    kuberay: Annotated[bool, typer.Option(help="Print the manifest of a KubeRay RayService.")] = False,
    image: Annotated[str | None, typer.Option(help="Image that contains Slipway and Ray, for --kuberay.")] = None,
) -> None:
    """Serve a model with replicas on Ray Serve."""
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
        raise typer.BadParameter("give both or neither", param_hint="--min-replicas, --max-replicas")
    if min_replicas is not None and max_replicas is not None and min_replicas > max_replicas:
        raise typer.BadParameter(f"is {max_replicas}; expected at least --min-replicas", param_hint="--max-replicas")
    if replicas is not None and min_replicas is not None:
        raise typer.BadParameter("cannot be combined with --min-replicas", param_hint="--replicas")
    environment = _environment(env or [])
    lost = sorted(KEY_VARIABLES & os.environ.keys() - environment.keys())
    if lost and (print_config or kuberay or address is not None):
        raise typer.BadParameter(
            f"remote replicas would not get {lost[0]}, and would ask for no key: pass -e {lost[0]}, or unset it",
            param_hint="--env",
        )
    cluster = dict(CLUSTER) if prefix_bytes is None else CLUSTER | {BALANCE: balance_by_prefix(prefix_bytes)}
    if prefix_bytes is not None and (print_config or address is not None):
        raise typer.BadParameter(
            f"set {BALANCE} on the machines of the cluster, to {cluster[BALANCE]!r}", param_hint="--prefix-bytes"
        )
    if print_config or kuberay:
        configuration = serve_configuration(name, options, environment, host, port)
        if kuberay:
            if image is None:
                raise typer.BadParameter("is required with --kuberay", param_hint="--image")
            if gpus is None:
                raise typer.BadParameter("is required with --kuberay; 0 is a CPU", param_hint="--gpus")
            machines = (min_replicas or 0, max_replicas) if max_replicas else (replicas or 1, replicas or 1)
            configuration = ray_service(configuration, image, machines, gpus, cluster)
        typer.echo(as_yaml(configuration), nl=False)
        return
    os.environ.update(environment)
    read_startup(model_dir, None, None, model_name)  # Reports invalid settings before Ray starts.
    _deploy(name, options, environment, host, port, address, cluster, dashboard=dashboard)


def _environment(variables: list[str]) -> dict[str, str]:
    pairs = {}
    for text in variables:
        name, given, value = text.partition("=")
        if not name:
            raise typer.BadParameter(f"is {text!r}; expected NAME=VALUE or NAME", param_hint="--env")
        if not given and name not in os.environ:
            raise typer.BadParameter(f"the environment variable {name} is not set", param_hint="--env")
        pairs[name] = value if given else os.environ[name]
    return pairs


def _deploy(
    name: str,
    options: dict[str, Any],
    environment: dict[str, str],
    host: str,
    port: int,
    address: str | None,
    cluster: dict[str, str],
    *,
    dashboard: bool,
) -> None:
    for variable, value in (cluster | ({} if address else _LOCAL)).items():
        os.environ.setdefault(variable, value)  # Ray reads these variables on import.
    try:
        import ray
        from ray import serve
    except ImportError:
        typer.echo(f"slipway: Ray is not installed: pip install 'ray[serve]=={RAY}'", err=True)
        raise typer.Exit(1) from None
    from deploy.ray.deployment import application

    local: dict[str, Any] = {"include_dashboard": dashboard, "object_store_memory": _OBJECT_STORE}
    try:
        ray.init(address or "local", runtime_env={"env_vars": environment}, **({} if address else local))
    except (ConnectionError, RuntimeError, ValueError) as error:
        typer.echo(f"slipway: Ray cannot be reached: {error}", err=True)
        raise typer.Exit(1) from None
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
        try:
            serve.run(application(options), name=name, route_prefix="/")
        except (RuntimeError, ValueError) as error:  # If it is a RuntimeError, the replicas' log shows the reason.
            typer.echo(f"slipway: {error}", err=True)
            raise typer.Exit(1) from None
        if address:
            typer.echo(f"{name} is deployed; it keeps running after this command")
            return
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        typer.echo(f"{name} is served on port {port} until this command is stopped")
        stop.wait()
    finally:
        if not address:
            serve.shutdown()  # Otherwise HAProxy would keep running.
            ray.shutdown()
