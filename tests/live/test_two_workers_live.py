"""vLLM with two workers, as on two GPUs: each layer of a model is split between two ranks on a CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.live.draining import open_stream
from tests.live.server import METRIC_SECONDS, START_SECONDS, Server, records, serving
from tests.live.small_model import ENDLESS
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPTS = ("Once upon a time", "The capital of France is")
TOKENS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two workers, each with one of the model's two heads. The last test stops it."""
    cores = sorted(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    workers = {"tensor_parallel_degree": 2, "distributed_executor_backend": "mp", "enable_prefix_caching": "false"}
    with serving(tmp_path_factory.mktemp("server"), environment, **small_options | workers) as running:
        yield running


def vllm_processes(server: Server) -> dict[str, psutil.Process]:
    """Return vLLM's processes, by the ends of their titles."""
    found = {}
    for child in server.children():
        title = " ".join(child.cmdline())
        for name in ("EngineCore", "Worker_TP0", "Worker_TP1"):
            if name in title:
                found[name] = child
    return found


def wait_until_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=METRIC_SECONDS)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_two_workers_generate_what_transformers_does(server: Server, small_options: dict[str, object]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert vllm_processes(server).keys() == {"EngineCore", "Worker_TP0", "Worker_TP1"}
    path = small_options["model_id"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**given, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0]
        answer = server.invoke(prompt, max_new_tokens=TOKENS, ignore_eos_token=True, do_sample=False, details=True)
        tokens = [token["id"] for token in answer.json()["details"]["tokens"]]
        assert tokens == expected[given["input_ids"].shape[1] :].tolist()


def test_without_a_prefix_cache_a_beam_search_is_refused(server: Server) -> None:
    refused = server.invoke("Once", num_beams=2, max_new_tokens=4)
    assert refused.status_code == 424
    assert "`num_beams` needs the prefix cache, which is off for this model" in refused.text


def test_a_worker_that_is_killed_ends_requests_with_an_error_and_the_server_is_unhealthy(server: Server) -> None:
    processes = vllm_processes(server)
    body = {"inputs": "Once", "stream": True, "parameters": ENDLESS}
    with server.client.stream("POST", "/invocations", json=body) as response:
        pieces = response.iter_text()
        received = next(pieces)
        os.kill(processes["Worker_TP1"].pid, signal.SIGKILL)
        received += "".join(pieces)
    assert "workers still running after" not in server.log_text(), "the engine waits for them before it tells anybody"
    assert records(received)[-1]["details"]["finish_reason"] == "error"
    wait_until(lambda: server.ping() == 500, METRIC_SECONDS)
    assert server.invoke("Once", max_new_tokens=2).status_code >= 400
    wait_until_ended(list(processes.values()))


def test_nothing_outlives_a_killed_server_with_two_workers(server: Server) -> None:
    assert server.client.delete("/models/model").status_code == 200
    again = {"model_name": "model", "url": str(server.model_dir)}
    assert server.client.post("/models", json=again, timeout=START_SECONDS).status_code == 200
    with open_stream(server) as client:
        assert client.recv(64).startswith(b"HTTP/1.1 200")
        children = server.children()
        assert vllm_processes(server).keys() == {"EngineCore", "Worker_TP0", "Worker_TP1"}
        for name in ("EngineCore", "Worker_TP0"):
            vllm_processes(server)[name].suspend()  # stopped processes cannot notice that the server has ended
        server.process.kill()
        server.process.wait(60)
        wait_until_ended(children)
