"""The dynamic batch on a GPU, with transformers and without vLLM."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.gpu.conftest import ON_CPU, TOKENS, OneServer, used_gpu_memory
from tests.live import prompts
from tests.live.server import METRIC_SECONDS, Server, hosted, records, serving, write_model

PROMPTS = prompts.PROMPTS[:2] if ON_CPU else prompts.PROMPTS
CONTEXT_MIB = 100
"""The MiB of GPU memory that a process takes as soon as it uses the GPU."""


@pytest.fixture(scope="module")
def texts(gpu_options: dict[str, object]) -> dict[str, str]:
    """Return the text that transformers generates for each prompt in a batch of one, on the server's device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cpu" if ON_CPU else "cuda"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[os.environ.get("GPU_DTYPE", "fp32")]
    path = gpu_options["model_id"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = {}
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt").to(device)
        ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
        found[prompt] = tokenizer.decode(ids[given["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


@pytest.fixture(scope="module")
def used_by_tests(one_server: OneServer, texts: dict[str, str]) -> int:
    """Return the MiB of GPU memory that are in use without a server.

    They include the model that this process has loaded.
    """
    one_server.stop()
    return used_gpu_memory()


@pytest.fixture
def server(one_server: OneServer, gpu_options: dict[str, object], used_by_tests: int) -> Server:
    options = {name: gpu_options[name] for name in ("model_id", "dtype")}
    batch = {"rolling_batch": "disable", "batch_size": 8}
    return one_server.of("transformers", lambda directory: serving(directory, **options, **batch))


def test_its_texts_are_those_of_transformers_on_the_gpu(
    server: Server, texts: dict[str, str], used_by_tests: int
) -> None:
    for prompt in PROMPTS:
        answer = server.invoke(prompt, max_new_tokens=TOKENS)
        assert answer.status_code == 200, answer.text
        assert answer.json()[0]["generated_text"].removeprefix(prompt) == texts[prompt]
    if not ON_CPU:
        assert used_gpu_memory() > used_by_tests + CONTEXT_MIB, "it is on the GPU"


def test_calls_together_get_what_each_gets_alone(server: Server, texts: dict[str, str]) -> None:
    asked = PROMPTS * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda prompt: server.invoke(prompt, max_new_tokens=TOKENS), asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.json()[0]["generated_text"].removeprefix(prompt) == texts[prompt]


def test_another_model_streams_and_gives_its_memory_back_when_it_is_removed(
    server: Server, tmp_path: Path, gpu_options: dict[str, object], texts: dict[str, str]
) -> None:
    options = {name: gpu_options[name] for name in ("model_id", "dtype")} | {"rolling_batch": "disable"}
    model = write_model(tmp_path / "streaming" / "model", enable_streaming="true", **options)
    before = used_gpu_memory()
    with hosted(server, model) as streaming:
        streamed = streaming.invoke(PROMPTS[0], max_new_tokens=TOKENS)
        if not ON_CPU:
            assert used_gpu_memory() > before + CONTEXT_MIB
    assert streamed.status_code == 200, streamed.text
    assert "".join(record["outputs"][0] for record in records(streamed.text)) == texts[PROMPTS[0]]
    if not ON_CPU:
        assert used_gpu_memory() < before + CONTEXT_MIB


def test_a_killed_server_leaves_nothing(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait(60)
    _, left = psutil.wait_procs(children, timeout=METRIC_SECONDS)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
