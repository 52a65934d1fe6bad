"""Dynamic batching: the engine against `model.generate`, and the server over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines.interface import Engine
from engines.request import GenerationRequest, SamplingParameters, TokenDelta
from handlers.contract import Call
from handlers.entry_point import load_service
from handlers.loaded_service import Limits
from handlers.model_config import ModelConfig
from tests.constrained import DYNAMIC, END, FORMS, NAMES, by_name
from tests.generation import generate
from tests.live.constrained import CHECKED_TOKENS, accepted, disobeyed
from tests.live.constrained import answer as answer_of
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS
from tests.live.server import METRIC_SECONDS, Server, hosted, serving, write_model
from tests.live.small_model import prepare_small_model
from tests.stand_ins.collected_reply import CollectedReply
from tests.waiting import until, wait_until

pytestmark = pytest.mark.slow

GREEDY = SamplingParameters(max_tokens=MAX_NEW_TOKENS)


def settings(model: Path, **fields: Any) -> ModelConfig:
    fields = {"batch_size": 8, "max_batch_delay": 0.1, "engine_arguments": {"max_model_len": "1024"}, **fields}
    return ModelConfig(name="m", model_dir=model, model_id=str(model), dtype="fp32", **fields)


@asynccontextmanager
async def engine_with(model: Path) -> AsyncIterator[Engine]:
    from engines.transformers.engine import BatchEngine

    engine = BatchEngine(settings(model))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request_for(prompt: str, sampling: SamplingParameters = GREEDY, **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt=prompt, sampling=sampling, **fields)


async def answer(engine: Engine, request: GenerationRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, request)]


async def test_a_model_with_attention_of_its_own_is_run(tmp_path: Path, sample_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, CodeGenConfig

    config = CodeGenConfig(
        vocab_size=49152, n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=1024, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(sample_model).save_pretrained(tmp_path)
    async with engine_with(tmp_path) as engine:
        request = request_for("Hello", SamplingParameters(max_tokens=3, ignore_eos=True))
        assert (await answer(engine, request))[-1].token_count == 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sample_model: Path) -> Iterator[Server]:
    options: dict[str, Any] = {
        "model_id": sample_model,
        "rolling_batch": "disable",
        "dtype": "fp32",
        "max_model_len": 1024,
    }
    with serving(tmp_path_factory.mktemp("dynamic"), batch_size=4, **options) as running:
        yield running


def post(server: Server, document: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/invocations", json=document, timeout=120)


def test_over_http_texts_come_with_their_prompts_in_lmis_bytes(server: Server, sample_model: Path) -> None:
    prompts = list(PROMPTS[:3])
    reply = post(server, {"inputs": prompts, "parameters": {"max_new_tokens": 8}})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    answers = [answer["generated_text"] for answer in reply.json()]
    assert all(text.startswith(prompt) and text != prompt for prompt, text in zip(prompts, answers, strict=True))
    assert reply.text == json.dumps(reply.json(), ensure_ascii=False, indent=2, separators=(",", ":"))
    with ThreadPoolExecutor(3) as clients:
        single = list(
            clients.map(lambda prompt: post(server, {"inputs": prompt, "parameters": {"max_new_tokens": 8}}), prompts)
        )
    assert [reply.json()[0]["generated_text"] for reply in single] == answers


def test_over_http_a_wrong_parameter_is_424_and_its_neighbours_are_answered(server: Server) -> None:
    documents: list[dict[str, Any]] = [{"inputs": "x", "parameters": {"max_new_tokens": 4}} for _ in range(4)]
    documents[2]["parameters"]["stop_token_ids"] = [10**6]
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda document: post(server, document), documents))
    assert [reply.status_code for reply in replies] == [200, 200, 424, 200]
    assert replies[2].content.startswith(
        b'{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"`stop_token_ids` must hold token ids'
    )


def test_over_http_what_constrains_a_token_is_enforced(server: Server) -> None:
    (route,) = DYNAMIC.values()
    _, text = answer_of(server, route, {})
    assert not any(check(text) for name, (_, check) in CHECKED_TOKENS.items() if name != "min_tokens"), text
    assert answer_of(server, route, {"logit_bias": {str(END): 100}})[1] == ""
    assert list(disobeyed(server, route, CHECKED_TOKENS)) == []


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

    document = {
        "inputs": "The capital of France is",
        "parameters": {"max_new_tokens": 3, "top_p": 0.5, "details": True},
    }
    reply = server.client.post("/invocations", json=document, headers={"x-slipway-explain": "1"})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["parameters"]["top_p"] == {"value": 0.5, "from": "body", "fields": ["parameters.top_p"]}
    assert found["parameters"]["max_tokens"] == {"value": 3, "from": "body", "fields": ["parameters.max_new_tokens"]}
    assert found["without_effect"] == ["parameters.details"]
    (prompt,) = found["prompts"]
    assert (prompt["copy"], prompt["cached_tokens"]) == (1, None)
    assert prompt["token_ids"] == AutoTokenizer.from_pretrained(sample_model).encode("The capital of France is")


def test_over_http_a_stream_has_a_record_for_each_step(host: Server, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model_id": prepare_small_model(),
        "rolling_batch": "disable",
        "dtype": "fp32",
        "max_model_len": 1024,
    }
    with hosted(host, write_model(tmp_path / "model", enable_streaming="true", **options)) as model:

        def steps(*prompts: str) -> list[list[str]]:
            document = {"inputs": prompts, "parameters": {"max_new_tokens": 8}}
            with model.client.stream("POST", "/invocations", json=document) as reply:
                lines = list(reply.iter_lines())
                assert (reply.status_code, reply.headers["content-type"]) == (200, "application/jsonlines")
            return [json.loads(line)["outputs"] for line in lines]

        prompts = PROMPTS[:2]
        together = steps(*prompts)
        assert [len(record) for record in together] == [2] * 8
        for number, prompt in enumerate(prompts):
            assert [record[number] for record in together] == [text for [text] in steps(prompt)]


async def test_a_model_that_is_unloaded_leaves_no_formatter_and_no_thread_for_them(tmp_path: Path) -> None:
    code = tmp_path / "model.py"
    code.write_text(
        "from djl_python.output_formatter import output_formatter\n\n\n"
        "@output_formatter\n"
        "def write(token, first_token, last_token, details, generated_text, request_id):\n"
        "    return token.text\n"
    )
    given = replace(settings(prepare_small_model(), rolling_batch="disable", formatters=code), name="unloaded")
    service = await load_service(given, Limits(queue_size=8, overload_status=503, unavailable_status=503))
    before = set(threading.enumerate())
    [module] = (name for name in sys.modules if name.startswith("ns_unloaded_"))
    reply = CollectedReply()
    await service.invocations.handle(Call(body=b'{"inputs": "The capital of France is"}', request_id="r"), reply)
    await until(lambda: reply.ended, 60)
    [formatting] = [t for t in threading.enumerate() if t.name.startswith("formatters") and t not in before]
    await service.stop()
    await asyncio.to_thread(formatting.join, 60)
    assert not formatting.is_alive()
    assert module not in sys.modules


def test_a_batch_that_outlives_the_drain_leaves_the_exit_code_as_it_is(tmp_path: Path, sample_model: Path) -> None:
    options: dict[str, Any] = {
        "model_id": sample_model,
        "rolling_batch": "disable",
        "batch_size": 32,
        "dtype": "fp32",
        "max_model_len": 1024,
    }
    with serving(tmp_path, {"SERVING_DRAIN_TIMEOUT": "0.1"}, **options) as server, ThreadPoolExecutor(1) as clients:
        document = {"inputs": ["hello " * 900] * 32}  # one step of it takes many seconds
        call = clients.submit(post, server, document)
        wait_until(lambda: server.metric("slipway_engine_running") > 0, METRIC_SECONDS)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "the server is stopping" in call.result().text
