"""TGI's routes that generate nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.errors import InvalidRequest, NotReady
from handlers.contract import Reply
from tests.contracts.tgi_exchange import FakeTokenizer, tell, view


@pytest.mark.parametrize("path", ["/", "/health"])
def test_health_is_200_without_a_body_or_503_with_an_error(path: str) -> None:
    assert tell("GET", path) == Reply(200, "", b"")
    for state in ("starting", "failed", "draining", "stopped"):
        assert tell("GET", path, model=view(state)) == Reply(  # type: ignore[arg-type]
            503, "application/json", b'{"error":"unhealthy","error_type":"healthcheck"}'
        )


def test_info_tells_model_and_limits() -> None:
    assert tell("GET", "/info") == Reply(
        200,
        "application/json",
        b'{"model_id":"org/model","model_sha":"abc","model_pipeline_tag":"text-generation",'
        b'"max_concurrent_requests":256,"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":2047,'
        b'"max_total_tokens":2048,"validation_workers":2,"max_client_batch_size":4,"router":"slipway",'
        b'"version":"3.3.6","sha":null,"docker_label":null}',
    )


@pytest.mark.parametrize(("method", "path"), [("GET", "/info"), ("POST", "/tokenize"), ("POST", "/chat_tokenize")])
def test_what_needs_the_model_says_so_while_it_loads(method: str, path: str) -> None:
    with pytest.raises(NotReady):
        tell(method, path, {"inputs": "x", "messages": []}, view("starting", loaded=False))


def test_tokenize_gives_ids_texts_and_places_in_bytes_with_special_tokens_empty() -> None:
    assert tell("POST", "/tokenize", {"inputs": "日本 Tell"}).body == (
        '[{"id":1,"text":"","start":0,"stop":0},{"id":6,"text":"日本","start":0,"stop":6},'
        '{"id":4,"text":"Tell","start":7,"stop":11}]'.encode()
    )


def test_tokenize_keeps_the_last_tokens_where_it_is_to_truncate() -> None:
    document = {"inputs": "Tell me", "parameters": {"truncate": 1}}
    assert tell("POST", "/tokenize", document).body == b'[{"id":5,"text":"me","start":5,"stop":7}]'


def test_tokenize_shows_no_places_where_the_tokenizer_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = view()
    texts = model.text().texts
    monkeypatch.setattr(texts, "places", lambda text, special: ([4, 5], None))
    assert tell("POST", "/tokenize", {"inputs": "Tell me"}, model).body == (
        b'[{"id":4,"text":"","start":0,"stop":0},{"id":5,"text":"","start":0,"stop":0}]'
    )


def test_chat_tokenize_shows_the_prompt_and_its_tokens() -> None:
    parts = [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me"}]
    for content in ("Tell me", parts):
        reply = tell("POST", "/chat_tokenize", {"messages": [{"role": "user", "content": content}]})
        assert reply.body == (
            b'{"tokenize_response":[{"id":7,"text":"user","start":0,"stop":4},{"id":8,"text":":","start":5,"stop":6},'
            b'{"id":4,"text":"Tell","start":7,"stop":11},{"id":5,"text":"me","start":12,"stop":14},'
            b'{"id":0,"text":"assistant","start":15,"stop":24},{"id":8,"text":":","start":25,"stop":26}],'
            b'"templated_text":"user : Tell me assistant :"}'
        )


def test_a_chat_that_ends_with_the_models_turn_is_continued() -> None:
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": "me"}]
    body = tell("POST", "/chat_tokenize", {"messages": messages}).body
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
    reply = tell("POST", "/chat_tokenize", document)
    assert (reply.status, reply.body) == (status, body)


def test_a_model_without_a_template_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    reply = tell("POST", "/chat_tokenize", {"messages": [{"role": "user", "content": "x"}]})
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
        tell("POST", path, document)
    assert refused.value.message == message


def test_many_tokens_are_joined_as_few_are() -> None:
    tokens = json.loads(tell("POST", "/tokenize", {"inputs": "Tell me " * 5000}).body)
    assert len(tokens) == 10_001
    assert tokens[-1] == {"id": 5, "text": "me", "start": 39_997, "stop": 39_999}
    few = {"inputs": "Tell me " * 5000, "parameters": {"truncate": 4096}}
    assert json.loads(tell("POST", "/tokenize", few).body) == tokens[-4096:]
