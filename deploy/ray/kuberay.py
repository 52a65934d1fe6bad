"""What `serve deploy` and KubeRay read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RAY = "2.60.0"
"""The release that this was run with; pyproject.toml has the same."""
_IMPORT_PATH = "deploy.ray:application"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Serve's variable for HAProxy as its proxy, of all processes of a cluster."""
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
"""KubeRay has these only where no port is named."""
CLUSTER = {
    HAPROXY: "1",
    # When replicas come or go, a new HAProxy takes over, and the old one breaks off what still runs after two minutes.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # A replica that is killed before it has answered at all: another one gets the request, once.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise
}
"""The environment of a cluster, where it says nothing else."""


def serve_configuration(
    name: str, options: Mapping[str, Any], environment: Mapping[str, str], host: str, port: int
) -> dict[str, Any]:
    """Serve's configuration, for `serve deploy`."""
    application: dict[str, Any] = {"name": name, "route_prefix": "/", "import_path": _IMPORT_PATH}
    if environment:
        application["runtime_env"] = {"env_vars": dict(environment)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [application | {"args": dict(options)}],
    }


def ray_service(configuration: Mapping[str, Any], image: str, machines: tuple[int, int], gpus: int) -> dict[str, Any]:
    """KubeRay's manifest for a Serve configuration. `machines`: how many at least and at most; `gpus`: of each."""
    environment = [{"name": variable, "value": value} for variable, value in CLUSTER.items()]
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    least, most = machines
    serving = {"serve": configuration["http_options"]["port"]}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": configuration["applications"][0]["name"]},
        "spec": {
            "serveConfigV2": as_yaml(configuration),
            "rayClusterConfig": {
                "rayVersion": RAY,
                "enableInTreeAutoscaling": least != most,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod(image, environment, _HEAD_PORTS | serving, {}),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "replicas",
                        "replicas": least,
                        "minReplicas": least,
                        "maxReplicas": most,
                        "rayStartParams": {},
                        "template": _pod(image, environment, serving, limits),
                    }
                ],
            },
        },
    }


def _pod(
    image: str, environment: list[dict[str, str]], ports: Mapping[str, int], limits: Mapping[str, int]
) -> dict[str, Any]:
    named = [{"name": name, "containerPort": port} for name, port in ports.items()]
    container: dict[str, Any] = {"name": "ray", "image": image, "env": environment, "ports": named}
    if limits:
        container["resources"] = {"limits": dict(limits)}
    return {"spec": {"containers": [container]}}


def as_yaml(document: Mapping[str, Any]) -> str:
    """The document as YAML, in its own order."""
    import yaml  # not needed by `slipway serve`, whose command line this is imported for as well

    text: str = yaml.safe_dump(dict(document), sort_keys=False)
    return text
