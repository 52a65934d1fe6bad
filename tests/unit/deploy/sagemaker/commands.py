from __future__ import annotations

from typer.testing import CliRunner, Result

from slipway.cli import app


def run_command(*arguments: str) -> Result:
    """Run a command of slipway."""
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)
