"""TGI's routes over real HTTP, with the real engines and TGI's own clients, unmodified."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError as HubValidationError
from text_generation import AsyncClient, Client
from text_generation.errors import OverloadedError, ValidationError
from text_generation.types import Grammar, GrammarType, Message

from tests.live.server import Server, serving
from tests.live.small_model import ENDLESS, MAX_MODEL_LEN
from tests.waiting import wait_until

PROMPT = "The capital of France is"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, timeout=120)


@pytest.fixture
def hub(server: Server) -> InferenceClient:
    return InferenceClient(model=server.url, timeout=120)


@pytest.fixture
def text(server: Server) -> str:
    """Return five greedy tokens after PROMPT, by LMI's contract."""
    answer: str = server.invoke(PROMPT, max_new_tokens=5).json()["generated_text"]
    return answer


def test_the_python_client_generates_what_lmis_contract_generates(client: Client, text: str) -> None:
    response = client.generate(PROMPT, max_new_tokens=5, decoder_input_details=True, top_n_tokens=2)
    details = response.details
    assert response.generated_text == "".join(token.text for token in details.tokens) == text
    assert (details.finish_reason.value, details.generated_tokens, details.seed) == ("length", 5, None)
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert details.prefill[0].logprob is None
    assert details.top_tokens is not None
    assert [top[0].id for top in details.top_tokens] == [token.id for token in details.tokens]


def test_the_python_client_streams_what_it_generates(client: Client, text: str) -> None:
    stream = list(client.generate_stream(PROMPT, max_new_tokens=5, top_n_tokens=2))
    assert "".join(part.token.text for part in stream) == stream[-1].generated_text == text
    assert all(part.generated_text is part.details is None for part in stream[:-1])
    assert stream[-1].details is not None
    assert stream[-1].details.generated_tokens == 5
    assert all(part.top_tokens is not None and len(part.top_tokens) == 2 for part in stream)


def test_the_async_client_does_the_same(server: Server, text: str) -> None:
    async def both() -> tuple[str, str]:
        client = AsyncClient(server.url, timeout=120)
        response = await client.generate(PROMPT, max_new_tokens=5)
        parts = [part.token.text async for part in client.generate_stream(PROMPT, max_new_tokens=5)]
        return response.generated_text, "".join(parts)

    assert asyncio.run(both()) == (text, text)


def test_all_parameters_of_the_python_client_are_taken(client: Client) -> None:
    response = client.generate(
        "Once upon a time",
        do_sample=True,
        max_new_tokens=6,
        best_of=2,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        return_full_text=True,
        stop_sequences=["."],
        temperature=0.7,
        top_k=10,
        top_p=0.9,
        truncate=3,
        typical_p=0.9,
        decoder_input_details=True,
        top_n_tokens=3,
    )
    assert response.generated_text.startswith("Once upon a time")
    assert len(response.details.prefill) == 3
    others = response.details.best_of_sequences
    assert others is not None
    assert len({response.details.seed, *(other.seed for other in others)}) == 2


def test_the_python_client_raises_validation_errors(sample_server: Server) -> None:
    client = Client(sample_server.url, timeout=120)
    text = "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 5 `inputs` tokens and "
    with pytest.raises(ValidationError, match="Input validation error") as plain:
        client.generate(PROMPT, max_new_tokens=1024)
    assert text in str(plain.value)
    with pytest.raises(ValidationError) as stream:
        list(client.generate_stream(PROMPT, max_new_tokens=1024))
    assert str(stream.value) == str(plain.value)


def test_the_python_client_raises_overloaded_errors(server: Server, client: Client) -> None:
    places = server.client.get("/info").json()["max_concurrent_requests"]
    endless = {"inputs": ["1, 2, 3, 4,"] * places, "parameters": ENDLESS}
    body = json.dumps(endless).encode()
    head = "POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    idle(server)
    with socket.create_connection(("127.0.0.1", server.port)) as crowd:
        crowd.sendall(head.encode() + body)
        # No earlier request may run. It would take one of the places, and then the crowd's request would be refused.
        wait_until(lambda: server.metric("slipway_engine_running"))
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            client.generate(PROMPT, max_new_tokens=1)
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            list(client.generate_stream(PROMPT, max_new_tokens=1))
        reply = server.client.post("/generate", json={"inputs": "x"})
        assert (reply.status_code, reply.json()["error_type"]) == (429, "overloaded")
    idle(server)
    assert client.generate(PROMPT, max_new_tokens=1).details.generated_tokens == 1


def idle(server: Server) -> None:
    """Wait until no earlier request is open, running or waiting."""
    for gauge in ("slipway_open_requests", "slipway_engine_running", "slipway_engine_waiting"):
        server.wait_for_metric(gauge, 0)


def test_the_hub_client_reads_plain_answers_details_and_streams(hub: InferenceClient, text: str) -> None:
    # By default, TGI returns the full text on the root route.
    assert hub.text_generation(PROMPT, max_new_tokens=5) == PROMPT + text
    assert hub.text_generation(PROMPT, max_new_tokens=5, return_full_text=False) == text
    details = hub.text_generation(PROMPT, max_new_tokens=5, details=True, return_full_text=False).details
    assert details is not None
    assert (details.finish_reason, details.generated_tokens, details.prefill) == ("length", 5, [])
    assert "".join(hub.text_generation(PROMPT, max_new_tokens=5, stream=True)) == text
    *_, last = hub.text_generation(PROMPT, max_new_tokens=5, stream=True, details=True, return_full_text=False)
    assert (last.index, last.generated_text) == (5, text)
    with pytest.raises(HubValidationError, match="`temperature` must be strictly positive"):
        hub.text_generation(PROMPT, temperature=-1.0)


