"""Deadlines with the real engine: an answer that would take minutes ends, and leaves nothing behind.

The bytes of each contract are in `tests/contracts/cases/*/deadline.yaml`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.live.server import Server, hosted, write_model
from tests.live.small_model import ENDLESS, ENDLESS_COMPLETION
from tests.waiting import wait_until

NO_TIME = 0.0001  # Shorter than any parsing.
# Far longer than the time to a first token. A call that has no token by then would never get one.
MOST_SECONDS = 64.0
MISSED = re.compile('the call had no answer at its deadline|"status":"failed"')
ENDLESS_CHAT = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 65000, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CONSTRAINED = {
    "model": "model",
    "messages": ENDLESS_CHAT["messages"],
    "max_tokens": 65000,
    "temperature": 0,
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
}
LMI: dict[str, Any] = {"inputs": "Once", "parameters": ENDLESS | {"details": True}}
COMPLETION = ENDLESS_COMPLETION | {"model": "model"}
CHAT = ENDLESS_CHAT | {"model": "model"}
TWO = {"n": 2, "temperature": 1}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "LMI": ("/invocations", LMI),
    "LMI, beams": ("/invocations", LMI | {"parameters": LMI["parameters"] | {"num_beams": 2}}),
    "LMI, chat": ("/invocations", ENDLESS_CHAT),
    "OpenAI, completion": ("/v1/completions", COMPLETION | TWO),
    "OpenAI, completion by vLLM": ("/v1/completions", COMPLETION | {"echo": True}),
    "OpenAI, beams": ("/v1/completions", COMPLETION | {"use_beam_search": True, "n": 2}),
    "OpenAI, chat": ("/v1/chat/completions", CHAT),
    "OpenAI, constrained": ("/v1/chat/completions", CONSTRAINED),
}
SEQUENCES = {"LMI, beams": 2, "OpenAI, completion": 2, "OpenAI, beams": 2}
RESPONSE = {"model": "model", "input": "Once", "max_output_tokens": 65000}
MESSAGE = {"model": "model", "messages": ENDLESS_CHAT["messages"], "max_tokens": 65000}
TOLD = '"stop_reason":"deadline"'
# A route, a body for it, and the text that gives the reason at the end of the stream.
STREAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "LMI": ("/invocations", LMI, '"stop_reason": "deadline"}}'),
    "LMI, chat": ("/invocations", ENDLESS_CHAT, '"stop_reason": "deadline"}]}'),
    "OpenAI, completion": ("/v1/completions", COMPLETION | TWO, TOLD),
    "OpenAI, completion by vLLM": ("/v1/completions", COMPLETION | TWO | {"echo": True}, TOLD),
    "OpenAI, chat": ("/v1/chat/completions", CHAT, TOLD),
    "OpenAI, responses": ("/v1/responses", RESPONSE, '"type":"response.incomplete"'),
    "Anthropic": ("/v1/messages", MESSAGE, '"stop_reason":"max_tokens"'),
}
TIMED_OUT = {"LMI": 424, "LMI, beams": 424}  # Other contracts have 504.
FINISH_REASONS = re.compile(r'"finish_reasons?": ?\[?"(\w+)"')
STOP_REASONS = re.compile(r'"stop_reason": ?("\w*"|\w+)')


def post(server: Server, path: str, body: dict[str, Any], seconds: float) -> httpx.Response:
    return server.client.post(path, json=body, headers={"X-Slipway-Deadline": str(seconds)})


def cut(call: Callable[[float], httpx.Response]) -> httpx.Response:
    """Return an answer that has at least one token when its call ends at the deadline.

    The deadline is doubled until there is a token, because the machine may be slow or stand still. No answer is
    complete before its deadline.
    """
    seconds = 0.5
    while MISSED.search((answer := call(seconds)).text) and seconds < MOST_SECONDS:
        seconds *= 2
    assert answer.status_code == 200, answer.text
    return answer


def streamed(name: str) -> tuple[str, dict[str, Any]]:
    path, body, _ = STREAMS[name]
    return path, body | {"stream": True}


def is_idle(server: Server) -> bool:
    return server.metric("slipway_engine_running") == server.metric("slipway_engine_waiting") == 0


@pytest.fixture(autouse=True)
def nothing_stays(server: Server) -> Iterator[None]:
    yield
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_ends_at_its_deadline_with_its_tokens_so_far(server: Server, name: str) -> None:
    answer = cut(lambda seconds: post(server, *WHOLE[name], seconds))
    assert answer.headers["x-slipway-deadline"] == "reached"
    assert "X-Slipway-Deadline=reached" in answer.headers["x-amzn-sagemaker-custom-attributes"]
    assert FINISH_REASONS.findall(answer.text) == ["length"] * SEQUENCES.get(name, 1)
    assert set(STOP_REASONS.findall(answer.text)) == {'"deadline"'}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_ends_at_its_deadline_and_its_end_says_why(server: Server, name: str) -> None:
    assert STREAMS[name][-1] in cut(lambda seconds: post(server, *streamed(name), seconds)).text[-2000:]


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_without_a_token_gets_the_contracts_error_of_a_time_out(server: Server, name: str) -> None:
    answer = post(server, *WHOLE[name], NO_TIME)
    assert answer.status_code == TIMED_OUT.get(name, 504), answer.text
    assert "the call had no answer at its deadline" in answer.text


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_without_a_token_has_the_errors_status(server: Server, name: str) -> None:
    assert post(server, *streamed(name), NO_TIME).status_code == TIMED_OUT.get(name, 504)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"echo": True}])  # vLLM's front end answers the second form.
def test_prompts_that_wait_for_a_place_in_the_batch_end_empty(
    server: Server, more: dict[str, Any], stream: bool
) -> None:
    body = COMPLETION | {"prompt": ["Once"] * 40, "max_tokens": 3000, "stream": stream, **more}
    body |= {"stream_options": {"include_usage": True}} if stream else {"logprobs": 1}
    answer = cut(lambda seconds: post(server, "/v1/completions", body, seconds))
    if stream:
        *events, done = answer.text.removesuffix("\n\n").split("\n\n")
        documents = [json.loads(event.removeprefix("data: ")) for event in events]
        assert done == "data: [DONE]"
    else:
        documents = [answer.json()]
        assert answer.headers["x-slipway-deadline"] == "reached"
    ends = [choice for document in documents for choice in document["choices"] if choice["finish_reason"]]
    assert sorted(end["index"] for end in ends) == list(range(40))
    assert {(end["finish_reason"], end["stop_reason"]) for end in ends} == {("length", "deadline")}
    assert documents[-1]["usage"]["completion_tokens"] > 0


def test_the_counts_and_the_log_tell_of_both(server: Server) -> None:
    counts = [f'slipway_deadlines_total{{answer="{answer}"}}' for answer in ("partial", "nothing")]
    asked = 0

    def ask(seconds: float) -> httpx.Response:
        nonlocal asked
        asked += 1
        return post(server, "/invocations", LMI, seconds)

    before = [server.metric(name) for name in counts]
    ask(NO_TIME)
    cut(ask)
    assert [server.metric(name) for name in counts] == [before[0] + 1, before[1] + asked - 1]
    server.wait_for_log("the call ended at its deadline with a part of its answer")
    server.wait_for_log("the call ended at its deadline with no token")


@pytest.mark.parametrize("echo", [False, True])
def test_a_cut_answers_usage_counts_its_tokens(server: Server, echo: bool) -> None:
    body = COMPLETION | {"logprobs": 0, "echo": echo}
    document = cut(lambda seconds: post(server, "/v1/completions", body, seconds)).json()
    (choice,), usage = document["choices"], document["usage"]
    shown = usage["completion_tokens"] + echo * usage["prompt_tokens"]
    assert shown == len(choice["logprobs"]["tokens"]) > echo * usage["prompt_tokens"]


def test_a_cut_constrained_answer_is_the_beginning_of_a_valid_one(server: Server) -> None:
    document = cut(lambda seconds: post(server, "/v1/chat/completions", CONSTRAINED, seconds)).json()
    text = document["choices"][0]["message"]["content"]
    assert text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@pytest.mark.parametrize("name", ["LMI", "OpenAI, completion by vLLM"])
def test_a_wrong_deadline_is_refused_with_the_headers_name(server: Server, name: str) -> None:
    path, body = WHOLE[name]
    answer = server.client.post(path, json=body, headers={"X-Slipway-Deadline": "soon"})
    assert 400 <= answer.status_code < 500
    assert "X-Slipway-Deadline" in answer.text


@pytest.fixture(scope="module")
def limited(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[Server]:
    """A model with a deadline for whole answers, and with a parser of tool calls."""
    options = small_options | {"answer_deadline": 0.5, "enable_auto_tool_choice": "true", "tool_call_parser": "hermes"}
    with hosted(host, write_model(tmp_path_factory.mktemp("limited") / "model", **options)) as running:
        yield running


@pytest.mark.slow
def test_a_response_in_the_background_ends_at_its_clients_deadline_and_not_at_the_servers(limited: Server) -> None:
    body = RESPONSE | {"model": limited.name, "background": True}

    def state(made: httpx.Response) -> httpx.Response:
        path = f"/v1/responses/{made.json()['id']}"
        return limited.client.request("GET", path, json={"model": limited.name})

    def ask(seconds: float) -> httpx.Response:
        if (made := post(limited, "/v1/responses", body, seconds)).status_code != 200:
            return made
        wait_until(lambda: state(made).json()["status"] not in ("queued", "in_progress"))
        return state(made)

    made: list[httpx.Response] = []

    def made_before_the_servers_deadline() -> bool:
        made.append(limited.client.post("/v1/responses", json=body))
        return made[-1].status_code == 200

    wait_until(made_before_the_servers_deadline)
    endless = made[-1]
    ended = cut(ask).json()
    assert (ended["status"], ended["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert ended["usage"]["output_tokens"] > 0
    assert state(endless).json()["status"] in ("queued", "in_progress")
    limited.client.post(f"/v1/responses/{endless.json()['id']}/cancel", json={"model": limited.name})
    wait_until(lambda: is_idle(limited))


@pytest.mark.slow
def test_a_cut_tool_call_ends_for_its_length(limited: Server) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    asked = {"tools": [function], "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True}
    body = MESSAGE | {"model": limited.name, "temperature": 0, **asked}
    text = cut(lambda seconds: post(limited, "/v1/chat/completions", body, seconds)).text
    assert '"tool_calls":[{"id":' in text
    assert TOLD in text[-2000:]
    assert FINISH_REASONS.findall(text) == ["length"]
