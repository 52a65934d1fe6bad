"""To clients, all copies of the model are one engine.

There is one copy on each GPU. If the machine has only one GPU, there are two copies on this GPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from container.gpus import gpu_count
from tests.gpu import conftest
from tests.gpu.conftest import ON_CPU, TOKENS, OneServer
from tests.live.continued_calls import STEPPED, kill
from tests.live.server import Server, write_model
from tests.waiting import wait_until

PROMPTS = [f"{number} is a number, and the next one is" for number in range(6 if ON_CPU else 16)]
LONG = 200 if ON_CPU else conftest.LONG  # A token of the small model takes milliseconds.
COPIES = max(gpu_count(), 2)
ON_ONE_GPU = ("tests.gpu.places_on_one_gpu", "slipway", "serve")


@pytest.fixture
def server(one_server: OneServer, gpu_options: dict[str, object]) -> Server:
    """Start a server whose copies use all GPUs. On one GPU or on a CPU, there are two copies."""

    def serve(directory: Path) -> Server:
        environment = {"SERVING_ENGINE_RESTART": "3"} | ({"SERVING_MAX_WORKERS": "2"} if gpu_count() < 2 else {})
        program = ON_ONE_GPU if gpu_count() == 1 else ("slipway", "serve")
        model = write_model(directory / "model", rolling_batch="vllm", **gpu_options, **STEPPED)
        return Server(model, directory / "server.log", environment, program=program)

    return one_server.of("copies", serve)


def text(server: Server, prompt: str, tokens: int) -> str:
    answer: str = server.invoke(prompt, max_new_tokens=tokens, ignore_eos_token=True).json()["generated_text"]
    return answer


def texts(server: Server, tokens: int) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: text(server, prompt, tokens), PROMPTS))


def test_each_copy_has_its_share_of_the_calls(server: Server) -> None:
    assert len(server.workers()) == COPIES
    alone = [text(server, prompt, TOKENS) for prompt in PROMPTS]
    assert texts(server, TOKENS) == alone
    tokens = server.by_engine("vllm:generation_tokens_total")
    assert len(tokens) == COPIES
    assert min(tokens.values()) > 0


def test_a_copy_dies_and_its_calls_go_on_at_once(server: Server) -> None:
    right = texts(server, LONG)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(texts, server, LONG)
        kill(server, 4)
        assert found.result() == right
    assert server.ping() == 200
    wait_until(lambda: [worker["status"] for worker in server.workers()] == ["READY"] * COPIES)
    assert texts(server, LONG) == right
