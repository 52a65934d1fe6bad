"""The manifest that `slipway ray --kuberay` prints: a RayService of KubeRay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.yaml_text import as_yaml

RAY = "2.60.0"  # The release of the extra `ray` of pyproject.toml. The manifest was tested with it.
# KubeRay adds these ports only to a container that names no port.
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def ray_service(
    configuration: Mapping[str, Any], image: str, machines: tuple[int, int], gpus: int, cluster: Mapping[str, str]
) -> dict[str, Any]:
    """Return KubeRay's manifest.

    Args:
        image: The image of all pods.
        machines: The smallest and the largest number of worker machines.
        gpus: The number of GPUs in each worker machine.
        cluster: The environment variables of Ray's processes.
    """
    environment = [{"name": variable, "value": value} for variable, value in cluster.items()]
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
