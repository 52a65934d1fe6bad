"""TGI's routes /tokenize and /chat_tokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.errors import InvalidRequest, NotReady
from handlers.contract import Reply
from tests.contracts.tgi_exchange import FakeTokenizer, info_reply, view

TELL_ME = {"inputs": "Tell me"}


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize"])
def test_routes_that_need_the_model_are_refused_while_it_loads(path: str) -> None:
    with pytest.raises(NotReady):
        info_reply("POST", path, {"inputs": "x", "messages": []}, view("starting", loaded=False))


def test_tokenize_gives_ids_texts_and_places_in_bytes_with_special_tokens_empty() -> None:
    assert info_reply("POST", "/tokenize", {"inputs": "日本 Tell"}).body == (
        '[{"id":1,"text":"","start":0,"stop":0},{"id":6,"text":"日本","start":0,"stop":6},'
        '{"id":4,"text":"Tell","start":7,"stop":11}]'.encode()
    )


def test_tokenize_shows_all_tokens_with_any_truncate() -> None:
    for truncate in (0, 1, 5):
        document = {"inputs": "Tell me", "parameters": {"truncate": truncate}}
        assert info_reply("POST", "/tokenize", document).body == info_reply("POST", "/tokenize", TELL_ME).body


def test_tokenize_shows_no_places_where_the_tokenizer_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = view()
    texts = model.text().texts
    monkeypatch.setattr(texts, "places", lambda text, special: ([4, 5], None))
    assert info_reply("POST", "/tokenize", {"inputs": "Tell me"}, model).body == (
        b'[{"id":4,"text":"","start":0,"stop":0},{"id":5,"text":"","start":0,"stop":0}]'
    )


def test_chat_tokenize_shows_the_prompt_and_its_tokens() -> None:
    parts = [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me"}]
    for content in ("Tell me", parts):
        reply = info_reply("POST", "/chat_tokenize", {"messages": [{"role": "user", "content": content}]})
        assert reply.body == (
            b'{"tokenize_response":[{"id":7,"text":"user","start":0,"stop":4},{"id":8,"text":":","start":5,"stop":6},'
            b'{"id":4,"text":"Tell","start":7,"stop":11},{"id":5,"text":"me","start":12,"stop":14},'
            b'{"id":0,"text":"assistant","start":15,"stop":24},{"id":8,"text":":","start":25,"stop":26}],'
            b'"templated_text":"user : Tell me assistant :"}'
        )


def test_a_chat_that_ends_with_the_models_turn_is_continued() -> None:
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "me"}]
    body = info_reply("POST", "/chat_tokenize", {"messages": messages}).body
    assert body.endswith(b'"templated_text":"user : Tell assistant : me"}')


@pytest.mark.parametrize(
    ("document", "status", "body"),
    [
        (
            {"messages": [{"role": "wrong", "content": "x"}]},
            422,
            b'{"error":"Template error: roles must alternate","error_type":"template_error"}',
        ),
        (
            {"messages": [{"content": "x"}]},
            422,
            b"Failed to deserialize the JSON body into the target type: messages[0]: "
            b"Object missing required field `role`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            422,
            b"Failed to deserialize the JSON body into the target type: messages: a part of `content` must be of type "
            b"`text` or `image_url` and hold it, got a string as type",
        ),
    ],
)
def test_a_chat_that_cannot_be_a_prompt_is_refused(document: dict[str, Any], status: int, body: bytes) -> None:
    reply = info_reply("POST", "/chat_tokenize", document)
    assert (reply.status, reply.body) == (status, body)


def test_a_model_without_a_template_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    reply = info_reply("POST", "/chat_tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert reply == Reply(
        422,
        "application/json",
        b'{"error":"Template error: template not found: this model has no chat template",'
        b'"error_type":"template_error"}',
    )


@pytest.mark.parametrize(
    ("path", "document", "message"),
    [
        ("/tokenize", {"inputs": "me " * 200_000}, "`inputs` may have at most 524288 bytes of text, got 600000"),
        ("/tokenize", {"inputs": "日" * 200_000}, "`inputs` may have at most 524288 bytes of text, got 600000"),
        ("/tokenize", {"inputs": "x" * (1 << 22)}, "the body has 4194317 bytes; this route takes at most 4194304"),
        (
            "/chat_tokenize",
            {"messages": [{"role": "user", "content": "x" * (1 << 19)}]},
            "`messages` may have at most 524288 bytes of text, got 524307",
        ),
        (
            "/chat_tokenize",
            {"messages": [{"role": "user", "content": "x" * (1 << 22)}]},
            "the body has 4194347 bytes; this route takes at most 4194304",
        ),
    ],
)
def test_a_text_that_would_exhaust_memory_is_refused(path: str, document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        info_reply("POST", path, document)
    assert refused.value.message == message


def test_many_tokens_are_joined_as_few_are() -> None:
    tokens = json.loads(info_reply("POST", "/tokenize", {"inputs": "Tell me " * 5000}).body)
    assert len(tokens) == 10_001
    assert tokens[-1] == {"id": 5, "text": "me", "start": 39_997, "stop": 39_999}
    few = json.loads(info_reply("POST", "/tokenize", {"inputs": "Tell me " * 2000}).body)
    assert few == tokens[:4001]
