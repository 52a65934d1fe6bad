"""The command line: the container's commands, and those that deploy it."""

from __future__ import annotations

from container.cli import app
from deploy.local import command as local_command

__all__ = ["app", "main"]

local_command.register(app)


def main() -> None:
    """The console script `slipway`."""
    app()
