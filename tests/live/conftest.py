from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from container.sample_model import prepare
from tests.live.server import Server, serving

# float32: in bfloat16 a greedy answer can flip where two tokens tie, and these tests compare texts.
ENGINE = {"dtype": "fp32", "max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20, "max_rolling_batch_size": 32}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.live)
            # torch, transformers and vLLM warn of each other.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def sample_model() -> Path:
    return prepare()


@pytest.fixture(scope="session")
def engine_options(sample_model: Path) -> dict[str, object]:
    return {"model_id": sample_model, **ENGINE}


@pytest.fixture(scope="session", params=["lmi-dist", "scheduler"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each rolling-batch engine in turn; vLLM as LMI's lmi-dist, which has all parameters."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, engine: str, engine_options: dict[str, object]
) -> Iterator[Server]:
    """A server with the default formatter."""
    with serving(tmp_path_factory.mktemp("server"), rolling_batch=engine, **engine_options) as running:
        yield running


@pytest.fixture(scope="session")
def tgi_server(
    tmp_path_factory: pytest.TempPathFactory, engine: str, engine_options: dict[str, object]
) -> Iterator[Server]:
    """A server in TGI's clothes."""
    with serving(tmp_path_factory.mktemp("tgi"), rolling_batch=engine, tgi_compat="true", **engine_options) as running:
        yield running


@pytest.fixture(scope="session")
def bare_texts(sample_model: Path) -> dict[str, dict[str, Any]]:
    """What bare AsyncLLM generates greedily for each of PROMPTS, in a process of its own."""
    script = Path(__file__).with_name("bare_asyncllm.py")
    arguments = {
        "model": str(sample_model),
        "dtype": "float32",
        "max_model_len": ENGINE["max_model_len"],
        "kv_cache_memory_bytes": ENGINE["kv_cache_memory_bytes"],
    }
    finished = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    texts: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return texts
