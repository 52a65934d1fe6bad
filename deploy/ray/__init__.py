"""Replicas on Ray Serve, each of which serves all contracts. `serve run` uses `deploy.ray:application`."""

from __future__ import annotations

from typing import Any


def application(args: dict[str, Any]) -> Any:
    """Build the Serve application. See `deploy.ray.deployment`, which imports Ray."""
    from deploy.ray.deployment import application

    return application(args)
