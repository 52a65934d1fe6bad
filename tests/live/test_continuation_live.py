"""Calls that run when the engine dies: their clients get the answers that they would have got."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.lora import make_adapter
from tests.live.server import START_SECONDS, Server, serving
from tests.live.small_model import ENDLESS, ENDLESS_STREAM
from tests.waiting import wait_until

DEAD = "the engine has died; the request was not completed"
TOKENS = 120
HELLO = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}


@dataclass(frozen=True)
class Case:
    """One call, which has the same answer each time."""

    path: str
    body: dict[str, Any]


def _lmi(inputs: str = "Once", stream: bool = False, adapter: str | None = None, **given: Any) -> Case:
    parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True, "details": True} | given
    named = {"adapters": adapter} if adapter else {}
    return Case("/invocations", {"inputs": inputs, "parameters": parameters, "stream": stream, **named})


def _openai(path: str, **given: Any) -> Case:
    return Case(path, {"model": "model", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0} | given)


_TGI = {"inputs": "Once", "parameters": {"max_new_tokens": TOKENS, "details": True, "top_n_tokens": 2}}
_TRITON = {"text_input": "Once", "parameters": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}
_HAPPY = {"prompt": "Once", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
_RESPONSE = {"model": "model", "input": "Hello", "max_output_tokens": TOKENS, "temperature": 0, "store": False}
_COMPLETION = {"prompt": "Once"}
TWO = {"n": 2, "temperature": 1, "top_k": 1}
"""Sampling that has one result."""
CASES = {
    "LMI": _lmi(),
    "LMI, stream": _lmi(stream=True),
    "LMI, another text": _lmi("Repeat after me: 你好，世界。😀 😃", stream=True),
    "LMI, at least so many": _lmi(min_new_tokens=TOKENS - 10, ignore_eos_token=False),
    "LMI, repetition penalty": _lmi(repetition_penalty=1.3),
    "LMI, constraint": _lmi(stream=True, ignore_eos_token=False, response_format=FORM),
    "LMI, beam search": _lmi(num_beams=2, max_new_tokens=40),
    "LMI, adapter": _lmi(adapter="red"),
    "LMI, chat": Case("/invocations", {"messages": HELLO, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}),
    "TGI": Case("/generate", _TGI),
    "TGI, stream": Case("/generate_stream", _TGI),
    "Triton": Case("/v2/models/model/generate", _TRITON),
    "Triton, stream": Case("/v2/models/model/generate_stream", _TRITON | {"stream": True}),
    "happy_vllm": Case("/v1/generate", _HAPPY),
    "happy_vllm, stream": Case("/v1/generate_stream", _HAPPY),
    "completion": _openai("/v1/completions", **_COMPLETION),
    "completion, stream": _openai("/v1/completions", **_COMPLETION, stream=True),
    "completion, log probabilities": _openai("/v1/completions", **_COMPLETION, logprobs=2),
    "completions of several prompts": _openai("/v1/completions", prompt=["Once", "Twice"], **TWO),
    "completions, vLLM's way": _openai("/v1/completions", **_COMPLETION, **TWO, return_token_ids=True),
    "chat": _openai("/v1/chat/completions", messages=HELLO, logprobs=True, top_logprobs=2),
    "chat, stream": _openai("/v1/chat/completions", messages=HELLO, stream=True),
    "chat, adapter": _openai("/v1/chat/completions", messages=HELLO, model="red"),
    "response": Case("/v1/responses", _RESPONSE),
    "message": _openai("/v1/messages", messages=HELLO),
    "message, stream": _openai("/v1/messages", messages=HELLO, stream=True),
}
# Calls that are not continued.
LOST: dict[str, dict[str, Any]] = {
    "presence_penalty and frequency_penalty count the tokens of the answer alone": {"presence_penalty": 0.5},
    "the place in the random numbers of its seed is lost": {"seed": 3, "temperature": 1.0},
    "bad_words of several tokens are looked for in the answer alone": {"bad_words": ["one of the many"]},
}
_VARYING = re.compile(
    r'"(created|created_at|completed_at)":\s?\d+(\.\d+)?|(resp|msg|rs)_[0-9a-f]{16,}|"id":\s?"(chatcmpl|cmpl)-[^"]+"'
    r'|"(request_id|total_time|queue_time|inference_time)":\s?"?[\w.-]+"?'
)
_DELTA = re.compile(r'event: content_block_delta\ndata: .*?"text":"(.*?)"\}.*\n\n')


def answer(server: Server, case: Case) -> str:
    """Return a call's answer without the parts that differ between equal calls."""
    response = server.client.post(case.path, json=case.body, timeout=START_SECONDS)
    assert response.status_code == 200, response.text
    deltas = _DELTA.findall(response.text)  # vLLM joins those of a busy moment
    return _VARYING.sub("", _DELTA.sub("", response.text)) + "".join(deltas)


