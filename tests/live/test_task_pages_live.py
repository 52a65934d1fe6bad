"""The commands of docs/tasks, docs/migrating.md and docs/explain.md run, and print what the pages show.

tests/live/page_commands.py says which blocks are commands and which are outputs.
"""

from __future__ import annotations

import os
import sys
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


# Pages whose commands need a server of their own, not that of `make run`. The values are options of the server's
# model.
OPTIONS: dict[str, dict[str, object]] = {
    "adapters": {"enable_lora": "true"},
    "all_gpus": {},
    "own_format": {},
    "own_handler": {},
    "tools_and_json": {"tool_call_parser": "hermes"},
    "vectors": {"task": "text-embedding"},
}


def own_server(page: str, directory: Path) -> Server:
    """Start the server of a page. Some pages have a model directory in examples/."""
    small = page in ("all_gpus", "vectors")
    options = SMALL | OPTIONS[page] | {"model_id": prepare_small_model() if small else prepare()}
    environment = {"SERVING_MAX_WORKERS": "2"} if page == "all_gpus" else {}
    if page.startswith("own_"):
        model = ROOT / "examples" / page
        environment |= {f"OPTION_{name.upper()}": str(value) for name, value in options.items()}
    else:
        model = write_model(directory / "served", **options)
    return Server(model, directory / "server.log", environment, arguments=("--local-endpoint", "my-endpoint"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in OPTIONS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(sample_server: Server, tmp_path: Path, page: Path) -> None:
    assert_commands(page, sample_server, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in OPTIONS], ids=lambda page: page.stem)
def test_the_commands_of_a_page_with_its_own_server_print_what_it_shows(tmp_path: Path, page: Path) -> None:
    with own_server(page.stem, tmp_path) as server:
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
        for _ in range(5 if page.stem == "explain" else 1):  # On a busy machine, the search for origins may time out.
            output = printed(command, server.port, tmp_path, environment)
            assert output.strip(), command.text
            if is_right := command.output is None or is_shown(command.output, output):
                break
        if not is_right:
            wrong.append(f"{command.text}\n{output}")
    assert not wrong, "\n".join(wrong)
