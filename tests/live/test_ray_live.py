"""Replicas on Ray Serve. One command starts one cluster. The tests change it, and depend on their order."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from huggingface_hub import InferenceClient

from tests.chaos.client import Manner, ask, request_bytes
from tests.chaos.contracts import Answer
from tests.live.bare_transformers import Job, numbers_of_transformers
from tests.live.continued_calls import PLAIN, STEPPED, answers, resume, step_until
from tests.live.lora import make_adapter
from tests.live.ray_cluster import START, Cluster, ray_cluster
from tests.live.server import copy_model, records, write_model
from tests.live.small_model import prepare_small_model
from tests.live.small_pooling_models import prepare_small_encoder
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

pytest.importorskip("ray.serve", reason="Ray is not installed")

ROOT = Path(__file__).parents[2]
HANDLERS = ROOT / "tests" / "fixtures" / "handlers"
STREAMS, WHOLE, TOKENS = 32, 12, 2000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster that starts with a model on vLLM, for tests that deploy another model."""
    directory = tmp_path_factory.mktemp("ray")
    model = write_model(directory / "model", enable_lora=True, max_loras=1, **small_options, **STEPPED)
    make_adapter(model / "adapters" / "loud", prepare_small_model(), 1, scale=2.0)
    with ray_cluster(model, directory / "cluster.log") as started:
        yield started


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """The cluster with two replicas of the model on vLLM, even if an earlier test has deployed another model."""
    if running.deployed not in (None, running.model_dir):
        running.replace_replicas(Path(str(running.model_dir)))
    return running


