"""Sixteen concurrent LMI or OpenAI calls get the answers that vLLM's own server gives on the same GPU, in fp32."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from benchmarks.peers import command_line
from tests.gpu.conftest import ON_CPU, TOKENS, OneServer, RecordProperty
from tests.live import preloaded
from tests.live.prompts import PROMPTS
from tests.live.server import START_SECONDS, Server, free_port, records, serving
from tests.waiting import wait_until

STREAMS = 4 if ON_CPU else 128
TEXTS = [*PROMPTS, *(f"{number} is a number, and the next one is" for number in range(1 if ON_CPU else 11))]
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Texts = list[tuple[str, str]]
"""The text and the finish reason of each prompt's answer."""


@pytest.fixture
def server(one_server: OneServer, gpu_options: dict[str, object]) -> Server:
    return one_server.of("texts", lambda directory: serving(directory, rolling_batch="vllm", **gpu_options))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, gpu_options: dict[str, object]) -> dict[str, Texts]:
    """Return the streams of a vLLM server with the same engine arguments. This server is stopped afterwards."""
    given = dict(gpu_options)
    model, dtype = str(given.pop("model_id")), str(given.pop("dtype"))
    engine: dict[str, Any] = {"model": model, "dtype": _DTYPES.get(dtype, dtype), **given}
    if ON_CPU:
        engine |= {"enforce_eager": True, "distributed_executor_backend": "uni"}  # A worker process imports vLLM again.
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", *command_line(engine)]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with log.open("wb") as output:
        environment = preloaded.plain_environment() | {"HF_HUB_OFFLINE": "1"}
        program = preloaded.start("vllm.entrypoints.openai.api_server", arguments, environment, output.fileno())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

            def is_ready() -> bool:
                assert program.poll() is None, log.read_text(errors="replace")[-4000:]
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_ready, START_SECONDS, about=lambda: log.read_text(errors="replace")[-4000:])
            found = {path: openai_streams(client, path) for path in OPENAI}
    finally:
        program.send_signal(signal.SIGTERM)
        try:
            program.wait(60)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait(60)
    return found


def _completion(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt}


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


OPENAI = {"/v1/completions": _completion, "/v1/chat/completions": _chat}


def openai_streams(client: httpx.Client, path: str) -> Texts:
    """Request streams for all prompts at the same time, and return them."""

    def stream(prompt: str) -> tuple[str, str]:
        body = {"model": "model", "max_tokens": TOKENS, "temperature": 0, "stream": True, **OPENAI[path](prompt)}
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        choices = [each["choices"][0] for each in records(answer.text.replace("data: [DONE]", "")) if each["choices"]]
        texts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
        return "".join(texts), str(choices[-1]["finish_reason"])

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return list(pool.map(stream, TEXTS))


def lmi_answers(server: Server, stream: bool) -> list[dict[str, Any]]:
    """Send all prompts at the same time, and return the answers. For a stream, return its last record, with the text of
    all tokens.
    """

    def answer(prompt: str) -> dict[str, Any]:
        found = server.invoke(prompt, stream, max_new_tokens=TOKENS, details=True)
        assert found.status_code == 200, found.text
        lines = records(found.text)
        return {**lines[-1], "streamed": "".join(line["token"]["text"] for line in lines if "token" in line)}

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        return list(pool.map(answer, TEXTS))


@pytest.mark.parametrize("path", OPENAI)
def test_openais_streams_are_those_of_vllms_server(server: Server, theirs: dict[str, Texts], path: str) -> None:
    assert openai_streams(server.client, path) == theirs[path]


@pytest.mark.parametrize("stream", [True, False])
def test_lmis_answers_have_the_texts_of_vllms_server(server: Server, theirs: dict[str, Texts], stream: bool) -> None:
    expected = [text for text, _ in theirs["/v1/completions"]]
    answers = lmi_answers(server, stream)
    assert [answer["generated_text"] for answer in answers] == expected
    if stream:
        assert [answer["streamed"] for answer in answers] == expected


def test_many_streams_are_whole_and_tokens_come_one_by_one(server: Server, record_property: RecordProperty) -> None:
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
    record_property(f"median gap of {STREAMS} streams:", f"{1000 * statistics.median(gaps):.2f} ms")
    for _, lines in streams:
        assert len(lines) == TOKENS
        assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]


def test_the_server_tells_how_long_each_part_of_its_start_took(server: Server, record_property: RecordProperty) -> None:
    assert server.ping() == 200
    metrics = server.client.get("/metrics").text
    phases = re.findall(r'slipway_startup_seconds\{phase="([\w ]+)"\} ([\d.]+)', metrics)
    record_property("start:", ", ".join(f"{phase} {float(seconds):.1f} s" for phase, seconds in phases))
    assert phases
