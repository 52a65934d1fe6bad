"""Two copies of a model on one CPU, real vLLM: one engine for its clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.live.continued_calls import CASES, OPTIONS, add_adapters, answer, answers
from tests.live.server import Server, serving
from tests.waiting import wait_until

COPIES = {"maxWorkers": "2"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two copies, which may die many times."""
    directory = tmp_path_factory.mktemp("copies")
    add_adapters(directory / "model", Path(str(small_options["model_id"])))
    environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": "200", "SERVING_MAX_WORKERS": "2"}
    with serving(directory, environment, **OPTIONS, **small_options) as server:
        yield server


def workers(server: Server) -> list[dict[str, Any]]:
    (described,) = server.client.get("/models/model").json()
    (group,) = described["models"][0]["workerGroups"]
    return group["workers"]


def engine_processes(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "EngineCore" in child.name()]


def test_every_contract_gets_the_answer_of_one_copy(two: Server) -> None:
    found = answers(two, CASES)
    for name, case in CASES.items():
        assert answer(two, case) == found[name], name