@pytest.fixture(scope="module")
def restarting(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server whose engine may be killed many times."""
    directory = tmp_path_factory.mktemp("restarting")
    make_adapter(directory / "model" / "adapters" / "red", Path(str(small_options["model_id"])), 1)
    environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": "100"}
    with serving(directory, environment, enable_lora="true", **small_options) as server:
        yield server


def kill(server: Server, running: int) -> None:
    """Kill the engine process when so many sequences run."""
    wait_until(lambda: server.metric("slipway_engine_running") >= running)
    os.kill(server.engine_process(), signal.SIGKILL)


def test_each_client_gets_the_answer_that_it_would_have_got(restarting: Server) -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        undisturbed = dict(zip(CASES, pool.map(lambda case: answer(restarting, case), CASES.values()), strict=True))
    before = restarting.metric("slipway_continued_calls_total")
    with ThreadPoolExecutor(len(CASES)) as pool:
        calls = {name: pool.submit(answer, restarting, case) for name, case in CASES.items()}
        kill(restarting, 20)
        wait_until(lambda: restarting.client.get("/ping").json()["model"]["status"] == "RESTARTING")
        assert restarting.ping() == 200
        assert restarting.client.get("/v2/health/ready").status_code == 400
        assert answer(restarting, CASES["LMI"]) == undisturbed["LMI"], "a new call waits"
        assert {name: call.result() for name, call in calls.items()} == undisturbed
    assert restarting.metric("slipway_continued_calls_total") - before > 10
    assert restarting.metric("slipway_engine_down_seconds_total") > 0


def test_a_stop_string_ends_a_continued_answer(restarting: Server) -> None:
    def text(**given: Any) -> dict[str, Any]:
        body = {"model": "model", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "prompt": "Twice"}
        choice: dict[str, Any] = restarting.client.post("/v1/completions", json=body | given).json()["choices"][0]
        return choice

    stop = (whole := text()["text"])[-12:-4]
    expected = text(stop=stop)
    assert expected["finish_reason"] == "stop"
    assert len(expected["text"]) <= whole.index(stop)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(text, stop=stop)
        kill(restarting, 1)
        assert call.result() == expected


def test_a_call_whose_rest_may_depend_on_what_is_lost_gets_the_error(restarting: Server) -> None:
    with ThreadPoolExecutor(8) as pool, ExitStack() as streams:
        for given in LOST.values():
            own = restarting.client.stream("POST", "/v1/completions", json=ENDLESS_STREAM | {"n": 1} | given)
            vllms = {"n": 1, "return_token_ids": True}
            other = restarting.client.stream("POST", "/v1/completions", json=ENDLESS_STREAM | vllms | given)
            for stream in (own, other):
                lines = streams.enter_context(stream).iter_lines()
                assert next(lines).startswith("data: {")
                streams.callback(pool.submit(list, lines).result)
        kill(restarting, 2 * len(LOST))
        restarting.wait_for_log("1 requests are continued" if False else "0 requests are continued")
    for reason in LOST:
        restarting.wait_for_log(f"2 cannot be: {reason}")


def test_clients_may_leave_and_come_while_the_engine_is_started_again(restarting: Server) -> None:
    before = restarting.metric("slipway_continued_calls_total")
    restarting.send("/invocations", {"inputs": "Once", "parameters": ENDLESS}).close()
    leaving = [restarting.send("/invocations", {"inputs": "Once", "parameters": ENDLESS, "stream": True})]
    leaving.append(restarting.send("/v1/completions", ENDLESS_STREAM | {"return_token_ids": True}))
    kill(restarting, 4)
    wait_until(lambda: restarting.client.get("/ping").json()["model"]["status"] == "RESTARTING")
    for connection in leaving:
        connection.close()
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 3}}
    assert restarting.client.post("/invocations", json=body).status_code == 200
    restarting.wait_for_metric("slipway_engine_running", 0)
    assert restarting.metric("slipway_continued_calls_total") == before


def test_a_call_that_gets_no_engine_in_time_gets_an_error(tmp_path: Path, small_options: dict[str, object]) -> None:
    environment = {"SERVING_ENGINE_RESTART": "1"}
    with serving(tmp_path, environment, **small_options) as server, ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(server.client.post, "/v1/completions", json=ENDLESS_STREAM),
            pool.submit(server.invoke, "Once", **ENDLESS),
        ]
        kill(server, 4)
        server.wait_for_metric("slipway_continued_calls_total", 2)
        kill(server, 4)
        stream, whole = (call.result() for call in calls)
        *_, last, _ = stream.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == DEAD
        assert (whole.status_code, whole.json()["error"]) == (500, DEAD)
        assert server.ping() == 500