def test_a_grammar_is_kept_to(sample_server: Server) -> None:
    client = Client(sample_server.url, timeout=120)
    grammar = Grammar(type=GrammarType.Json, value=SCHEMA)
    person = json.loads(client.generate("A person:", max_new_tokens=60, grammar=grammar).generated_text)
    assert set(person) >= {"name", "age"}
    for wrong in (Grammar(type=GrammarType.Regex, value="["), Grammar(type=GrammarType.Json, value={"properties": 3})):
        with pytest.raises(ValidationError, match="grammar"):
            client.generate("x", max_new_tokens=5, grammar=wrong)


def test_the_python_clients_chat_is_answered_with_its_nulls(client: Client) -> None:
    answer = client.chat([Message(role="user", content="Say hello.")], max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.usage["completion_tokens"] == 5


def test_info_and_tokens(server: Server) -> None:
    info = server.client.get("/info").json()
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (MAX_MODEL_LEN, MAX_MODEL_LEN - 1)
    tokens = server.client.post("/tokenize", json={"inputs": "Hi 日本"}).json()
    assert [tokens[0], tokens[-1]] == [
        {"id": 26843, "text": "Hi", "start": 0, "stop": 2},
        {"id": 40993, "text": "本", "start": 6, "stop": 9},
    ]


USER = {"role": "user", "content": "Sing"}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": [1, "b"]}'}}
# A template that writes all of its variables, with the arguments of tool calls as objects.
SHOWS_ALL = (
    "{% for m in messages %}[{{ m.role }} {{ m.name }}]{{ m.content }} {{ m.reasoning }} {{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}"
    "{% endfor %}{% endfor %}{% endfor %}{{ tools }}{{ documents }}{{ reasoning_effort }}{{ tone }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _answered(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", **message}, USER]}


def _called(arguments: str) -> dict[str, Any]:
    call = {**_CALL, "function": {"name": "look", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [USER, turn, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]}


CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": [USER]},
    "a name": {"messages": [USER | {"name": "Ann"}]},
    "a developer": {"messages": [{"role": "developer", "content": "Be short."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "a call of a tool": _called('{"a": [1, "b"]}'),
    "a call without arguments": _called(""),
    "a call that was cut": _called('{"a": '),
    "a refusal": _answered({"content": [{"type": "refusal", "refusal": "No."}]}),
    "a thought": _answered({"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "No."}]}),
    "reasoning": _answered({"content": "No.", "reasoning": "Hm."}),
    "reasoning by its older name": _answered({"content": "No.", "reasoning_content": "Hm."}),
    "nulls": {"messages": [USER | {"name": None, "tool_calls": None}]},
    "no turn of the model": {"messages": [USER], "add_generation_prompt": False},
    "the model's turn at the end": {"messages": [USER, {"role": "assistant", "content": "La"}]},
    "a turn to continue": {
        "messages": [USER, {"role": "assistant", "content": "La"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "tools": {"messages": [USER], "tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
    "variables of the template": {"messages": [USER], "chat_template_kwargs": {"tone": "softly"}},
    "effort": {"messages": [USER], "reasoning_effort": "low"},
    "documents": {"messages": [USER], "documents": [{"title": "A", "text": "b"}]},
    "special tokens": {"messages": [USER], "add_special_tokens": True},
    "a template": {"messages": [USER], "chat_template": "a"},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "no message": {"messages": []},
}


def test_every_route_that_counts_a_chat_counts_the_prompt_of_the_chat(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    templating = {"chat_template": SHOWS_ALL, "default_chat_template_kwargs": '{"tone": "loudly"}'}
    counts: dict[str, list[object]] = {}
    with serving(tmp_path, **small_options, **templating) as model:
        for name, chat in CHATS.items():
            document = {"model": "model"} | chat
            whole = model.client.post("/v1/chat/completions", json=document | {"max_tokens": 1})
            lmi = model.client.post("/invocations", json=document | {"max_tokens": 1})
            of_vllm, of_happy = (model.client.post(path, json=document) for path in ("/tokenize", "/v2/tokenizer"))
            of_tgi = model.client.post("/chat_tokenize", json=chat)
            if whole.status_code == 400:
                refusals = [reply.status_code for reply in (lmi, of_vllm, of_happy, of_tgi)]
                assert refusals == [424, 400, 400, 422], name
                assert of_tgi.json()["error_type"] == "template_error"
                assert of_happy.json()["error"]["message"] in of_tgi.json()["error"]
                continue
            shown = of_tgi.json()
            counts[name] = [reply.json()["usage"]["prompt_tokens"] for reply in (whole, lmi)]
            counts[name] += [of_vllm.json()["count"], of_happy.json()["count"], len(shown["tokenize_response"])]
            assert "".join(token["text"] for token in shown["tokenize_response"]) == shown["templated_text"]
            assert [token["id"] for token in shown["tokenize_response"]] == of_vllm.json()["tokens"], name
        # Counting tokens needs no parser of tool calls, and no room in the context.
        for choice in ("auto", "required", "look"):
            tools = CHATS["tools"] | {"tool_choice": choice}
            assert (
                len(model.client.post("/chat_tokenize", json=tools).json()["tokenize_response"]) == counts["tools"][0]
            )
        long = {"messages": [{"role": "user", "content": "la " * (MAX_MODEL_LEN + 1)}]}
        assert model.client.post("/v2/tokenizer", json=long).json()["count"] > MAX_MODEL_LEN
    assert {name for name, found in counts.items() if len(set(found)) > 1} == set()
    assert len(counts) >= len(CHATS) - 5