def test_clients_of_all_contracts_are_answered_and_both_replicas_have_part_in_it(cluster: Cluster) -> None:
    chat: Any = [{"role": "user", "content": "Hi"}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(model="model", messages=chat, max_tokens=8, temperature=0)
        parts = client.chat.completions.create(model="model", messages=chat, max_tokens=8, temperature=0, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    hub = InferenceClient(model=cluster.url, timeout=120)
    text = cluster.invoke("Hello", max_new_tokens=8).json()["generated_text"]
    assert "".join(hub.text_generation("Hello", max_new_tokens=8, stream=True)) == text
    lmi = records(cluster.invoke("Hello", stream=True, max_new_tokens=8).text)
    assert (lmi[-1]["generated_text"], len(lmi)) == (text, 8)
    triton = cluster.client.post(
        "/v2/models/model/generate_stream",
        json={"text_input": "Hello", "parameters": {"max_tokens": 8, "stream": True, "temperature": 0}},
    )
    assert "".join(record["text_output"] for record in records(triton.text)) == text
    happy = cluster.client.post("/v1/generate", json={"prompt": "Hello", "max_tokens": 8, "temperature": 0})
    assert happy.json()["responses"] == [text]

    def both_have_answered() -> bool:
        cluster.invoke("Hello", max_new_tokens=1)
        return len(cluster.requests()) == 2

    wait_until(both_have_answered)  # Ray chooses a replica at random
    assert cluster.client.get("/nothing").json()["type"] == "ResourceNotFoundException"
    named = cluster.client.post("/invocations", json={"inputs": "x"}, headers={"x-request-id": "mine"})
    assert named.headers.get_list("x-request-id") == ["mine"]
    # Ray copies the replicas' logs to the command's own output.
    wait_until(lambda: re.search(r" \w{8} slipway.access \[mine\]: POST /invocations 200 ", cluster.log_text()))


@pytest.mark.long
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_call(cluster: Cluster, stream: bool) -> None:
    most = 12_000
    document = {"inputs": "Once", "stream": stream, "parameters": {"max_new_tokens": most, "ignore_eos_token": True}}
    body = json.dumps(document).encode()

    def generated() -> float:
        return sum(cluster.each("slipway_generated_tokens_total").values())

    before = generated()
    with socket.create_connection(("127.0.0.1", cluster.port)) as client:
        client.sendall(request_bytes("/invocations", body))
        wait_until(lambda: generated() > before, START)
        if stream:
            assert client.recv(1), "it comes as it is generated"
    wait_until(lambda: not any(cluster.each("slipway_open_requests").values()), START)
    wait_until(lambda: not any(cluster.each("slipway_engine_running").values()), START)
    assert generated() - before < most


def test_what_one_replica_alone_would_know_is_refused(cluster: Cluster) -> None:
    session = cluster.client.post("/invocations", json={"requestType": "NEW_SESSION"})
    assert session.status_code == 424
    assert "option.enable_stateful_sessions" in session.json()["error"]
    models = (("POST", "/models?url=x"), ("PUT", "/models/model?max_worker=0"), ("DELETE", "/models/model"))
    adapters = (("POST", "/adapters?name=a&src=b"), ("POST", "/adapters/loud/update"), ("DELETE", "/adapters/loud"))
    for method, path in (*models, *adapters):
        refused = cluster.client.request(method, path)
        assert (refused.status_code, refused.json()["type"]) == (501, "NotImplementedException")
    assert completion(cluster, "loud") != completion(cluster, "model"), "it was declared in the model's folder"


def completion(cluster: Cluster, model: str) -> str:
    """Return a model's text, or the status and the text of its error."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    answer = cluster.client.post("/v1/completions", json=body)
    text: str = answer.json()["choices"][0]["text"] if answer.is_success else f"{answer.status_code}{answer.text}"
    return text


@pytest.mark.long
async def test_a_replica_that_is_killed_takes_its_own_streams_alone_and_the_next_one_has_the_adapter(
    cluster: Cluster,
) -> None:
    parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True, "details": True}
    document = {"inputs": "Once", "parameters": parameters}
    begun = asyncio.Semaphore(0)

    async def stream() -> str:
        body = json.dumps(document | {"stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        try:
            writer.write(request_bytes("/invocations", body))
            head, _ = await reader.readuntil(b"\r\n\r\n"), await reader.readline()
            begun.release()
            text = await reader.read()
        except ConnectionResetError:
            return "broken off"
        finally:
            writer.transport.abort()
        assert head.startswith(b"HTTP/1.1 200 "), head
        if not text.endswith(b"\r\n0\r\n\r\n"):
            return "broken off"
        return "complete" if text.count(b'"token"') == TOKENS else repr(text[-200:])

    async def whole(manner: Manner, padding: int) -> str:
        body = json.dumps(document | {"ignored": "x" * padding}).encode()
        answer = await ask(cluster.port, request_bytes("/invocations", body), START, manner, Random(0))
        assert isinstance(answer, Answer)
        made = answer.status == 200 and json.loads(answer.body)["details"]["generated_tokens"]
        return "complete" if made == TOKENS else repr(answer)

    def running() -> dict[str, float]:
        return cluster.each("slipway_open_requests")

    wanted = completion(cluster, "loud")
    async with asyncio.timeout(2 * START), asyncio.TaskGroup() as clients:
        streams = [clients.create_task(stream()) for _ in range(STREAMS)]
        for _ in streams:
            await begun.acquire()
        name, count = max((await asyncio.to_thread(running)).items(), key=lambda pair: pair[1])
        sent: list[tuple[Manner, int]] = [("plain", 0), ("sends slowly", 0), ("sends slowly", 100_000)]
        answers = [clients.create_task(whole(*sent[number % 3])) for number in range(WHOLE)]
        await asyncio.to_thread(wait_until, lambda: sum(running().values()) == STREAMS + WHOLE, START, about=running)
        os.kill(cluster.processes()[name], 9)
        await asyncio.to_thread(
            wait_until, lambda: len(cluster.replicas() - {name}) == 2, START, about=cluster.replicas
        )
    ended = collections.Counter(task.result() for task in streams)
    assert ended == {"broken off": count, "complete": STREAMS - count}
    assert {task.result() for task in answers} == {"complete"}, "another replica answers them"
    assert {completion(cluster, "loud") for _ in range(6)} == {wanted}
    assert len(cluster.requests("/v1/completions")) == 2


@pytest.mark.long
def test_the_calls_of_a_replica_outlive_its_engine(cluster: Cluster) -> None:
    calls = {name: case for name, case in PLAIN.items() if not case.session}
    replicas = cluster.replicas()
    undisturbed = answers(cluster, calls)
    before = cluster.each("slipway_continued_calls_total")
    killed = []

    def disturb() -> None:
        running: dict[str, float] = {}

        def enough() -> bool:
            running.update(cluster.each("slipway_engine_running"))
            return max(running.values()) >= 4

        step_until(cluster, enough)
        name = max(running, key=running.__getitem__)
        children = psutil.Process(cluster.processes()[name]).children(recursive=True)
        os.kill(next(child.pid for child in children if "EngineCore" in child.name()), 9)
        resume(cluster)
        killed.append(name)

    assert answers(cluster, calls, disturb) == undisturbed
    continued = cluster.each("slipway_continued_calls_total")
    assert [name for name in replicas if continued[name] > before[name]] == killed
    assert cluster.replicas() == replicas, "it is the same replica with another engine"


class Load:
    """Clients, each of which sends one request after the other until it is stopped."""

    def __init__(self, cluster: Cluster, body: bytes, clients: int = 6) -> None:
        self.answers: collections.Counter[str] = collections.Counter()
        self._url, self._body = f"{cluster.url}/invocations", body
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]

    def _send(self) -> None:
        with httpx.Client(timeout=START) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self._url, content=self._body)
                    self.answers[str(answer.status_code)] += 1
                except httpx.TransportError as error:
                    self.answers[repr(error)] += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.long
def test_an_update_to_another_model_refuses_nothing(running: Cluster, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "echo", tmp_path / "echo")
    with Load(running, b'{"inputs": "Hello", "parameters": {"max_new_tokens": 4}}', 2) as load:
        running.replace_replicas(model)
    assert set(load.answers) == {"200"}, load.answers
    assert running.client.post("/invocations", content=b"echo").content == b"echo"


@pytest.mark.long
def test_both_replicas_make_vectors_and_ranks(running: Cluster, tmp_path: Path) -> None:
    texts = ["the capital of france", "paris is a large city ?", "a dog runs"]
    encoder = prepare_small_encoder()
    expected = np.array(numbers_of_transformers(vectors=Job(encoder, texts))["vectors"])
    running.replace_replicas(write_model(tmp_path / "encoder", model_id=encoder, dtype="fp32"))

    def post(path: str, body: object) -> Any:
        answer = running.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for _ in range(6):
        assert np.allclose(post("/invocations", {"inputs": texts}), expected, atol=1e-3)
        assert np.allclose(post("/embed", {"inputs": texts}), expected, atol=1e-3)
        given = post("/v1/embeddings", {"model": "model", "input": texts})["data"]
        assert np.allclose([item["embedding"] for item in given], expected, atol=1e-3)
        ranks = post("/rerank", {"model": "model", "query": texts[0], "documents": texts[1:]})["results"]
        assert [item["index"] for item in ranks] == list(np.argsort(-(expected[1:] @ expected[0])))
    routes = ("/invocations", "/embed", "/v1/embeddings", "/rerank")
    assert len(set().union(*map(running.requests, routes))) == 2, "both replicas have part in it"
    refused = running.client.post("/v1/completions", json={"model": "model", "prompt": "a"})
    assert refused.status_code == 404, "an embedding model generates no text"


@pytest.mark.long
def test_replicas_come_with_the_load_and_go_after_it_and_no_request_is_lost(running: Cluster, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "slow", tmp_path / "slow", "minWorkers=4\nmaxWorkers=4")
    delays = ("--upscale-delay", "1", "--downscale-delay", "2")
    running.deploy(model, "--min-replicas", "1", "--max-replicas", "3", "--target", "2", *delays)
    running.wait_for_replicas(1)
    with Load(running, b"0.5") as load:
        running.wait_for_replicas(3)
        most = load.answers.total()
        wait_until(lambda: load.answers.total() > most + 12, START)
    with Load(running, b"0.5", 1) as rest:
        running.wait_for_replicas(1)
    assert set(load.answers) == set(rest.answers) == {"200"}, (load.answers, rest.answers)


@pytest.mark.long
def test_a_request_brings_back_a_deployment_that_was_scaled_to_zero(running: Cluster, tmp_path: Path) -> None:
    model = copy_model(HANDLERS / "slow", tmp_path / "slow", "minWorkers=1\nmaxWorkers=1")
    delays = ("--upscale-delay", "0", "--downscale-delay", "2")
    running.deploy(model, "--min-replicas", "0", "--max-replicas", "1", *delays)
    wait_until(lambda: not running.processes_of_replicas(), START)
    assert running.client.post("/invocations", content=b"0.1").text == "done"
