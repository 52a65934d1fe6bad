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
import pytest_asyncio
from msgspec import structs

from engines.errors import InvalidParameter
from engines.interface import Engine
from engines.request import FinishReason, GenerationRequest, SamplingParameters, TokenDelta
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
from tests.live.small_model import prepare_small_model, stop_within
from tests.stand_ins.collected_reply import CollectedReply
from tests.stand_ins.recorder import Recorder
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    """Start an engine of the small model."""
    async with engine_with(prepare_small_model()) as started:
        yield started


def request_for(prompt: str, sampling: SamplingParameters = GREEDY, **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id="r", prompt=prompt, sampling=sampling, **fields)


async def answer(engine: Engine, request: GenerationRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, request)]


async def texts(engine: Engine, *requests: GenerationRequest) -> list[str]:
    answers = await asyncio.gather(*(answer(engine, request) for request in requests))
    return ["".join(delta.text for delta in deltas) for deltas in answers]


@pytest.fixture(scope="module")
def generated() -> dict[str, list[int]]:
    """Return the tokens that `model.generate` gives greedily for each of PROMPTS, without the end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = prepare_small_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    ids = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[
            0, inputs.input_ids.shape[1] :
        ]
        ids[prompt] = [token_id for token_id in output.tolist() if token_id != tokenizer.eos_token_id]
    return ids


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_tokens_in_a_batch_and_alone_are_those_of_generate(
    engine: Engine, generated: dict[str, list[int]]
) -> None:
    requests = [request_for(prompt, want_tokens=True, stream=True) for prompt in PROMPTS]
    together = await asyncio.gather(*(answer(engine, request) for request in requests))
    alone = [await answer(engine, request) for request in requests]
    for prompt, *answers in zip(PROMPTS, together, alone, strict=True):
        for deltas in answers:
            ids = [token.id for delta in deltas for token in delta.tokens]
            assert [i for i in ids if i not in engine.eos_token_ids] == generated[prompt]
            assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert [delta.token_count for delta in deltas] == sorted(delta.token_count for delta in deltas)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_seed_gives_the_same_text_alone_and_in_a_batch(engine: Engine) -> None:
    sampling = SamplingParameters(max_tokens=16, temperature=0.9, top_p=0.95)
    requests = [request_for(prompt, structs.replace(sampling, seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    together = await texts(engine, *requests)
    assert together == [(await texts(engine, request))[0] for request in requests]
    assert len(set(together)) == len(PROMPTS)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_ends_its_own_sequence_only(engine: Engine) -> None:
    sampling = SamplingParameters(max_tokens=16)
    stop = stop_within((await texts(engine, request_for(PROMPTS[0], sampling)))[0])
    stopping = structs.replace(sampling, stop=(stop,))
    stopped, other = await asyncio.gather(
        answer(engine, request_for(PROMPTS[0], stopping)), answer(engine, request_for(PROMPTS[1], sampling))
    )
    assert stopped[-1].finish_reason is FinishReason.STOP
    assert stop not in stopped[-1].text
    assert (other[-1].finish_reason, other[-1].token_count) == (FinishReason.LENGTH, 16)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_request_and_a_cancelled_one_do_not_touch_their_neighbours(engine: Engine) -> None:
    alone = await texts(engine, request_for(PROMPTS[0]))
    aborted = engine.statistics.aborted_requests
    kept, gone = Recorder(), Recorder()
    await engine.submit(request_for(PROMPTS[0], stream=True), kept)
    leaving = await engine.submit(request_for(PROMPTS[1], stream=True), gone)
    with pytest.raises(InvalidParameter):
        await engine.submit(request_for(PROMPTS[2], SamplingParameters(stop_token_ids=(10**6,))), Recorder())
    await until(lambda: gone.deltas, 60)
    leaving.cancel()
    seen = len(gone.deltas)
    await until(lambda: kept.deltas and kept.deltas[-1].last, 60)
    assert ["".join(delta.text for delta in kept.deltas)] == alone
    assert len(gone.deltas) == seen < MAX_NEW_TOKENS
    assert engine.statistics.aborted_requests == aborted + 1


@pytest.mark.asyncio
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


@pytest.mark.asyncio
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
