"""The commands of docs/tasks, docs/migrating.md and docs/explain.md run, and print what the pages show.

tests/live/page_commands.py says which blocks are commands and which are outputs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from container.sources.sample_model import prepare
from tests.live.page_commands import at_port, commands, is_shown, printed
from tests.live.server import Server, write_model
from tests.live.small_model import prepare_small_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))
# The commands of the page on Kubernetes need a cluster.
OTHERS = [ROOT / "docs" / name for name in ("migrating.md", "explain.md")]
PAGES = [*(page for page in TASKS if page.stem != "kubernetes"), *OTHERS]
SMALL: dict[str, object] = {"dtype": "fp32", "kv_cache_memory_bytes": 64 << 20, "max_model_len": 512}
AWS = {
    "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": "http://localhost:8080",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "local",
    "AWS_SECRET_ACCESS_KEY": "local",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def engine_with(**options: object) -> Callable[[Path], Server]:
    """Return a function that starts a server for the sample model with these options."""

    def start(directory: Path) -> Server:
        model = write_model(directory / "served", model_id=prepare(), **SMALL, **options)
        return Server(model, directory / "server.log", arguments=("--local-endpoint", "my-endpoint"))

    return start


def example(name: str) -> Callable[[Path], Server]:
    """Return a function that starts a server for a model directory of examples/."""

    def start(directory: Path) -> Server:
        options = {f"OPTION_{option.upper()}": str(value) for option, value in SMALL.items()}
        environment = {"HF_MODEL_ID": str(prepare()), **options}
        arguments = ("--local-endpoint", "my-endpoint")
        return Server(ROOT / "examples" / name, directory / "server.log", environment, arguments=arguments)

    return start


def small_embedding_model(directory: Path) -> Server:
    model = write_model(directory / "served", model_id=prepare_small_model(), task="text-embedding", **SMALL)
    return Server(model, directory / "server.log", arguments=("--local-endpoint", "my-endpoint"))


def two_copies(directory: Path) -> Server:
    model = write_model(directory / "served", model_id=prepare_small_model(), **SMALL)
    return Server(model, directory / "server.log", {"SERVING_MAX_WORKERS": "2"})


# Pages whose commands need a different server from `make run`'s.
SERVERS: dict[str, Callable[[Path], Server]] = {
    "adapters": engine_with(enable_lora="true"),
    "all_gpus": two_copies,
    "own_format": example("own_format"),
    "own_handler": example("own_handler"),
    "several_models": engine_with(),
    "tools_and_json": engine_with(tool_call_parser="hermes"),
    "vectors": small_embedding_model,
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in SERVERS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(sample_server: Server, tmp_path: Path, page: Path) -> None:
    assert_commands(page, sample_server, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in SERVERS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_with_its_own_server_print_what_it_shows(tmp_path: Path, page: Path) -> None:
    with SERVERS[page.stem](tmp_path) as server:
        assert_commands(page, server, tmp_path)


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
