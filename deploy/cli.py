"""The command line: the container's commands, and those that deploy it."""

from __future__ import annotations

from container.cli import app
from deploy.sagemaker.commands import register as register_sagemaker

__all__ = ["app", "main"]

register_sagemaker(app)


def main() -> None:
    """The console script `slipway`."""
    app()
