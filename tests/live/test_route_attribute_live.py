"""All contracts through `/invocations`, by `route=` in SageMaker's custom attributes, with unmodified boto3."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from tests.live.server import Server
from tests.live.small_model import ENDLESS_COMPLETION
from tests.runtime_client import runtime_at
from tests.waiting import wait_until

NAME = "my-endpoint"
HELLO = [{"role": "user", "content": "Say hello."}]
CHAT = {"model": "model", "messages": HELLO, "max_tokens": 2, "temperature": 0}
TGI = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True}}
TRITON = {"text_input": "Hello", "parameters": {"max_tokens": 2, "temperature": 0}}
HAPPY = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
MESSAGE = {"model": "model", "messages": HELLO, "max_tokens": 2, "temperature": 0}

WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/openai/v1/chat/completions", CHAT | {"model": "any"}),
    ("/v1/chat/completions/batch", CHAT | {"messages": [HELLO, HELLO]}),
    ("/v1/completions", {"model": "model", "prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1}),
    ("/v1/responses", {"model": "model", "input": "Hello", "max_output_tokens": 2, "temperature": 0, "store": False}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages/count_tokens", {"model": "model", "messages": HELLO}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"inputs": "Hello"}),
    ("/detokenize", {"tokens": [19556, 905]}),
    ("/chat_tokenize", {"messages": HELLO}),
    ("/", TGI),
    ("/generate", TGI),
    ("/v2/models/model/generate", TRITON),
    ("/v1/generate", HAPPY),
    ("/v1/tokenizer", {"text": "Hello there"}),
    ("/v2/tokenizer", {"model": "model", "prompt": "Hello there"}),
    ("/v1/decode", {"token_ids": [19556, 905]}),
    ("/v2/decode", {"model": "model", "tokens": [19556, 905]}),
    ("/v1/split_text", {"text": "One. Two. Three.", "num_tokens_in_chunk": 2}),
    ("/v1/metadata_text", {"text": "Hello there"}),
    ("/predictions/model", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
    ("/invocations", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
]
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": "model", "prompt": "Hello", "max_tokens": 2, "temperature": 0, "stream": True}),
    ("/v1/messages", MESSAGE | {"stream": True}),
    ("/", TGI | {"stream": True}),
    ("/generate_stream", TGI),
    ("/v2/models/model/generate_stream", TRITON | {"stream": True}),
    ("/v1/generate_stream", HAPPY),
    ("/predictions/model", {"inputs": "Hello", "stream": True, "parameters": {"max_new_tokens": 2}}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
    ("/v1/chat/completions", CHAT | {"model": "other"}),
    ("/v1/messages", MESSAGE | {"max_tokens": 0}),
    ("/generate", {"inputs": "Hello", "parameters": {"top_p": 7}}),
    ("/v2/models/model/generate", {"text_input": "Hello", "parameters": {"temperature": -1}}),
    ("/v2/models/other/generate", TRITON),
    ("/v1/generate", {"prompt": "Hello", "max_tokens": -1}),
    ("/v1/tokenizer", {}),
    ("/predictions/other", {"inputs": "Hello"}),
]
# Parts that differ between two equal calls.
_VARYING = re.compile(
    rb'"(created|created_at|completed_at)":\s?\d+(\.\d+)?|(resp|msg|rs)_[0-9a-f]{16,}|"id":"chatcmpl-[^"]+"'
)

_TEXT_DELTA = re.compile(rb'event: content_block_delta\ndata: .*?"text":"(.*?)"\}.*\n\n')


@pytest.fixture(scope="module")
def runtime(server: Server) -> Any:
    return runtime_at(server.url)


def same(body: bytes) -> bytes:
    """A body without the parts that differ between equal calls.

    vLLM's own front end joins the deltas of a busy moment, so Anthropic's are joined altogether.
    """
    deltas = _TEXT_DELTA.findall(body)
    return _VARYING.sub(b"", _TEXT_DELTA.sub(b"", body)) + b"".join(deltas)


def call(route: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    arguments = {"EndpointName": NAME, "ContentType": "application/json", "InferenceId": "mine"}
    return arguments | {"CustomAttributes": f"route={route}", "Body": json.dumps(body)} | more


def direct(server: Server, route: str, body: dict[str, Any]) -> httpx.Response:
    return server.client.post(route, json=body, headers={"x-request-id": "mine"})


def named(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("route", "body"), WHOLE, ids=named)
def test_a_whole_answer_is_that_of_the_route_itself(
    server: Server, runtime: Any, route: str, body: dict[str, Any]
) -> None:
    answer = runtime.invoke_endpoint(**call(route, body))
    expected = direct(server, route, body)
    assert expected.status_code == 200, expected.text
    assert (answer.get("ContentType", ""), same(answer["Body"].read())) == (
        expected.headers.get("content-type", ""),
        same(expected.content),
    )


@pytest.mark.parametrize(("route", "body"), STREAMED, ids=named)
def test_a_stream_is_that_of_the_route_itself(server: Server, runtime: Any, route: str, body: dict[str, Any]) -> None:
    answer = runtime.invoke_endpoint_with_response_stream(**call(route, body))
    parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
    expected = direct(server, route, body)
    assert expected.status_code == 200, expected.text
    assert same(b"".join(parts)) == same(expected.content)
    assert len(parts) > 1
    assert answer.get("ContentType", "") == expected.headers.get("content-type", "")


@pytest.mark.parametrize(("route", "body"), WRONG, ids=named)
def test_an_error_is_that_of_the_route_itself(server: Server, runtime: Any, route: str, body: dict[str, Any]) -> None:
    expected = direct(server, route, body)
    assert expected.status_code >= 400
    with pytest.raises(ClientError) as refused:
        runtime.invoke_endpoint(**call(route, body))
    assert refused.value.response["OriginalStatusCode"] == expected.status_code
    assert refused.value.response["OriginalMessage"] == expected.text


@pytest.mark.parametrize("header", [{"x-vllm-priority": "9" * 30}, {"x-cache-salt": "../salt"}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_wrong_priority_or_salt_is_refused_before_a_stream_begins(
    server: Server, route: str, header: dict[str, str], stream: bool
) -> None:
    body = next(body for path, body in WHOLE if path == route)
    refused = server.client.post(route, json=body | {"stream": stream}, headers=header)
    assert refused.status_code == 400
    assert next(iter(header)) in refused.json()["error"]["message"].lower()


@pytest.mark.parametrize(
    "route",
    ["/models", "/ping", "/metrics", "/v1/abort_request", "/v2/repository/models/model/unload", "http://host/x"],
)
def test_a_route_that_commands_or_describes_is_refused(runtime: Any, route: str) -> None:
    with pytest.raises(ClientError) as refused:
        runtime.invoke_endpoint(**call(route, {"url": "s3://bucket/model", "request_id": "mine"}))
    assert refused.value.response["OriginalStatusCode"] == 400
    assert "must be the path of a POST route" in refused.value.response["OriginalMessage"]


def test_the_call_is_counted_and_logged_under_the_route_that_answers(server: Server, runtime: Any) -> None:
    counter = 'slipway_requests_total{route="/v1/metadata_text",status="200"}'

    def count() -> float:
        found = re.search(re.escape(counter) + r" (\S+)", server.client.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = count()
    runtime.invoke_endpoint(**call("/v1/metadata_text", {"text": "Hello"}, InferenceId="counted"))
    assert count() == before + 1
    wait_until(lambda: re.search(r"access.*counted.*POST /v1/metadata_text 200 ", server.log_text()))


def test_a_client_that_leaves_a_stream_ends_the_generation(server: Server, runtime: Any) -> None:
    body = {"model": "model", "stream": True, **ENDLESS_COMPLETION}
    aborted = server.metric("slipway_generations_aborted_total")
    answer = runtime.invoke_endpoint_with_response_stream(**call("/v1/completions", body))
    assert next(iter(answer["Body"]))["PayloadPart"]["Bytes"].startswith(b"data:")
    answer["Body"].close()
    wait_until(lambda: server.metric("slipway_generations_aborted_total") > aborted)
