"""LMI's chat answers. They are made from documents and events that vLLM sends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Reply
from handlers.lmi.chat_answers import AsyncForm, LmiChatForm
from handlers.lmi.chat_conversion import LmiChatShape
from handlers.lmi.converted_reply import Shape, events, is_error

CHAT = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":7,"model":"model","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hi \xc3\xa9","refusal":null,"annotations":null,"audio":null,"function_call":null,'
    b'"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],'
    b'"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":{"prompt_tokens":4,"total_tokens":6,'
    b'"completion_tokens":2,"prompt_tokens_details":null},"prompt_logprobs":null,"kv_transfer_params":null}'
)


def document(**choice: Any) -> bytes:
    full = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"} | choice
    return json.dumps({"id": "c", "created": 7, "choices": [full], "usage": {"total_tokens": 1}}).encode()


def chunk(delta: dict[str, Any], **choice: Any) -> bytes:
    full = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | choice
    return json.dumps({"id": "chatcmpl-1", "created": 7, "model": "model", "choices": [full]}).encode()


STREAM = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Hi"}),
    chunk({"content": " é"}, finish_reason="stop"),
    b"[DONE]",
)


def chat_shape(stop_token_ids: tuple[int, ...] = (), **form: Any) -> LmiChatShape:
    return LmiChatShape(LmiChatForm(**form), stop_token_ids)


def whole(shape: Shape, body: bytes, status: int = 200) -> Reply:
    reply = Reply(status, "application/json", body)
    return shape.refusal(reply) if status >= 400 else shape.whole(reply)


def choice_of(shape: Shape, **choice: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(whole(shape, document(**choice)).body)["choices"][0]
    return answer


def test_a_chat_answer_has_lmis_fields_in_lmis_order() -> None:
    reply = whole(chat_shape(), CHAT)
    assert (reply.status, reply.content_type) == (200, "application/json")
    assert reply.body.decode() == (
        '{"id": "chatcmpl-1", "object": "chat.completion", "created": 7, "choices": [{"index": 0, "message": '
        '{"role": "assistant", "content": "Hi é"}, "logprobs": null, "finish_reason": "length"}], '
        '"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}'
    )


def test_a_stream_is_lines_with_the_role_after_the_first_text() -> None:
    shape = chat_shape()
    assert shape.stream_type == "application/jsonlines"
    head = '{"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "choices": '
    assert b"".join(map(shape.event, STREAM)).decode() == (
        head + '[{"index": 0, "delta": {"content": "Hi", "role": "assistant"}, "logprobs": null, '
        '"finish_reason": null}]}\n'
        + head
        + '[{"index": 0, "delta": {"content": " é"}, "logprobs": null, "finish_reason": "eos_token"}]}\n'
    )


def test_the_sse_formatter_frames_records_and_ends_with_done() -> None:
    shape = chat_shape(sse=True)
    assert shape.stream_type == "text/event-stream"
    first, *_, last = [data for data in map(shape.event, STREAM) if data]
    assert first.startswith(b'data: {"id": "chatcmpl-1", "object": "chat.completion.chunk"')
    assert first.endswith(b'"finish_reason": null}]}\n\n')
    assert last == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("length", None, "length"),
        ("tool_calls", None, "tool_calls"),
        ("stop", None, "eos_token"),
        ("stop", "###", "stop_sequence"),
        ("stop", 7, "stop_sequence"),
        ("stop", 2, "eos_token"),
    ],
)
def test_finish_reasons_are_lmis(finish_reason: str, stop_reason: int | str | None, expected: str) -> None:
    shape = chat_shape((7,))
    assert choice_of(shape, finish_reason=finish_reason, stop_reason=stop_reason)["finish_reason"] == expected
    record = chat_shape((7,)).event(chunk({"content": ""}, finish_reason=finish_reason, stop_reason=stop_reason))
    assert json.loads(record)["choices"][0]["finish_reason"] == expected


def test_reasoning_goes_before_the_content() -> None:
    message = choice_of(chat_shape(), message={"role": "assistant", "content": "4", "reasoning": "2+2"})["message"]
    assert list(message.items()) == [("role", "assistant"), ("reasoning_content", "2+2"), ("content", "4")]
    record = chat_shape().event(chunk({"reasoning": "2+2"}))
    assert json.loads(record)["choices"][0]["delta"] == {"reasoning_content": "2+2"}


CALLS = [{"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}]


def test_tool_calls_are_kept() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": CALLS}
    choice = choice_of(chat_shape(), message=message, finish_reason="tool_calls")
    assert choice["message"] == message
    delta = [{"index": 0, **CALLS[0]}]
    record = chat_shape().event(chunk({"tool_calls": delta}))
    assert json.loads(record)["choices"][0]["delta"] == {"tool_calls": delta}


LOGPROBS = {
    "content": [
        {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": [{"token": "y", "logprob": -0.5, "bytes": [1]}]}
    ]
}


def test_log_probabilities_have_one_shape_streamed_or_not() -> None:
    assert choice_of(chat_shape(), logprobs=LOGPROBS)["logprobs"] == LOGPROBS
    record = chat_shape().event(chunk({"content": "x"}, logprobs=LOGPROBS))
    assert json.loads(record)["choices"][0]["logprobs"] == LOGPROBS


def test_several_choices_have_their_role_each() -> None:
    shape = chat_shape()
    starts = [chunk({"role": "assistant", "content": ""}, index=i) for i in (0, 1)]
    texts = [chunk({"content": "x"}, index=i) for i in (1, 0, 1)]
    records = [json.loads(data) for data in map(shape.event, (*starts, *texts)) if data]
    assert [(r["choices"][0]["index"], r["choices"][0]["delta"].get("role")) for r in records] == [
        (1, "assistant"),
        (0, "assistant"),
        (1, None),
    ]


def test_usage_that_was_asked_for_is_a_record_of_its_own() -> None:
    usage = b'{"id":"c","created":7,"choices":[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}'
    assert chat_shape().event(usage) == (
        b'{"id": "c", "object": "chat.completion.chunk", "created": 7, "choices": [], '
        b'"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}\n'
    )


ERROR = (
    b'{"error":{"message":"max_tokens must be at least 1","type":"BadRequestError","param":"max_tokens","code":400}}'
)


def test_what_is_wrong_with_a_request_is_424() -> None:
    reply = whole(chat_shape(), ERROR, 400)
    assert (reply.status, reply.body) == (424, b'{"error":"max_tokens must be at least 1","code":424}')


def test_a_fault_of_the_engine_keeps_its_status() -> None:
    reply = whole(chat_shape(), ERROR.replace(b"400", b"500"), 500)
    assert (reply.status, reply.body) == (500, b'{"error":"max_tokens must be at least 1","code":500}')


@pytest.mark.parametrize("shape", [chat_shape(overload_status=429), AsyncForm(429)])
def test_a_full_queue_is_lmis_own_error(shape: Shape) -> None:
    reply = whole(shape, b'{"error":{"message":"full","type":"Service Unavailable","param":null,"code":503}}', 503)
    assert reply.status == 429
    assert reply.body == b'{\n  "code": 429,\n  "type": "WlmCapacityException",\n  "message": "full"\n}\n'


def test_an_error_midway_is_a_record_that_says_so() -> None:
    shape = chat_shape()
    shape.event(chunk({"content": "Hi"}))
    event = b'{"error": {"message": "no token", "type": "InternalServerError", "param": null, "code": 500}}'
    assert shape.event(event) == (
        b'{"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "choices": [{"index": 0, '
        b'"delta": {"content": ""}, "logprobs": null, "finish_reason": "error"}], "error": "no token", "code": 424}\n'
    )


def test_the_asynchronous_schema_keeps_vllms_objects_and_frames_them_as_lines() -> None:
    shape = AsyncForm()
    assert whole(shape, CHAT).body == CHAT + b"\n"
    assert shape.stream_type == "application/jsonlines"
    assert b"".join(map(shape.event, STREAM)) == b"\n".join(STREAM[:3]) + b"\n\n"
    assert whole(shape, ERROR, 400) == Reply(
        400, "application/json", b'{"error":"max_tokens must be at least 1","code":400}'
    )


def test_events_are_found_in_any_piece_of_a_stream() -> None:
    assert events(b'data: {"a":1}\n\ndata: [DONE]\n\n') == [b'{"a":1}', b"[DONE]"]
    assert events(b": keep-alive\n\n") == []
    assert is_error(b'{"error": {}}')
    assert not is_error(b'{"id":"error"}')


@given(st.text(), st.text())
def test_any_text_comes_through(content: str, reasoning: str) -> None:
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    shown = choice_of(chat_shape(), message=message)["message"]
    assert shown == {"role": "assistant", "reasoning_content": reasoning, "content": content}
    records = chat_shape().event(chunk({"content": content}))
    assert (json.loads(records)["choices"][0]["delta"]["content"] if records else "") == content


@given(st.binary())
def test_an_error_body_of_any_bytes_is_an_error_still(body: bytes) -> None:
    for shape in (chat_shape(), AsyncForm()):
        assert "error" in json.loads(whole(shape, body, 400).body)
