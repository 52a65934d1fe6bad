"""TGI's routes /tokenize and /chat_tokenize. Source: TGI's router, `src/server.rs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json.encoder import encode_basestring as quote

import msgspec

from engines.errors import InvalidRequest
from engines.loaded_model import ModelTexts
from handlers.answers.token_rows import byte_positions, joined
from handlers.contract import JSON, Call, Reply
from handlers.parsing.axum import read_request
from handlers.route_declarations import PLACED_BYTES, ModelView, check_text
from handlers.tgi.request import TgiRequest


def tokenize(call: Call, view: ModelView) -> Reply:
    """Return the tokens of `inputs`, with their positions in the text. `truncate` has no effect, as in TGI."""
    texts = view.text().texts
    request, _ = read_request(call, TgiRequest)
    text = check_text("inputs", request.inputs, PLACED_BYTES)
    return Reply(200, JSON, b"[%b]" % _tokens(text, *_positions(text, texts, special=True)))


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: str


class ChatRequest(msgspec.Struct, frozen=True):
    """The required part of a chat."""

    messages: list[ChatMessage]


def chat(call: Call, view: ModelView) -> Call:
    """Check the body, and return the call as a call of `/v1/chat/completions`, which has the same fields."""
    view.text()
    read_request(call, ChatRequest)
    return replace(call, content_type=JSON)


def chat_tokenize(call: Call, view: ModelView) -> Reply:
    """Return the prompt of a chat, and the prompt's tokens."""
    texts, prompt = view.text().texts, view.chat()
    text = texts.decode(prompt.token_ids) if prompt.text is None else prompt.text
    ids, positions = _positions(check_text("messages", text, PLACED_BYTES), texts, special=False)
    if ids != prompt.token_ids:  # For example, tokens of images have no text.
        ids, positions = prompt.token_ids, None
    return Reply(
        200,
        JSON,
        b'{"tokenize_response":[%b],"templated_text":%b}' % (_tokens(text, ids, positions), quote(text).encode()),
    )


def _positions(text: str, texts: ModelTexts, *, special: bool) -> tuple[list[int], list[tuple[int, int]] | None]:
    """Return the token ids, and the character range of each token (None if the tokenizer does not supply ranges).

    Raises:
        InvalidRequest: The tokenizer failed.
    """
    try:
        return texts.places(text, special=special)
    except Exception as error:  # A tokenizer may raise any exception.
        raise InvalidRequest(f"tokenizer error {error}") from error


def _tokens(text: str, ids: Sequence[int], positions: Sequence[tuple[int, int]] | None) -> bytes:
    """Return tokens as JSON objects. As in TGI, their texts are empty if the tokenizer does not supply positions."""
    if positions is None:
        return b",".join(b'{"id":%d,"text":"","start":0,"stop":0}' % token_id for token_id in ids)
    byte = byte_positions(text)
    return joined(
        f'{{"id":{token_id},"text":{quote(text[start:stop])},"start":{byte[start]},"stop":{byte[stop]}}}'
        for token_id, (start, stop) in zip(ids, positions, strict=True)
    )
