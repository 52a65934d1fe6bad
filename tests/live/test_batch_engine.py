"""Dynamic batching: a server with the transformers engine, over HTTP."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines.request import GenerationRequest, SamplingParameters
from handlers.model_config import ModelConfig
from tests.constrained import DYNAMIC, END, FORMS, NAMES, by_name
from tests.generation import generate
from tests.live.constrained import CHECKED_TOKENS, accepted, disobeyed
from tests.live.constrained import answer as answer_of
from tests.live.prompts import PROMPTS
from tests.live.server import METRIC_SECONDS, Server, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


async def test_a_model_with_attention_of_its_own_is_run(tmp_path: Path, sample_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, CodeGenConfig

    from engines.transformers.engine import BatchEngine

    config = CodeGenConfig(
        vocab_size=49152, n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=1024, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(sample_model).save_pretrained(tmp_path)
    arguments = {"max_model_len": "1024"}
    model = ModelConfig(
        name="m", model_dir=tmp_path, model_id=str(tmp_path), dtype="float32", engine_arguments=arguments
    )
    sampling = SamplingParameters(max_tokens=3, ignore_eos=True)
    request = GenerationRequest(request_id="r", prompt="Hello", sampling=sampling)
    engine = BatchEngine(model)
    await engine.start()
    try:
        assert [delta async for delta in generate(engine, request)][-1].token_count == 3
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sample_model: Path) -> Iterator[Server]:
    """Start a server with little time to drain. The last test stops it."""
    options: dict[str, Any] = {
        "model_id": sample_model,
        "rolling_batch": "disable",
        "dtype": "fp32",
        "max_model_len": 1024,
    }
    environment = {"SERVING_DRAIN_TIMEOUT": "0.1"}
    with serving(tmp_path_factory.mktemp("dynamic"), environment, batch_size=4, **options) as running:
        yield running


def post(server: Server, document: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/invocations", json=document, timeout=120)


def test_over_http_texts_come_with_their_prompts_in_lmis_bytes(server: Server, sample_model: Path) -> None:
    prompts = list(PROMPTS[:3])
    reply = post(server, {"inputs": prompts, "parameters": {"max_new_tokens": 3}})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    answers = [answer["generated_text"] for answer in reply.json()]
    assert all(text.startswith(prompt) and text != prompt for prompt, text in zip(prompts, answers, strict=True))
    assert reply.text == json.dumps(reply.json(), ensure_ascii=False, indent=2, separators=(",", ":"))
    with ThreadPoolExecutor(3) as clients:
        single = list(
            clients.map(lambda prompt: post(server, {"inputs": prompt, "parameters": {"max_new_tokens": 3}}), prompts)
        )
    assert [reply.json()[0]["generated_text"] for reply in single] == answers


def test_over_http_what_constrains_a_token_is_enforced(server: Server) -> None:
    """tests/unit/engines/transformers/test_sampling.py has the other parameters."""
    (route,) = DYNAMIC.values()
    cases = {name: CHECKED_TOKENS[name] for name in ("logit_bias", "stop")}
    _, text = answer_of(server, route, {})
    assert not any(check(text) for _, check in cases.values()), text
    assert answer_of(server, route, {"logit_bias": {str(END): 100}})[1] == ""
    assert list(disobeyed(server, route, cases)) == []


WITHOUT_VLLM = {
    **by_name("bad_sequences force_words_ids json_format guided_whitespace_pattern"),
    **{
        name: ({"num_beams": 2, **NAMES[name]}, f"`{name}` cannot be used together with beam search")
        for name in ("logit_bias", "bad_words", "allowed_token_ids")
    },
}


def test_over_http_what_needs_vllm_is_refused_by_name(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["model"]
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="model", messages=messages, max_tokens=4)
    assert caught.value.status_code == 501
    assert caught.value.body["type"] == "NotImplementedError"
    reply = server.client.post("/invocations", json={"messages": messages})
    assert (reply.status_code, reply.json()["code"]) == (424, 424)
    assert "`messages` needs vLLM" in reply.json()["error"]
    (route,) = DYNAMIC.values()
    needs = "` needs the vLLM engine (option.rolling_batch=vllm)"
    forms = {name: (fields, needs) for name, (fields, _) in FORMS.items()}
    assert list(accepted(server, route, forms | WITHOUT_VLLM)) == []
    for name, value in (("response_pool", ["a"]), ("json_format", {"a": "string"})):
        reply = server.client.post("/v1/generate", json={"prompt": "Hello", name: value})
        assert reply.status_code == 422
        assert reply.json()["detail"][0]["loc"] == ["body", name]


def test_over_http_a_call_is_explained(server: Server, sample_model: Path) -> None:
    from transformers import AutoTokenizer

    document = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 3}}
    found = server.explain("/invocations", document)
    assert found["parameters"]["max_tokens"] == {"value": 3, "from": "body", "fields": ["parameters.max_new_tokens"]}
    (prompt,) = found["prompts"]
    assert prompt["token_ids"] == AutoTokenizer.from_pretrained(sample_model).encode(document["inputs"])


def test_a_batch_that_outlives_the_drain_leaves_the_exit_code_as_it_is(server: Server) -> None:
    with ThreadPoolExecutor(1) as clients:
        document = {"inputs": ["hello " * 900] * 32}  # One step of four of these prompts takes seconds.
        call = clients.submit(post, server, document)
        wait_until(lambda: server.metric("slipway_engine_running") > 0, METRIC_SECONDS)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "the server is stopping" in call.result().text
