"""Calls of every contract, for tests in which their engine dies. Each call has only one right answer."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.lora import make_adapter
from tests.live.server import START_SECONDS, Server
from tests.waiting import wait_until

TOKENS = 64
SCHEMA = {"type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}
FORMATTERS = Path(__file__).parents[1] / "fixtures" / "formatters"
SESSION = "X-Amzn-SageMaker-Session-Id"
STEPPED = {"worker_cls": "tests.live.engine_workers.SteppedWorker"}
"""With this option, a test can pause the engine of a server (`pause`, `step_until`)."""
OPTIONS = {"enable_lora": "true", "max_loras": 3, **STEPPED}
"""Options of a server for these calls. All adapters that `add_adapters` adds fit into one step."""


@dataclass(frozen=True)
class Case:
    """One call, which has the same answer each time."""

    path: str
    body: dict[str, Any]
    session: bool = False
    """The call belongs to a session."""


def add_adapters(model_dir: Path, model: Path) -> None:
    """Add the adapters that the calls name. Two of them have formatters."""
    for name in ("red", "newer", "older"):
        directory = make_adapter(model_dir / "adapters" / name, model, 1)
        if name != "red":
            shutil.copy(FORMATTERS / name / "model.py", directory)


def cases(text: str = "Once", tokens: int = TOKENS) -> dict[str, Case]:
    """Return calls of every contract, by name.

    Args:
        text: The prompt, or a part of it.
        tokens: The length of the answers.
    """

    def lmi(inputs: str = text, adapter: str | None = None, session: bool = False, **given: Any) -> Case:
        stream = given.pop("stream", False)
        parameters = {"max_new_tokens": tokens, "ignore_eos_token": True, "details": True} | given
        named = {"adapters": adapter} if adapter else {}
        return Case("/invocations", {"inputs": inputs, "parameters": parameters, "stream": stream, **named}, session)

    def openai(path: str, **given: Any) -> Case:
        return Case(path, {"model": "model", "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | given)

    def completion(**given: Any) -> Case:
        return openai("/v1/completions", **{"prompt": text} | given)

    chat = {"messages": [{"role": "user", "content": text}]}
    tgi = {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True, "top_n_tokens": 2}}
    triton = {"text_input": text, "parameters": {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    happy = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = {"model": "model", "input": text, "max_output_tokens": tokens, "temperature": 0, "store": False}
    two = {"n": 2, "temperature": 1, "top_k": 1}  # Sampling with only one possible result.
    return {
        "LMI": lmi(),
        "LMI, stream": lmi(stream=True),
        "LMI, another text": lmi(f"Repeat after me: 你好，世界。😀 😃 {text}", stream=True),
        "LMI, at least so many": lmi(min_new_tokens=tokens - 10, ignore_eos_token=False),
        "LMI, repetition penalty": lmi(repetition_penalty=1.3),
        "LMI, constraint": lmi(stream=True, ignore_eos_token=False, response_format=FORM),
        "LMI, beam search": lmi(num_beams=2, max_new_tokens=tokens // 6),
        "LMI, adapter": lmi(adapter="red"),
        "LMI, chat": Case("/invocations", {**chat, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}),
        "LMI, session": lmi(session=True),
        "LMI, formatter": lmi(adapter="newer"),
        "LMI, formatter, stream": lmi(adapter="newer", stream=True),
        "LMI, older formatter": lmi(adapter="older"),
        "LMI, older formatter, stream": lmi(adapter="older", stream=True),
        "TGI": Case("/generate", tgi),
        "TGI, stream": Case("/generate_stream", tgi),
        "Triton": Case("/v2/models/model/generate", triton),
        "Triton, stream": Case("/v2/models/model/generate_stream", triton | {"stream": True}),
        "happy_vllm": Case("/v1/generate", happy),
        "happy_vllm, stream": Case("/v1/generate_stream", happy),
        "completion": completion(),
        "completion, stream": completion(stream=True),
        "completion, log probabilities": completion(logprobs=2),
        "completions of several prompts": completion(prompt=[text, f"{text} more"], **two),
        "completions, vLLM's way": completion(**two, return_token_ids=True),
        "chat": openai("/v1/chat/completions", **chat, logprobs=True, top_logprobs=2),
        "chat, stream": openai("/v1/chat/completions", **chat, stream=True),
        "chat, adapter": openai("/v1/chat/completions", **chat, model="red"),
        "response": Case("/v1/responses", response),
        "message": openai("/v1/messages", **chat),
        "message, stream": openai("/v1/messages", **chat, stream=True),
    }


CASES = cases()
PLAIN = {name: case for name, case in CASES.items() if "adapters" not in case.body and case.body.get("model") != "red"}
"""The calls that need no adapter."""
FEW = (
    *("LMI, stream", "LMI, constraint", "LMI, beam search", "TGI", "Triton, stream", "happy_vllm, stream"),
    *(
        "completions of several prompts",
        "completions, vLLM's way",
        "chat",
        "chat, stream",
        "response",
        "message, stream",
    ),
)
"""Names of calls without an adapter: some of each contract, both whole and streamed."""
_VARYING = re.compile(
    r'"(created|created_at|completed_at)":\s?\d+(\.\d+)?|(resp|msg|rs)_[0-9a-f]{16,}|"id":\s?"(chatcmpl|cmpl|embd|pooling)-[^"]+"'
    r'|"(request_id|total_time|queue_time|inference_time)":\s?"?[\w.-]+"?|^:\n\n',
    re.MULTILINE,
)
"""The parts that vary: times, ids, and the comments in an idle stream."""
_DELTA = re.compile(r'event: content_block_delta\ndata: .*?"text":"(.*?)"\}.*\n\n')


def answer(server: Server, case: Case) -> str:
    """Return a call's answer without the parts that differ between equal calls."""
    headers = {SESSION: new_session(server)} if case.session else {}
    response = server.client.post(case.path, json=case.body, headers=headers, timeout=START_SECONDS)
    assert response.status_code == 200, response.text
    return essence(response.text)


def answers(server: Server, calls: Mapping[str, Case], disturb: Callable[[], object] | None = None) -> dict[str, str]:
    """Return the answers of calls that run at the same time.

    Args:
        disturb: A function that is called when the server has all calls. The engine is paused then, and the
            function must resume it (`kill`, `resume`).
    """
    with ThreadPoolExecutor(len(calls)) as pool:
        if disturb is not None:
            pause(server)
        running = {name: pool.submit(answer, server, case) for name, case in calls.items()}
        if disturb is not None:
            server.wait_for_metric("slipway_open_requests", len(calls))
            disturb()
        return {name: call.result() for name, call in running.items()}


def new_session(server: Server) -> str:
    """Create a session, and return its id."""
    value = server.client.post("/invocations", json={"requestType": "NEW_SESSION"}).headers[SESSION]
    return value.partition(";")[0]


def essence(text: str) -> str:
    """Return an answer without the parts that differ between equal calls."""
    deltas = _DELTA.findall(text)  # vLLM joins deltas if it is busy
    return _VARYING.sub("", _DELTA.sub("", text)) + "".join(deltas)


def kill(server: Server, running: float, process: int | None = None, by: int = signal.SIGKILL) -> None:
    """Kill a process of the engine once this number of sequences run. None: the engine process."""
    step_until_running(server, running)
    os.kill(process or server.engine_process(), by)
    resume(server)


def pause(server: Server) -> None:
    """Let the engine's workers (`SteppedWorker`) wait before their next steps."""
    server.permitted_steps.write_bytes(b"")


def resume(server: Server) -> None:
    """Let the engine's workers run again."""
    server.permitted_steps.unlink()


def step_until_running(server: Server, sequences: float) -> None:
    """Let the engine make single steps until it runs this number of sequences. Leave the engine paused."""
    step_until(server, lambda: server.metric("slipway_engine_running") >= sequences)


def step_until(server: Server, condition: Callable[[], object]) -> None:
    """Permit the workers one step after the other until the condition holds, and leave them paused."""

    def holds() -> object:
        with server.permitted_steps.open("ab") as permits:
            permits.write(b".")
        return condition()

    wait_until(holds)
