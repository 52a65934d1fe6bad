"""The commands on a page of the documentation, and the outputs that the page shows.

Blocks of the languages `sh` and `python` are run. A block of the language `text` is the output of the block before it.
A line `...` in the output stands for any lines. `...` inside a line stands for any text. Blocks without a language need
Docker, a GPU or AWS.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """A block of a page, and the output that the page shows for it."""

    language: str
    text: str
    output: str | None


def commands(text: str) -> list[Command]:
    """Return the commands of a page's text."""
    blocks = BLOCK.findall(text)
    after = [*blocks[1:], ("none", "")]
    return [
        Command(language, text, shown if following == "text" else None)
        for (language, text), (following, shown) in zip(blocks, after, strict=True)
        if language in ("sh", "python")
    ]


def at_port(text: str, port: int) -> str:
    """Return a page's text for a server on this port instead of 8080."""
    return text.replace("localhost:8080", f"localhost:{port}")


def printed(command: Command, port: int, directory: Path, environment: Mapping[str, str]) -> str:
    """Run a command against the server on this port, and return its output. The command has to succeed."""
    program = [sys.executable, "-c"] if command.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, at_port(command.text, port)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_shown(shown: str, output: str) -> bool:
    """Return True if a page shows this output of a command."""
    # With long runs of blanks, finding a mismatch would take long.
    return re.fullmatch(_pattern(shown), re.sub(" {2,}", " ", output).rstrip("\n") + "\n") is not None


def _pattern(output: str) -> str:
    """The regular expression for an output of a page."""
    lines = (re.sub(r"(\\ )+", " +", re.escape(line)).replace(r"\.\.\.", ".*") + "\n" for line in output.splitlines())
    return "".join(r"(?:.*\n)*?" if line == ".*\n" else line for line in lines) + r"\s*"
