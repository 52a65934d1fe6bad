"""A copy of the model on each of two GPUs: one engine for its clients. It needs a machine with two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from container.gpus import gpu_count
from tests.gpu.conftest import ON_CPU
from tests.live.continued_calls import kill
from tests.live.server import Server, serving
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.usefixtures("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not ON_CPU and gpu_count() < 2, reason="there are no two GPUs"),
]

PROMPTS = [f"{number} is a number, and the next one is" for number in range(16)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, gpu_options: dict[str, object]) -> Iterator[Server]:
    """Start a server without a number of copies: the default uses all GPUs."""
    environment = {"SERVING_ENGINE_RESTART": "3"} | ({"SERVING_MAX_WORKERS": "2"} if ON_CPU else {})
    with serving(tmp_path_factory.mktemp("copies"), environment, rolling_batch="vllm", **gpu_options) as running:
        yield running


def text(server: Server, prompt: str) -> str:
    answer: str = server.invoke(prompt, max_new_tokens=48).json()["generated_text"]
    return answer


def texts(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: text(server, prompt), PROMPTS))


def test_each_gpu_has_a_copy_and_its_share_of_the_calls(server: Server) -> None:
    assert len(server.workers()) == (2 if ON_CPU else gpu_count())
    alone = [text(server, prompt) for prompt in PROMPTS]
    assert texts(server) == alone
    tokens = server.by_engine("vllm:generation_tokens_total")
    assert len(tokens) == len(server.workers())
    assert min(tokens.values()) > 0


def test_a_copy_dies_and_its_calls_go_on_at_once(server: Server) -> None:
    copies, right = len(server.workers()), texts(server)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(texts, server)
        kill(server, 4)
        assert found.result() == right
    assert server.ping() == 200
    wait_until(lambda: len(server.workers()) == copies)
    assert texts(server) == right
