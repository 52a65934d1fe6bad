"""Many replicas on Ray Serve, of the same application with all contracts; `deploy.ray:application` for `serve run`."""

from __future__ import annotations

from typing import Any


def application(args: dict[str, Any]) -> Any:
    """Build the Serve application; see `deploy.ray.deployment`, which imports Ray."""
    from deploy.ray.deployment import application

    return application(args)
