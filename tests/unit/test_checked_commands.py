"""CONTRIBUTING.md says for every command which check runs it."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from slipway.cli import app
from tests.without_make import without_make

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Checks of each command\n")[1].split("\n## ")[0]
LISTED = [name for line in SECTION.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]


def targets() -> list[str]:
    """The targets that `make help` shows."""
    command = ["make", "help"]
    shown = subprocess.run(command, cwd=ROOT, env=without_make(), capture_output=True, text=True, check=True).stdout
    return [f"make {line.split()[0]}" for line in shown.splitlines()]


def subcommands() -> list[str]:
    names = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    return [f"slipway {name}" for name in names]


def programs() -> list[str]:
    """Scripts and examples that somebody starts."""
    found = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.toml"), *ROOT.glob("container/image/*.py")]
    found += [path for folder in ("container", "requirements", "tests") for path in ROOT.glob(f"{folder}/**/*.sh")]
    return [str(path.relative_to(ROOT)) for path in [*found, ROOT / "container" / "image" / "serve"]]


@pytest.mark.parametrize("command", [*targets(), *subcommands(), *programs()])
def test_a_check_is_named_for_every_command(command: str) -> None:
    assert any(fnmatch(command, listed) for listed in LISTED)


def test_the_checks_that_are_named_are_there() -> None:
    tests = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    assert set(re.findall(r"test_\w+\.py", SECTION)) <= tests
