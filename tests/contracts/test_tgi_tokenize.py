"""Limits of TGI's routes /tokenize and /chat_tokenize. `requests/tgi.yaml` and `cases/tgi` have the bytes of their
requests and replies.
"""

from __future__ import annotations

import contextlib
import gc
import json

import pytest

from engines.errors import InvalidChat, InvalidRequest
from handlers.route_declarations import RenderedChat
from tests.contracts.exchange import view
from tests.contracts.tgi_exchange import FakeModel, info_reply
from tests.freed import when_freed


def test_tokenize_shows_no_places_where_the_tokenizer_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = view(loaded=FakeModel())
    texts = model.text().texts
    monkeypatch.setattr(texts, "places", lambda text, special: ([4, 5], None))
    assert info_reply("POST", "/tokenize", {"inputs": "Tell me"}, model).body == (
        b'[{"id":4,"text":"","start":0,"stop":0},{"id":5,"text":"","start":0,"stop":0}]'
    )


CHAT = {"messages": [{"role": "user", "content": "Tell me"}]}


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
