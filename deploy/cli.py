"""The command line: the container's commands, and those that deploy it."""

from __future__ import annotations

from container.cli import app

__all__ = ["app", "main"]


def main() -> None:
    """The console script `slipway`."""
    app()
