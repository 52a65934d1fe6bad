"""Slipway on vLLM on a GPU: one server for texts, then one with adapters, from its start to its end by kill -9.

The first has vLLM's own path in the data type in which texts can be compared. The second has two adapters beside its
model and is lmi-dist, so that everything that changes vLLM's path is on. The tests run in the order of this file: a GPU
has room for one server at a time, and the last test kills the second.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gpu.conftest import ON_CPU, used_gpu_memory
from tests.live.bare_vllm import texts_of_bare_vllm
from tests.live.draining import open_stream
from tests.live.lora import make_adapter
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS
from tests.live.server import METRIC_SECONDS, Server, serving

pytestmark = [pytest.mark.usefixtures("vllm"), pytest.mark.timeout(600)]

STREAMS = 8 if ON_CPU else 128
TOKENS = 64
FREED_MIB = 1024
"""The most MiB by which the GPU's used memory may differ before and after a server. Others may use the GPU too."""


@pytest.fixture(scope="module")
def adapters(gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("red", "blue"), start=1):
        make_adapter(directory / name, gpu_model, seed, scale=0.9)
    return directory


@pytest.fixture(scope="module")
def bare(vllm_arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the texts that AsyncLLM generates without Slipway. Its process ends before the server takes the GPU."""
    return texts_of_bare_vllm(**vllm_arguments)


@pytest.fixture(scope="module")
def free_before() -> int:
    return 0 if ON_CPU else used_gpu_memory()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    adapters: Path,
    gpu_adapter_options: dict[str, object],
    free_before: int,
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    shutil.copytree(adapters, directory / "model" / "adapters")
    with serving(directory, rolling_batch="lmi-dist", **gpu_adapter_options) as running:
        yield running


def text(server: Server, prompt: str, adapter: str = "") -> str:
    document: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": MAX_NEW_TOKENS}}
    if adapter:
        document["adapters"] = adapter
    response = server.client.post("/invocations", json=document)
    assert response.status_code == 200, response.text
    answer: str = response.json()["generated_text"]
    return answer


def test_its_texts_are_those_of_bare_vllm(
    bare: dict[str, dict[str, Any]], gpu_options: dict[str, object], tmp_path: Path
) -> None:
    with serving(tmp_path, rolling_batch="vllm", **gpu_options) as plain:
        texts = {prompt: text(plain, prompt) for prompt in PROMPTS}
    assert texts == {prompt: bare[prompt]["text"] for prompt in PROMPTS}


def test_it_starts_and_says_what_took_how_long(server: Server) -> None:
    assert server.ping() == 200
    metrics = server.client.get("/metrics").text
    phases = re.findall(r'slipway_startup_seconds\{phase="([\w ]+)"\} ([\d.]+)', metrics)
    print("start-up:", ", ".join(f"{phase} {float(seconds):.1f} s" for phase, seconds in phases))
    assert phases


def test_many_streams_are_whole_and_tokens_come_one_by_one(server: Server) -> None:
    def stream(number: int) -> tuple[list[float], list[dict[str, Any]]]:
        body = {"inputs": f"{number}: once", "stream": True}
        body["parameters"] = {"max_new_tokens": TOKENS, "ignore_eos_token": True, "do_sample": True, "seed": number}
        times, lines = [], []
        with clients.stream("POST", "/invocations", json=body) as response:
            for line in response.iter_lines():
                times.append(time.perf_counter())
                lines.append(json.loads(line))
        return times, lines

    clients = httpx.Client(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=STREAMS))
    with clients, ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(stream, range(STREAMS)))
    gaps = [later - earlier for times, _ in streams for earlier, later in pairwise(times)]
    print(f"{STREAMS} streams: median gap {1000 * statistics.median(gaps):.2f} ms")
    for _, lines in streams:
        assert len(lines) == TOKENS
        assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]


def test_in_a_batch_each_adapter_has_its_own_answer_and_the_model_without_one_has_its_own(server: Server) -> None:
    """Fill every slot, because vLLM on a CPU gives a prompt without an adapter the weights of the last slot.

    In 16 bits, two tokens may be equally likely, so that a text in a batch may end in another way than in a batch of
    one.
    Its beginning is still that of the same adapter's text, for longer than that of another adapter's.
    """
    alone = {name: text(server, PROMPTS[0], name) for name in ("", "red", "blue")}
    assert len(set(alone.values())) == 3
    names = ["", "red", "blue"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: text(server, PROMPTS[0], name), names))
    assert [max(alone, key=lambda name: _common(alone[name], answer)) for answer in together] == names


def _common(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_constraints_hold(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 9}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    chat = {"model": "model", "messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 100}
    held = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}}
    answer = server.client.post("/v1/chat/completions", json=chat | held | {"temperature": 1.0, "seed": 1})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]).keys() == {"city", "people"}
    chosen = server.client.post("/v1/chat/completions", json=chat | {"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.json()["choices"][0]["message"]["content"] in ("yes", "no")


def test_typical_sampling_narrows_the_choice(server: Server) -> None:
    def texts(**parameters: object) -> set[str]:
        sampled = {"do_sample": True, "max_new_tokens": 1} | parameters
        answers = [server.invoke("Once", seed=seed, **sampled) for seed in range(12)]
        return {answer.json()["generated_text"] for answer in answers}

    narrow, wide = texts(typical_p=0.001), texts()
    assert len(wide) > 3
    assert 2 * len(narrow) <= len(wide), "in 16 bits several tokens may be equally typical"


def test_beams_are_found(server: Server) -> None:
    answer = server.invoke(PROMPTS[0], num_beams=3, max_new_tokens=8)
    assert answer.status_code == 200, answer.text
    beams = [answer.json(), *answer.json()["details"]["best_of_sequences"]]
    assert len({beam["generated_text"] for beam in beams}) == 3


def test_a_client_that_leaves_ends_its_generation(server: Server) -> None:
    aborted = server.metric("slipway_generations_aborted_total")
    with open_stream(server) as client:
        assert client.recv(64).startswith(b"HTTP/1.1 200")
    server.wait_for_metric("slipway_engine_running", 0)
    server.wait_for_metric("slipway_generations_aborted_total", aborted + 1)


def test_a_killed_server_leaves_no_process_and_no_memory_of_the_gpu(server: Server, free_before: int) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    with open_stream(server):
        server.wait_for_metric("slipway_engine_running", 1)
        server.process.kill()
        server.process.wait(60)
    _, left = psutil.wait_procs(children, timeout=METRIC_SECONDS)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
    if ON_CPU:
        return
    deadline = time.monotonic() + METRIC_SECONDS
    while (used := used_gpu_memory()) > free_before + FREED_MIB:
        assert time.monotonic() < deadline, f"{used} MiB are in use; {free_before} were before the server started"
        time.sleep(0.2)
