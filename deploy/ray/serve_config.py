"""Serve's configuration file, which `slipway ray --print-config` prints, and the environment of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IMPORT_PATH = "deploy.ray:application"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # Makes Ray Serve use HAProxy. All processes of a cluster need this variable.
# The default environment of a cluster.
CLUSTER = {
    HAPROXY: "1",
    # When replicas start or stop, a new HAProxy process takes over. By default, the old process aborts its requests
    # after two minutes.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # If a replica is killed before it has begun its answer, another replica gets the request, once. HAProxy can only
    # resend a request that it has buffered completely, so it has to wait for the body. Ray copies this text unchanged
    # into HAProxy's defaults.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response\n    option http-buffer-request",
    "RAY_SERVE_HAPROXY_RETRIES": "1",
    # The largest request that HAProxy can resend: 128 KiB. Each unanswered call takes this much memory.
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "131072",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # The default is 15.
}


BALANCE = "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"


def balance_by_prefix(length: int) -> str:
    """Return HAProxy's balance directive that sends bodies with the same first bytes to the same replica.

    No replica gets more than one and a half times the average number of requests. The next replica gets further
    requests. Ray copies this text unchanged into HAProxy's defaults.

    Args:
        length: The number of bytes that are compared.
    """
    lines = (f"hash req.body,bytes(0,{length}),xxh64", "hash-type consistent", "hash-balance-factor 150")
    return "\n    ".join((*lines, "option http-buffer-request"))


def serve_configuration(
    name: str, options: Mapping[str, Any], environment: Mapping[str, str], host: str, port: int
) -> dict[str, Any]:
    """Return the configuration file for `serve deploy`.

    Args:
        name: The name of the Serve application.
        options: The arguments of the application.
        environment: Additional environment variables for the replicas.
        host: The address of Serve's proxies.
        port: The port of Serve's proxies.
    """
    application: dict[str, Any] = {"name": name, "route_prefix": "/", "import_path": _IMPORT_PATH}
    if environment:
        application["runtime_env"] = {"env_vars": dict(environment)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [application | {"args": dict(options)}],
    }
