"""TGI's routes /tokenize and /chat_tokenize."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest

from engines.errors import InvalidChat, InvalidRequest, NotReady
from handlers.contract import Reply
from handlers.route_declarations import RenderedChat
from handlers.tgi.routes import TGI
from tests.contracts.tgi_exchange import info_reply, view
from tests.freed import when_freed

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


CHAT = {"messages": [{"role": "user", "content": "Tell me"}]}


def test_chat_tokenize_shows_the_prompt_and_its_tokens() -> None:
    for rendered in (RenderedChat([7, 8, 4, 5], "user : Tell me"), RenderedChat([7, 8, 4, 5])):
        assert info_reply("POST", "/chat_tokenize", CHAT, rendered=rendered).body == (
            b'{"tokenize_response":[{"id":7,"text":"user","start":0,"stop":4},{"id":8,"text":":","start":5,"stop":6},'
            b'{"id":4,"text":"Tell","start":7,"stop":11},{"id":5,"text":"me","start":12,"stop":14}],'
            b'"templated_text":"user : Tell me"}'
        )


def test_a_prompt_whose_tokens_are_more_than_its_text_has_no_places() -> None:
    body = info_reply("POST", "/chat_tokenize", CHAT, rendered=RenderedChat([4, 9, 9], "Tell")).body
    assert body == (
        b'{"tokenize_response":[{"id":4,"text":"","start":0,"stop":0},{"id":9,"text":"","start":0,"stop":0},'
        b'{"id":9,"text":"","start":0,"stop":0}],"templated_text":"Tell"}'
    )


@pytest.mark.parametrize(
    ("document", "body"),
    [
        (
            {"messages": [{"content": "x"}]},
            b"Failed to deserialize the JSON body into the target type: messages[0]: "
            b"Object missing required field `role`",
        ),
        (
            {"messages": "x"},
            b"Failed to deserialize the JSON body into the target type: messages: Expected `array`, got `str`",
        ),
    ],
)
def test_a_body_that_is_no_chat_is_refused(document: dict[str, Any], body: bytes) -> None:
    reply = info_reply("POST", "/chat_tokenize", document)
    assert (reply.status, reply.body) == (422, body)


def test_a_chat_that_the_template_refuses_says_so() -> None:
    with pytest.raises(InvalidChat) as refused:
        info_reply("POST", "/chat_tokenize", CHAT, rendered=InvalidChat("roles must alternate"))
    assert TGI.refuse(refused.value) == Reply(
        422, "application/json", b'{"error":"Template error: roles must alternate","error_type":"template_error"}'
    )


def test_the_error_of_a_chat_that_is_refused_is_freed_with_its_call() -> None:
    error = InvalidChat("roles must alternate")
    freed = when_freed(error)
    gc.disable()
    try:
        with contextlib.suppress(InvalidChat):
            info_reply("POST", "/chat_tokenize", CHAT, rendered=error)
        del error
        assert freed.is_set()
    finally:
        gc.enable()


MOST_BYTES = 1 << 19


@pytest.mark.parametrize("text", ["x" * (MOST_BYTES + 1), "日" * (MOST_BYTES // 3 + 1)])
def test_a_text_that_would_exhaust_memory_is_refused_by_its_field(text: str) -> None:
    for path, document, rendered in (
        ("/tokenize", {"inputs": text}, None),
        ("/chat_tokenize", CHAT, RenderedChat([5], text)),
    ):
        with pytest.raises(InvalidRequest) as refused:
            info_reply("POST", path, document, rendered=rendered)
        assert next(iter(document)) in refused.value.message
        assert str(MOST_BYTES) in refused.value.message


def test_many_tokens_are_joined_as_few_are() -> None:
    tokens = json.loads(info_reply("POST", "/tokenize", {"inputs": "Tell me " * 5000}).body)
    assert len(tokens) == 10_001
    assert tokens[-1] == {"id": 5, "text": "me", "start": 39_997, "stop": 39_999}
    few = json.loads(info_reply("POST", "/tokenize", {"inputs": "Tell me " * 2000}).body)
    assert few == tokens[:4001]
