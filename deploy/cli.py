"""The command line: the container's commands, and those that deploy it."""

from __future__ import annotations

from container.cli import app
from deploy.local import command as local
from deploy.ray import command as ray
from deploy.sagemaker import commands as sagemaker

__all__ = ["app", "main"]

local.register(app)
ray.register(app)
sagemaker.register(app)


def main() -> None:
    """The console script `slipway`."""
    app()
