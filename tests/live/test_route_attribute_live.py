"""All contracts through `/invocations`, by `route=` in SageMaker's custom attributes, with unmodified boto3."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from tests.live.server import Server
from tests.live.small_model import ENDLESS_STREAM
from tests.runtime_client import runtime_at
from tests.waiting import wait_until

NAME = "my-endpoint"
HELLO = [{"role": "user", "content": "Say hello."}]
CHAT = {"model": "model", "messages": HELLO, "max_tokens": 2, "temperature": 0}
TGI = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True}}
TRITON = {"text_input": "Hello", "parameters": {"max_tokens": 2, "temperature": 0}}
HAPPY = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
MESSAGE = {"model": "model", "messages": HELLO, "max_tokens": 2, "temperature": 0}

# A route of each contract. tests/unit/container/http/test_custom_attributes.py has all routes.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions/batch", CHAT | {"messages": [HELLO, HELLO]}),
    ("/v1/completions", {"model": "model", "prompt": "Hello", "max_tokens": 2, "temperature": 0, "logprobs": 1}),
    ("/v1/responses", {"model": "model", "input": "Hello", "max_output_tokens": 2, "temperature": 0, "store": False}),
    ("/v1/messages", MESSAGE),
    ("/tokenize", {"prompt": "Hello"}),
    ("/generate", TGI),
    ("/v2/models/model/generate", TRITON),
    ("/v1/generate", HAPPY),
    ("/v1/tokenizer", {"text": "Hello there"}),
    ("/predictions/model", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
]
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/messages", MESSAGE | {"stream": True}),
    ("/generate_stream", TGI),
    ("/v2/models/model/generate_stream", TRITON | {"stream": True}),
    ("/v1/generate_stream", HAPPY),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
    ("/generate", {"inputs": "Hello", "parameters": {"top_p": 7}}),
    ("/v2/models/other/generate", TRITON),
    ("/v1/tokenizer", {}),
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
    """Return a body without the parts that differ between equal calls.

    vLLM's own front end joins deltas if it is busy, so this function joins all deltas of Anthropic's streams.
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
    assert answer.get("ContentType", "") == expected.headers.get("content-type", "")


def test_a_stream_begins_before_its_answer_ends(server: Server, runtime: Any) -> None:
    """The model never ends this answer, so the server cannot wait for its end."""
    answer = runtime.invoke_endpoint_with_response_stream(**call("/v1/completions", ENDLESS_STREAM))
    assert next(iter(answer["Body"]))["PayloadPart"]["Bytes"].startswith(b"data: {")
    answer["Body"].close()
    server.wait_for_metric("slipway_engine_running", 0)


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


def test_the_call_is_counted_and_logged_under_the_route_that_answers(server: Server, runtime: Any) -> None:
    counter = 'slipway_requests_total{route="/v1/metadata_text",status="200"}'

    def count() -> float:
        found = re.search(re.escape(counter) + r" (\S+)", server.client.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = count()
    runtime.invoke_endpoint(**call("/v1/metadata_text", {"text": "Hello"}, InferenceId="counted"))
    assert count() == before + 1
    wait_until(lambda: re.search(r"access.*counted.*POST /v1/metadata_text 200 ", server.log_text()))
