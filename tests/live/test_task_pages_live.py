"""The commands of the pages in docs/tasks and of docs/migrating.md run, and their output is the one on the pages.

tests/live/page_commands.py says which blocks are commands and which are outputs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.live.page_commands import at_port, commands, is_shown, printed
from tests.live.server import Server, serving, write_model
from tests.live.small_model import prepare_small_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "tasks").glob("*.md")), ROOT / "docs" / "migrating.md"]
VECTORS = ROOT / "docs" / "tasks" / "vectors.md"  # Its server has a model for vectors.
ALL_GPUS = ROOT / "docs" / "tasks" / "all_gpus.md"  # Its server has two copies of the model.
MOST_WORDS = 900
AWS = {
    "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": "http://localhost:8080",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in (VECTORS, ALL_GPUS)], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_print_what_it_shows(sample_server: Server, tmp_path: Path, page: Path) -> None:
    assert_commands(page, sample_server, tmp_path)


def test_the_commands_for_vectors_print_what_the_page_shows(tmp_path: Path) -> None:
    options = {"task": "text-embedding", "dtype": "fp32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
    model = write_model(tmp_path / "served", model_id=prepare_small_model(), **options)
    server = Server(model, tmp_path / "server.log", arguments=("--local-endpoint", "my-endpoint"))
    try:
        server.wait_until_ready()
        assert_commands(VECTORS, server, tmp_path)
    finally:
        server.stop()


def test_the_commands_about_copies_print_what_the_page_shows(tmp_path: Path, small_options: dict[str, object]) -> None:
    (served := tmp_path / "served").mkdir()
    with serving(served, {"SERVING_MAX_WORKERS": "2"}, **small_options) as server:
        assert_commands(ALL_GPUS, server, tmp_path)


def assert_commands(page: Path, server: Server, tmp_path: Path) -> None:
    """Run the commands of a page, and compare their outputs with those of the page."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    environment |= {name: at_port(value, server.port) for name, value in AWS.items()}
    found = commands(page.read_text())
    assert found
    wrong = []
    for command in found:
        output = printed(command, server.port, tmp_path, environment)
        assert output.strip(), command.text
        if command.output is not None and not is_shown(command.output, output):
            wrong.append(f"{command.text}\n{output}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS
