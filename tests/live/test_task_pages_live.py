"""The commands of the pages in docs/tasks run, and their output is the one on the pages.

tests/live/page_commands.py says which blocks are commands and which are outputs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.live.page_commands import at_port, commands, is_shown, printed
from tests.live.server import Server

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
MOST_WORDS = 900
AWS = {
    "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": "http://localhost:8080",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(sample_server: Server, tmp_path: Path, page: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    environment |= {name: at_port(value, sample_server.port) for name, value in AWS.items()}
    found = commands(page.read_text())
    assert found
    wrong = []
    for command in found:
        output = printed(command, sample_server.port, tmp_path, environment)
        assert output.strip(), command.text
        if command.output is not None and not is_shown(command.output, output):
            wrong.append(f"{command.text}\n{output}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS
