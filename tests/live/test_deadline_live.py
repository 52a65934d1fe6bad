"""Deadlines with the real engine: an answer that would take minutes ends, and nothing of it stays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.live.server import Server
from tests.live.small_model import ENDLESS, ENDLESS_COMPLETION
from tests.waiting import wait_until

SECONDS = 4.0  # A first token comes long before, unless the machine stands still.
NO_TIME = 0.0001  # Shorter than any parsing.
ENDLESS_CHAT = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 65000, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CONSTRAINED = {
    "messages": ENDLESS_CHAT["messages"],
    "max_tokens": 65000,
    "temperature": 0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
}
LMI: dict[str, Any] = {"inputs": "Once", "parameters": ENDLESS | {"details": True}}
TRITON = {"text_input": "Once", "max_tokens": 65000, "ignore_eos": True, "return_finish_reason": True}
HAPPY = {"prompt": "Once", "max_tokens": 65000, "ignore_eos": True}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "LMI": ("/invocations", LMI),
    "LMI, beams": ("/invocations", LMI | {"parameters": LMI["parameters"] | {"num_beams": 2}}),
    "LMI, chat": ("/invocations", ENDLESS_CHAT),
    "OpenAI, completion": ("/v1/completions", ENDLESS_COMPLETION | {"model": "model", "n": 2, "temperature": 1}),
    "OpenAI, completion by vLLM": ("/v1/completions", ENDLESS_COMPLETION | {"model": "model", "echo": True}),
    "OpenAI, beams": ("/v1/completions", ENDLESS_COMPLETION | {"model": "model", "use_beam_search": True, "n": 2}),
    "OpenAI, chat": ("/v1/chat/completions", ENDLESS_CHAT | {"model": "model"}),
    "OpenAI, constrained": ("/v1/chat/completions", CONSTRAINED | {"model": "model"}),
    "TGI": ("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 65000, "details": True}}),
    "Triton": ("/v2/models/model/generate", TRITON),
    "happy_vllm": ("/v1/generate", HAPPY),
}
# A route, a body for it, and what tells the reason at the end of the stream.
STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LMI": ("/invocations", LMI | {"stream": True}, '"stop_reason": "deadline"}}'),
    "LMI, chat": ("/invocations", ENDLESS_CHAT | {"stream": True}, '"stop_reason": "deadline"}]}'),
    "OpenAI, completion": (
        "/v1/completions",
        ENDLESS_COMPLETION | {"model": "model", "stream": True, "n": 2, "temperature": 1},
        '"stop_reason":"deadline"',
    ),
    "OpenAI, completion by vLLM": (
        "/v1/completions",
        ENDLESS_COMPLETION | {"model": "model", "stream": True, "echo": True, "n": 2, "temperature": 1},
        '"stop_reason":"deadline"',
    ),
    "OpenAI, chat": (
        "/v1/chat/completions",
        ENDLESS_CHAT | {"model": "model", "stream": True},
        '"stop_reason":"deadline"',
    ),
    "TGI": ("/generate_stream", WHOLE["TGI"][1], '"stop_reason":"deadline"}}'),
    "Triton": ("/v2/models/model/generate_stream", TRITON | {"stream": True}, '"finish_reason":"length"'),
    "happy_vllm": ("/v1/generate_stream", HAPPY, '"stop_reason": "deadline"}'),
    "OpenAI, responses": (
        "/v1/responses",
        {"model": "model", "input": "Once", "max_output_tokens": 65000, "stream": True},
        '"type":"response.incomplete"',
    ),
    "Anthropic": (
        "/v1/messages",
        {"model": "model", "messages": ENDLESS_CHAT["messages"], "max_tokens": 65000, "stream": True},
        '"stop_reason":"max_tokens"',
    ),
}
SEQUENCES = {"LMI, beams": 2, "OpenAI, completion": 2, "OpenAI, beams": 2}
FINISH_REASONS = re.compile(r'"finish_reasons?": ?\[?"(\w+)"')
STOP_REASONS = re.compile(r'"stop_reason": ?("\w*"|\w+)')
QUICK = ("LMI", "OpenAI, completion by vLLM")
TIMED_OUT = {"LMI": 424, "LMI, beams": 424, "Triton": 503}  # Other contracts have 504.


def cases(names: Iterable[str]) -> list[Any]:
    """Return names as parameters. Only the `QUICK` ones run with each change."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def post(server: Server, path: str, body: dict[str, Any], seconds: float) -> httpx.Response:
    return server.client.post(path, json=body, headers={"X-Slipway-Deadline": str(seconds)})


def is_idle(server: Server) -> bool:
    return server.metric("slipway_engine_running") == server.metric("slipway_engine_waiting") == 0


@pytest.mark.parametrize("name", cases(WHOLE))
def test_a_whole_answer_ends_at_its_deadline_with_what_it_has(server: Server, name: str) -> None:
    path, body = WHOLE[name]
    answer = post(server, path, body, SECONDS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slipway-deadline"] == "reached"
    assert "X-Slipway-Deadline=reached" in answer.headers["x-amzn-sagemaker-custom-attributes"]
    assert set(FINISH_REASONS.findall(answer.text)) == {"length"}
    assert set(STOP_REASONS.findall(answer.text)) == (set() if name == "Triton" else {'"deadline"'})
    assert len(FINISH_REASONS.findall(answer.text)) == SEQUENCES.get(name, 1)
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("name", cases(STREAMS))
def test_a_stream_ends_at_its_deadline_and_its_end_says_why(server: Server, name: str) -> None:
    path, body, end = STREAMS[name]
    answer = post(server, path, body, SECONDS)
    assert answer.status_code == 200, answer.text
    assert end in answer.text[-2000:]
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_without_a_token_gets_the_contracts_error_of_a_time_out(server: Server, name: str) -> None:
    path, body = WHOLE[name]
    answer = post(server, path, body, NO_TIME)
    assert answer.status_code == TIMED_OUT.get(name, 504), answer.text
    assert "the call had no answer at its deadline" in answer.text
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in ("TGI", *TIMED_OUT)])
def test_a_stream_without_a_token_has_the_errors_status(server: Server, name: str) -> None:
    path, body, _ = STREAMS[name]
    answer = post(server, path, body, NO_TIME)
    assert answer.status_code == 504, answer.text
    wait_until(lambda: is_idle(server))


WAITING = {"model": "model", "prompt": ["Once"] * 40, "echo": True, "max_tokens": 3000, "ignore_eos": True}


def test_prompts_that_wait_for_a_place_in_the_batch_end_empty_and_cost_no_other_its_text(server: Server) -> None:
    answer = post(server, "/v1/completions", WAITING | {"logprobs": 1}, SECONDS)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == 40
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in choices} == {("length", "deadline")}
    assert any(choice["text"] == "Once" for choice in choices)  # it waited
    assert any(len(choice["text"]) > 10 for choice in choices)
    assert answer.headers["x-slipway-deadline"] == "reached"
    wait_until(lambda: is_idle(server))


def test_a_streams_prompts_that_wait_for_a_place_end_empty(server: Server) -> None:
    answer = post(server, "/v1/completions", WAITING | {"stream": True}, SECONDS)
    assert answer.status_code == 200, answer.text
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    (*_, last) = chunks = [json.loads(event) for event in events]
    assert "error" not in last
    ends = {choice["index"]: choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]}
    assert sorted(ends) == list(range(40))
    assert {(end["finish_reason"], end["stop_reason"]) for end in ends.values()} == {("length", "deadline")}
    wait_until(lambda: is_idle(server))


def test_the_counts_and_the_log_tell_of_both(server: Server) -> None:
    counts = [f'slipway_deadlines_total{{answer="{answer}"}}' for answer in ("partial", "nothing")]
    before = [server.metric(name) for name in counts]
    for seconds in (SECONDS, NO_TIME):
        headers = {"X-Slipway-Deadline": str(seconds), "x-request-id": f"limited-{seconds}"}
        server.client.post("/invocations", json=LMI, headers=headers)
    assert [server.metric(name) for name in counts] == [count + 1 for count in before]
    server.wait_for_log("the call ended at its deadline with a part of its answer")
    server.wait_for_log("the call ended at its deadline with no token")


def test_a_cut_answers_usage_counts_its_tokens(server: Server) -> None:
    document = post(server, "/v1/completions", ENDLESS_COMPLETION | {"model": "model", "logprobs": 0}, SECONDS).json()
    (choice,) = document["choices"]
    assert document["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) > 0
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")


def test_a_cut_constrained_answer_is_the_beginning_of_a_valid_one(server: Server) -> None:
    document = post(server, "/v1/chat/completions", CONSTRAINED | {"model": "model"}, SECONDS).json()
    (choice,) = document["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    text = choice["message"]["content"]
    assert text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@pytest.mark.parametrize("name", ["LMI", "OpenAI, completion", "OpenAI, completion by vLLM", "TGI", "Triton"])
def test_a_wrong_deadline_is_refused_with_the_headers_name(server: Server, name: str) -> None:
    path, body = WHOLE[name]
    answer = server.client.post(path, json=body, headers={"X-Slipway-Deadline": "soon"})
    assert 400 <= answer.status_code < 500
    assert "X-Slipway-Deadline" in answer.text
