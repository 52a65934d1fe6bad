"""If the engine cannot hold a part of a JSON schema, the schema is refused, or followed in part with a note.

tests/contracts/test_constraint_matrix.py has the other routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.live.partly_held import ATTRIBUTES, DIFFERENT, NOT_HELD, PLACE, SAME, assert_judged, verdicts
from tests.live.server import Server, hosted, write_model
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "Hello!"}]


def format_of(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {"name": "x", "schema": schema} | ({} if strict is None else {"strict": strict})


def chat(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {
        "messages": MESSAGES,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": format_of(schema, strict)},
    }


def completion(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {"prompt": "Hello", **{name: value for name, value in chat(schema, strict).items() if name != "messages"}}


def response(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    form = {"type": "json_schema", **format_of(schema, strict)}
    return {"input": "Hello", "max_output_tokens": 60, "text": {"format": form}}


def lmi(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": format_of(schema, strict)}
    return {"inputs": "Hello", "parameters": {"max_new_tokens": 60, "response_format": form}}


def chat_tools(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    function = {"name": "tag", "parameters": schema} | ({} if strict is None else {"strict": strict})
    plain = {"name": "plain", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": each} for each in (plain, function)]
    choice = {"type": "function", "function": {"name": "tag"}}
    return {"messages": MESSAGES, "max_tokens": 60, "tools": tools, "tool_choice": choice}


def message_tools(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    tool = {"name": "tag", "input_schema": schema} | ({} if strict is None else {"strict": strict})
    return {"messages": MESSAGES, "max_tokens": 60, "tools": [tool], "tool_choice": {"type": "tool", "name": "tag"}}


# For each name: the path, the function that makes the body, and the schema's name in the header and in errors.
WITH_STRICT = {
    "chat": ("/v1/chat/completions", chat, ""),
    "response": ("/v1/responses", response, ""),
    "LMI": ("/invocations", lmi, ""),
    "a chat's tool": ("/v1/chat/completions", chat_tools, "tools[1].function.parameters"),
    "LMI's chat's tool": ("/invocations", chat_tools, "tools[1].function.parameters"),
    "a message's tool": ("/v1/messages", message_tools, "tools[0].input_schema"),
}
# Bodies without a field `strict`.
WITHOUT_STRICT: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LMI, TGI's form": (
        "/invocations",
        {"inputs": "Hello", "parameters": {"response_format": {"type": "json_object", "value": SAME}}},
    ),
    "message": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "output_config": {"format": {"type": "json_schema", "schema": SAME}},
        },
    ),
    "TGI": ("/generate", {"inputs": "Hello", "parameters": {"grammar": {"type": "json", "value": SAME}}}),
}


@pytest.fixture(scope="module")
def lenient(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[Server]:
    """A model with the setting and a parser of tool calls. The shared server has the default."""
    options = {"enable_auto_tool_choice": "true", "tool_call_parser": "hermes", "partial_schemas": "true"}
    with hosted(host, write_model(tmp_path_factory.mktemp("lenient") / "model", **small_options, **options)) as model:
        yield model


def post(server: Server, path: str, body: dict[str, Any], *, stream: bool = False, **headers: str) -> httpx.Response:
    more: dict[str, Any] = {"stream": True} if stream else {}
    if path.startswith("/v1/"):
        more["model"] = server.name
    if path.startswith("/generate"):  # The host has several models, and the query of /invocations names one.
        path, headers = "/invocations", {ATTRIBUTES: f"route={path}", **headers}
    return server.client.post(path, json={**body, **more}, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WITH_STRICT)
def test_a_strict_schema_is_refused_with_its_place(lenient: Server, name: str, stream: bool) -> None:
    path, body, owner = WITH_STRICT[name]
    answer = post(lenient, path, body(SAME, True), stream=stream)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert NOT_HELD not in answer.headers
    assert ATTRIBUTES not in answer.headers
    assert owner + PLACE in answer.text
    assert not owner or f"`{owner}`" in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WITH_STRICT)
def test_the_part_that_is_held_is_followed_and_the_rest_is_said(lenient: Server, name: str, stream: bool) -> None:
    path, body, owner = WITH_STRICT[name]
    before = verdicts(lenient)
    answer = post(lenient, path, body(SAME, None), stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers[NOT_HELD] == owner + PLACE
    assert answer.headers[ATTRIBUTES] == f"X-Slipway-Not-Held={owner}{PLACE}"
    assert_judged(lenient, before, invalid=1)


@pytest.mark.parametrize("name", WITH_STRICT)
def test_an_answer_that_obeys_the_whole_schema_is_valid(lenient: Server, name: str) -> None:
    path, body, _ = WITH_STRICT[name]
    before = verdicts(lenient)
    assert post(lenient, path, body(DIFFERENT, None)).headers[NOT_HELD]
    assert_judged(lenient, before, valid=1)


@pytest.mark.parametrize("name", ["chat", "LMI"])
def test_an_answer_that_was_cut_is_incomplete(lenient: Server, name: str) -> None:
    path, body, _ = WITH_STRICT[name]
    document = body(SAME, None)
    document |= {"max_tokens": 3} if name == "chat" else {"parameters": document["parameters"] | {"max_new_tokens": 3}}
    before = verdicts(lenient)
    assert post(lenient, path, document).status_code == 200
    assert_judged(lenient, before, incomplete=1)


@pytest.mark.parametrize("stream", [False, True])
def test_each_sequence_of_each_prompt_is_judged(lenient: Server, stream: bool) -> None:
    before = verdicts(lenient)
    more = {"n": 2, "temperature": 1, "prompt": ["Hello", "Good morning"]}
    answer = post(lenient, "/v1/completions", completion(SAME, None) | more, stream=stream)
    assert answer.headers[NOT_HELD] == PLACE
    assert_judged(lenient, before, invalid=4)


def test_each_chat_of_a_batch_is_judged(lenient: Server) -> None:
    before = verdicts(lenient)
    body = chat(SAME, None) | {"messages": [MESSAGES, MESSAGES]}
    answer = post(lenient, "/v1/chat/completions/batch", body)
    assert answer.headers[NOT_HELD] == PLACE, answer.text
    assert_judged(lenient, before, invalid=2)


@pytest.mark.parametrize("name", WITHOUT_STRICT)
def test_a_contract_without_strict_refuses_the_schema(server: Server, name: str) -> None:
    path, body = WITHOUT_STRICT[name]
    answer = post(server, path, body)
    assert 400 <= answer.status_code < 500, answer.text
    assert PLACE in answer.text
    assert "option.partial_schemas" in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WITHOUT_STRICT)
def test_the_setting_lets_every_contract_answer(lenient: Server, name: str, stream: bool) -> None:
    path, body = WITHOUT_STRICT[name]
    before = verdicts(lenient)
    if stream and path == "/generate":
        path, stream = "/generate_stream", False
    answer = post(lenient, path, body, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers[NOT_HELD] == PLACE
    assert_judged(lenient, before, invalid=1)


def test_the_setting_does_not_loosen_strict_schemas(lenient: Server) -> None:
    assert post(lenient, "/v1/chat/completions", chat(SAME, True)).status_code == 400


def test_the_log_and_the_metrics_count_requests(server: Server) -> None:
    before = server.metric("slipway_partial_generations_total")
    post(server, "/v1/completions", completion(SAME, None), **{"x-request-id": "partly-held"})
    assert server.metric("slipway_partial_generations_total") == before + 1

    def lines() -> list[str]:
        return [line for line in server.log_text().splitlines() if "partly-held" in line and "not held" in line]

    wait_until(lines)
    assert "uniqueItems" not in lines()[0]


@pytest.mark.parametrize("way", [{}, {"service_tier": "auto"}])  # a field that only vLLM's front end reads
def test_a_request_that_the_engine_does_not_take_is_not_counted(server: Server, way: dict[str, Any]) -> None:
    before = server.metric("slipway_partial_generations_total")
    unknown_token = {"prompt": [1 << 30]}
    assert post(server, "/v1/completions", completion(SAME, None) | unknown_token | way).status_code == 400
    assert server.metric("slipway_partial_generations_total") == before


def test_a_whole_schema_says_nothing(server: Server) -> None:
    before = server.metric("slipway_partial_generations_total")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    answer = post(server, "/invocations", chat(schema, None))
    assert answer.status_code == 200
    assert not {NOT_HELD, ATTRIBUTES} & answer.headers.keys()
    assert server.metric("slipway_partial_generations_total") == before
