"""Calls of every contract with one right answer each, for tests in which their engine dies."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from typing import Any

from tests.live.server import START_SECONDS, Server
from tests.waiting import wait_until

TOKENS = 240
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


def kill(server: Server, running: float, process: int | None = None) -> None:
    """Kill a process of the engine when so many sequences run. None: the engine process."""
    wait_until(lambda: server.metric("slipway_engine_running") >= running)
    os.kill(process or server.engine_process(), signal.SIGKILL)
