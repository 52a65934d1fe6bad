"""OpenAI's routes, with the clients that people use. The transformers engine refuses these routes, and its refusal
names the engine that they need.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.live.server import Server, hosted, write_model
from tests.live.small_model import ENDLESS_COMPLETION, MAX_MODEL_LEN
from tests.waiting import wait_until

MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"model": "model", "temperature": 0.0, "max_tokens": 8}
BACKGROUND = {"input": "Once", "background": True, "max_output_tokens": 65000, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}, "number": {"enum": [1, 2, 3]}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_prompt_log_probabilities_and_echo_come_from_the_same_engine(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt="Once upon a time", echo=True, logprobs=0, extra_body={"prompt_logprobs": 1}, **GREEDY
    )
    assert answer.choices[0].text.startswith("Once upon a time")
    assert len(answer.choices[0].prompt_logprobs) == 4  # type: ignore[attr-defined]


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(messages=MESSAGES, model="nobody")
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(messages=MESSAGES, model="model", temperature=9.0)
    assert "temperature" in hot.value.message
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="model", prompt="a " * (MAX_MODEL_LEN + 1))


@pytest.mark.parametrize("name", ["model", "", "dummy", "tgi", "http://localhost:8080", "HTTPS://host/v1/models/x?a"])
def test_the_model_has_aliases_and_a_url_is_no_models_name(client: openai.OpenAI, name: str) -> None:
    for more in ({}, {"echo": True}):
        answer = client.completions.create(model=name, prompt="Hi", max_tokens=1, **more)
        assert answer.model == "model"
    assert client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=1).model == "model"
    assert client.responses.create(model=name, input="Hi", max_output_tokens=1).model


def test_responses_and_anthropics_messages_come_with_vllm(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.create(model="model", input="Hi", max_output_tokens=4)
    assert answer.output_text
    *_, last = client.responses.create(model="model", input="Hi", max_output_tokens=4, stream=True)
    assert isinstance(last, openai.types.responses.ResponseIncompleteEvent)
    for response in (answer, last.response):
        assert response.usage is not None
        details = (response.usage.input_tokens_details, response.usage.output_tokens_details)
        assert all(isinstance(value, int) for each in details for value in each.model_dump(exclude_unset=True).values())
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as theirs:
        message = theirs.messages.create(model="model", max_tokens=4, messages=MESSAGES)
        assert (message.type, message.role, message.stop_sequence) == ("message", "assistant", None)
        assert "stop_sequence" in message.model_fields_set
        assert message._request_id is not None
        assert [model.id for model in theirs.models.list()] == ["model"]
        assert theirs.models.retrieve("model").display_name == "model"
        for call in (theirs.models.retrieve, theirs.beta.models.retrieve):
            with pytest.raises(anthropic.NotFoundError):
                call("other")


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    tokens = server.client.post("/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    assert (
        tokens == server.client.post("/tokenize", json={"prompt": "Once upon a time", "inputs": None}).json()["tokens"]
    )
    assert server.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "Once upon a time"
    assert server.client.get("/version").json()["version"].startswith("0.3")


def test_langchain_works_unchanged(server: Server) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    model = ChatOpenAI(base_url=f"{server.url}/v1", api_key=SecretStr("none"), model="model", temperature=0.0)
    answer = model.bind(max_tokens=8).invoke("Name three colours.")
    assert answer.content
    pieces = [piece.content for piece in model.bind(max_tokens=8).stream("Name three colours.")]
    assert "".join(map(str, pieces)) == answer.content


def test_litellm_works_unchanged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    arguments: dict[str, Any] = {
        "model": "openai/model",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0.0,
    }
    answer = litellm.completion(**arguments)
    chunks = litellm.completion(**arguments, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


HOSTILE = [
    b"{",
    b"[]",
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "\\ud800", "content": "x"}], "max_tokens": "\\udfff"}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "top_p": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": "NaN", "x": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"9999999": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [-1, 9999999]}',
    b'{"messages": [{"role": "user", "content": "x"}], "allowed_token_ids": [9999999]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": "x"}], "priority": 99999999999999999999}',
    b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": 99999999999999999999}',
    b'{"messages": [{"role": "user", "content": "x"}], "vllm_xargs": {"typical_p": "x"}}',
    b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "("}}',
    b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"grammar": "x"}}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1/0 }}"}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": {}}, "tools": [{}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}',
    b'{"messages": [' + b'{"role": "user", "content": "x"},' * 1_000_000 + b"{}]}",
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_the_engine_refuses_is_refused_before_a_stream(server: Server, stream: bool) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": {"items": {}, "uniqueItems": True}}
    asked = {"model": "model", "input": "Hi", "max_output_tokens": 8, "text": {"format": form}, "stream": stream}
    response = server.client.post("/v1/responses", json=asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format")
    asked = {"model": "model", "messages": MESSAGES, "max_tokens": 8, "output_config": {"format": form}}
    message = server.client.post("/v1/messages", json=asked | {"stream": stream})
    error = anthropic.types.ErrorResponse.model_validate(message.json(), strict=True).error
    assert (message.status_code, error.type) == (400, "invalid_request_error")
    assert "output_config.format" in error.message


def test_a_refused_body_names_its_field_as_the_owners_of_the_apis_do(server: Server) -> None:
    body = {"model": "model", "max_tokens": 8, "messages": [{"role": "user", "content": [{"type": "x"}]}]}
    message = server.client.post("/v1/messages", json=body)
    assert message.headers["request-id"] == message.headers["x-request-id"]
    assert message.json()["error"]["message"].startswith("messages.0.content.0.type: ")
    part: dict[str, Any] = {"role": "user", "content": [{"type": "x"}]}
    response = server.client.post("/v1/responses", json={"input": [part]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[0].content[0].type")
    response = server.client.post("/v1/responses", json={"input": [part | {"content": "a"}, {"type": "item"}]})
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("BadRequestError", "input[1].type")
    assert len(error["message"]) < 1000


def test_a_message_continues_a_begun_answer(server: Server) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    chat = {**GREEDY, "messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    expected = server.client.post("/v1/chat/completions", json=chat).json()
    message = server.client.post("/v1/messages", json={**GREEDY, "messages": begun}).json()
    assert message["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    counted = server.client.post("/v1/messages/count_tokens", json={"model": "model", "messages": begun}).json()
    assert counted["input_tokens"] == message["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_an_assistants_message_of_a_response_needs_no_type(server: Server) -> None:
    content = [{"type": "output_text", "text": "Red."}]
    asked = {"max_output_tokens": 4, "temperature": 0}

    def answer(message: dict[str, Any]) -> Any:
        turns = [{"role": "assistant", **message}, {"role": "user", "content": "And?"}]
        return server.client.post("/v1/responses", json=asked | {"input": turns}).json()

    typed, *others = [
        answer(message)
        for message in ({"type": "message", "content": content}, {"content": content}, {"content": "Red."})
    ]
    for other in others:
        assert other["usage"] == typed["usage"]
        assert other["output"][0]["content"] == typed["output"][0]["content"]
    refusal = [{"type": "refusal", "refusal": "Red."}]
    assert answer({"content": refusal})["usage"] == typed["usage"]
    assert answer({"content": content + refusal})["usage"] == answer({"content": "Red.\nRed."})["usage"]
    assert answer({"content": []})["usage"] == answer({"content": ""})["usage"]


def test_a_body_may_have_the_id_of_its_request(server: Server) -> None:
    for path, asked, prefix in (
        ("/v1/completions", {"prompt": ["Hi", "Hello"]}, "cmpl-"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "chatcmpl-"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, ""),
    ):
        body = {"max_tokens": 2, "request_id": "our-id.7", **asked}
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda body, path=path: server.client.post(path, json=body), [body, body])
        assert first.json()["id"] == second.json()["id"] == f"{prefix}our-id.7"
        assert first.headers["x-request-id"] == "our-id.7"
        named = server.client.post(path, json=body, headers={"x-request-id": "theirs"})
        assert named.headers["x-request-id"] == "theirs"
    server.wait_for_log("our-id.7")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2}),
    ],
)
def test_a_refused_form_has_the_name_that_the_client_gave_it(
    server: Server, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"uniqueItems": True}}}
    for field in ({"response_format": form}, {"structured_outputs": {"regex": "("}}, {"guided_regex": r"a\b"}):
        reply = server.client.post(path, json={**prompt, **field, "stream": stream})
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert reply.json()["error"]["param"] == next(iter(field))
    # At the first token, the engine finds that no text is allowed.
    first_prompt = {name: "Hi" if name == "prompt" else value for name, value in prompt.items() if name != "n"}
    forbidden: dict[str, dict[str, Any]] = {
        "allowed_token_ids": {"allowed_token_ids": [5], "response_format": {"type": "json_object"}},
        "bad_words": {"bad_words": ["{"], "structured_outputs": {"choice": ["{"]}},
    }
    for (name, late), way in itertools.product(forbidden.items(), ({}, {"return_token_ids": True})):
        reply = server.client.post(path, json={**first_prompt, **late, **way, "stream": stream})
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json"), reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == (400, name)
        assert f"`{name}` forbids every token that the constraint allows" in error["message"]


def test_tools_may_be_allowed_and_have_to_be_there_if_one_is_to_be_called(server: Server) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "ab"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}
    asked = {"input": "Hi", "max_output_tokens": 4, "tools": tools, "tool_choice": choice}
    answer = server.client.post("/v1/responses", json=asked)
    assert answer.status_code == 200, answer.text
    assert [tool["name"] for tool in answer.json()["tools"]] == ["a"]
    asked = {"model": "model", "max_tokens": 4, "messages": MESSAGES, "tool_choice": {"type": "any"}}
    refused = server.client.post("/v1/messages", json=asked)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), refused.text


def test_the_digits_of_an_expression_are_ascii(server: Server) -> None:
    for form in (
        {"regex": r"\d{4}"},
        {"grammar": "?start: /\\d{4}/\n"},
        {"grammar": "start: a\na[max_tokens=2]: /\\d+/\n"},
    ):
        body = {"prompt": "Hi", "max_tokens": 8, "temperature": 2, "seed": 5, "structured_outputs": form}
        text = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert text.isascii(), text
        assert text.isdigit(), text


# Values for FREE_FIELDS: fields of vLLM's requests that reach the engine unchanged.
OF_ANY_KIND: tuple[Any, ...] = (-1, "x", ["a"], True, 10**20, {"a": {"b": [None]}})
FREE_FIELDS = ("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "chat_template_kwargs", "mm_processor_kwargs")
# Names that Slipway or vLLM reads in the engine, in this version or in an earlier one.
READ_NAMES = ("slipway_sent_tokens", "kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "unknown")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"])
def test_no_field_of_a_client_reaches_what_the_engine_is_told(server: Server, path: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "structured_outputs": {"regex": "[ab]{3}"}}
    body |= {"prompt": "Hi"} if path.endswith("/completions") and "chat" not in path else {"messages": MESSAGES}
    if path.endswith("responses"):
        body = {**body, "input": "Hi"}
        del body["messages"]
    fields: list[dict[str, Any]] = [{name: value} for name in FREE_FIELDS for value in OF_ANY_KIND]
    fields += [{"vllm_xargs": {name: value}} for name in READ_NAMES for value in OF_ANY_KIND]
    fields.append({"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": -5}})
    for given in fields:
        reply = server.client.post(path, json={**body, **given})
        if reply.status_code == 200:
            assert re.search(r'"(text|content)":\s?"[ab]{3}"', reply.text), f"{given}: {reply.text}"
            assert '"cached_tokens":-5' not in reply.text
        else:
            assert reply.status_code in (400, 424), f"{given}: {reply.text}"


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bodies_are_refused_and_leave_the_engine_alive(server: Server, body: bytes) -> None:
    reply = server.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert "error" in reply.json()
    assert reply.status_code in (400, 501)
    assert "Traceback" not in reply.text
    assert "site-packages" not in reply.text
    assert server.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/invocations"])
def test_a_client_that_leaves_stops_its_generations(server: Server, path: str, stream: bool) -> None:
    aborted = server.metric("slipway_generations_aborted_total")
    prompt = {"prompt": ["Once", "Twice"]} if path == "/v1/completions" else {"messages": MESSAGES}
    document = {"max_tokens": 65000, "ignore_eos": True, "stream": stream, **prompt}
    sequences = 2 if path == "/v1/completions" else 1
    if stream:
        with server.client.stream("POST", path, json=document) as reply:
            lines = reply.iter_lines()
            assert [next(lines) for _ in range(5)]
    else:
        with server.send(path, document):
            server.wait_for_metric("slipway_engine_running", sequences)
    for gauge in ("slipway_open_requests", "slipway_engine_running", "slipway_engine_waiting"):
        server.wait_for_metric(gauge, 0)
    assert server.metric("slipway_generations_aborted_total") == aborted + sequences


def test_a_batch_has_an_answer_for_each_conversation(client: openai.OpenAI, server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    conversations: Any = [MESSAGES, [{"role": "user", "content": "Count to three."}], [*MESSAGES, *called]]
    reply = server.client.post("/v1/chat/completions/batch", json={"messages": conversations, **GREEDY}).json()
    texts = [client.chat.completions.create(messages=one, **GREEDY).choices[0].message.content for one in conversations]
    assert [(choice["index"], choice["message"]["content"]) for choice in reply["choices"]] == list(enumerate(texts))
    assert reply["usage"]["completion_tokens"] == 24


def test_a_batch_is_aborted_by_the_id_of_its_request(server: Server) -> None:
    batch = {"messages": [MESSAGES, MESSAGES], "max_tokens": 65000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            server.client.post, "/v1/chat/completions/batch", json=batch, headers={"x-request-id": "batch-1"}
        )
        server.wait_for_metric("slipway_engine_running", 2)
        assert server.client.post("/v1/abort_request", json={"request_id": "batch-1"}).status_code == 200
        choices = reply.result().json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


@pytest.fixture(scope="module")
def three_places(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[Server]:
    """Start a model that runs two requests at the same time and lets one more wait."""
    options = small_options | {"rolling_batch": "disable", "async_mode": "true", "max_rolling_batch_size": 2}
    model = write_model(tmp_path_factory.mktemp("three") / "model", **options)
    with (model / "serving.properties").open("a") as file:
        file.write("job_queue_size=1\n")
    with hosted(host, model) as running:
        yield running


def test_a_full_queue_is_503_and_lmis_own_error_on_invocations(three_places: Server) -> None:
    server = three_places
    one = {"model": server.name, "prompt": "Once", "max_tokens": 1}
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            clients.enter_context(server.send("/v1/completions", one | ENDLESS_COMPLETION))
        server.wait_for_metric("slipway_engine_running", 2)
        server.wait_for_metric("slipway_engine_waiting", 1)
        full = server.client.post("/v1/completions", json=one)
        lmi = server.client.post("/invocations", json=one)
        messages = {"model": server.name, "messages": MESSAGES, "max_tokens": 1}
        message = server.client.post("/v1/messages", json=messages)
        counted = server.client.post("/v1/messages/count_tokens", json=messages)
    server.wait_for_metric("slipway_open_requests", 0)
    too_many = server.client.post("/v1/completions", json=one | {"prompt": ["a"] * 4})
    assert full.status_code == 503
    assert full.json()["error"]["type"] == "Service Unavailable"
    assert lmi.json()["type"] == "WlmCapacityException"
    assert (message.status_code, message.json()["error"]["type"]) == (503, "overloaded_error")
    assert (counted.status_code, counted.json()["input_tokens"] > 0) == (200, True)
    assert too_many.status_code == 400


def test_a_response_in_the_background_keeps_its_place_until_it_ends(three_places: Server) -> None:
    server = three_places
    document = {"model": server.name, **BACKGROUND}

    def state(response: httpx.Response, method: str = "GET", action: str = "") -> Any:
        path = f"/v1/responses/{response.json()['id']}{action}"
        return server.client.request(method, path, json={"model": server.name}).json()["status"]

    begun = [server.client.post("/v1/responses", json=document) for _ in range(3)]
    assert [response.json()["status"] for response in begun] == ["queued"] * 3
    full = server.client.post("/v1/completions", json={"model": server.name, "prompt": "Once", "max_tokens": 1})
    assert (full.status_code, full.json()["error"]["type"]) == (503, "Service Unavailable")
    assert [state(response, "POST", "/cancel") for response in begun] == ["cancelled"] * 3
    server.wait_for_metric("slipway_engine_running", 0)
    assert [state(response) for response in begun] == ["cancelled"] * 3
    short = server.client.post("/v1/responses", json=document | {"max_output_tokens": 2})
    wait_until(lambda: state(short) == "incomplete")


def test_a_stream_of_a_response_in_the_background_ends_if_the_response_is_cancelled(three_places: Server) -> None:
    server = three_places
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"extra_body": {"ignore_eos": True}, "model": server.name, "input": "Once", "background": True}
        stream = client.responses.create(**body, stream=True, max_output_tokens=65000)
        first = next(stream)
        server.client.post(f"/v1/responses/{first.response.id}/cancel", json={"model": server.name})
        *_, last = stream
        assert (first.type, last.type, last.response.status) == ("response.created", "response.failed", "cancelled")
        path, asked = (
            f"/v1/responses/{first.response.id}",
            {"stream": "true", "starting_after": last.sequence_number - 1},
        )
        again = server.client.request("GET", path, params=asked, json={"model": server.name})
        assert re.findall("^event: (.*)$", again.text, re.MULTILINE) == ["response.failed"]
        *_, last = client.responses.create(**body, stream=True, max_output_tokens=2)
        assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    server.wait_for_metric("slipway_open_requests", 0)


@pytest.fixture(scope="module")
def small(
    host: Server, tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]
) -> Iterator[Server]:
    """A model in the asynchronous mode. It has a parser of tool calls, and other served names."""
    options = engine_options | {
        "rolling_batch": "disable",
        "async_mode": "true",
        "max_rolling_batch_size": 2,
        "enable_auto_tool_choice": "true",
        "tool_call_parser": "hermes",
        "served_model_name": "first,second",
    }
    with hosted(host, write_model(tmp_path_factory.mktemp("small") / "model", **options)) as running:
        yield running


class TestSmall:
    """The tests of this class share one model."""

    def test_served_names_are_the_models_names(self, small: Server) -> None:
        with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
            listed = [model.id for model in client.models.list()]  # other tests may have models on the same server
            assert ("first" in listed, "second" in listed, small.name in listed) == (True, True, False)
            assert client.completions.create(model="second", prompt="Hi", max_tokens=1).model == "first"

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_response_that_has_to_call_a_tool_does(self, small: Server, choice: Any, stream: bool) -> None:
        tool = {"type": "function", "strict": True, **WEATHER["function"]}
        with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none") as client:
            asked = {"model": "first", "input": "Hello!", "tools": [tool], "max_output_tokens": 60, "temperature": 0}
            asked["text"] = {"format": {"type": "json_schema", "name": "message", "schema": SCHEMA}}
            response = client.responses.create(tool_choice=choice, stream=stream, **asked)
            if stream:
                events = list(response)
                assert events[0].response.text is None or events[0].response.text.format is None
                response = events[-1].response
        assert response.text is None or response.text.format is None  # vLLM's schema of the call is not the client's
        calls = [item for item in response.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["weather"]
        assert json.loads(calls[0].arguments) in ({"city": "Paris"}, {"city": "Rome"})

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/invocations"])
    def test_a_model_of_texts_refuses_images_by_its_public_name(self, small: Server, path: str) -> None:
        url = f"data:image/png;base64,{PIXEL}"
        part = {"type": "image_url", "image_url": {"url": url}}
        messages = {"messages": [{"role": "user", "content": [part]}]}
        responses = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
        refused = small.client.post(path, json={"model": "first"} | (responses if "responses" in path else messages))
        assert (refused.status_code, "first is not a multimodal model" in refused.text) == (400, True)


@pytest.fixture(scope="module")
def tiny(host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a model with requests that run until something ends them. The last test kills the model's engine."""
    options = small_options | {"rolling_batch": "disable", "async_mode": "true"}
    with hosted(host, write_model(tmp_path_factory.mktemp("tiny") / "model", **options)) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_is_aborted_by_the_id_that_it_shows_whichever_model_has_it(tiny: Server, path: str) -> None:
    document = {"model": tiny.name, "max_tokens": 65000, "ignore_eos": True, "stream": True}
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Once"}
    aborted = tiny.metric("slipway_generations_aborted_total")
    with tiny.client.stream("POST", path, json=document | prompt) as reply:
        events = (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: {"))
        first = next(events)
        assert tiny.client.post("/v1/abort_request", json={"request_id": first["id"]}).json() is None
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "abort"
    assert tiny.metric("slipway_generations_aborted_total") == aborted + 1


def test_a_dead_engine_ends_its_requests(tiny: Server) -> None:
    document = {"model": tiny.name, **BACKGROUND}
    message = {"model": tiny.name, "messages": MESSAGES, "max_tokens": 60000, "stream": True}
    completion = {"model": tiny.name, **ENDLESS_COMPLETION}
    background = tiny.client.post("/v1/responses", json=document).json()
    with (
        tiny.client.stream("POST", "/v1/responses", json=document | {"stream": True}) as streamed,
        tiny.client.stream("POST", "/v1/responses", json=document | {"stream": True, "background": False}) as response,
        tiny.client.stream("POST", "/v1/messages", json=message) as messages,
        tiny.client.stream("POST", "/v1/completions", json=completion | {"stream": True}) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(tiny.client.post, "/v1/completions", json=completion)
        tiny.wait_for_metric("slipway_engine_running", 6)
        os.kill(tiny.engine_process(), signal.SIGKILL)
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["type"] == "InternalServerError"
        rest = "".join(stream.iter_text())
        assert '"error"' in rest
        assert all("the engine has died" in text for text in (whole.result().text, rest))
        assert "event: response.failed" in "".join(streamed.iter_text())
        *_, last, failed = ("".join(response.iter_text())).strip().split("\n\n")
        assert (last.partition("\n")[0], failed.partition("\n")[0]) == ("event: error", "event: response.failed")
        last = ("".join(messages.iter_text())).strip().split("\n\n")[-1]
        assert last.startswith("event: error\n")
        error = json.loads(last.partition("data: ")[2])
        assert anthropic.types.ErrorResponse.model_validate(error, strict=True).error.type == "api_error"
    late = tiny.client.post("/v1/completions", json=completion)
    assert late.status_code == 500
    assert "error" in late.json()
    explained = tiny.client.post("/v1/completions", json=completion, headers={"x-slipway-explain": "1"})
    assert (explained.status_code, explained.json()) == (500, late.json())
    response = tiny.client.request("GET", f"/v1/responses/{background['id']}", json={"model": tiny.name})
    assert response.json()["status"] == "failed"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_a_body_of_another_type_is_refused_in_the_routes_form(server: Server, path: str) -> None:
    refused = server.client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert (refused.status_code, "application/json" in refused.json()["error"]["message"]) == (400, True)
    assert ("type" in refused.json()) == (path == "/v1/messages")
