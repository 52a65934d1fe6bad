"""LMI's answers to chats are made from documents and events that vLLM sends. `cases/lmi_chat` has their bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Reply
from handlers.lmi.chat_answers import AsyncForm, LmiChatForm
from handlers.lmi.converted_reply import LmiChatShape, Shape, events, is_error


def document(**choice: Any) -> bytes:
    full = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"} | choice
    return json.dumps({"id": "c", "created": 7, "choices": [full], "usage": {"total_tokens": 1}}).encode()


def chunk(delta: dict[str, Any], **choice: Any) -> bytes:
    full = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | choice
    return json.dumps({"id": "chatcmpl-1", "created": 7, "model": "model", "choices": [full]}).encode()


def chat_shape() -> LmiChatShape:
    return LmiChatShape(LmiChatForm())


def whole(shape: Shape, body: bytes, status: int = 200) -> Reply:
    reply = Reply(status, "application/json", body)
    return shape.refusal(reply) if status >= 400 else shape.whole(reply)


def choice_of(shape: Shape, **choice: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(whole(shape, document(**choice)).body)["choices"][0]
    return answer


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
