"""TGI's routes that generate nothing: /health, /info, /tokenize and /chat_tokenize.

Source: TGI's router, `src/server.rs`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice
from json.encoder import encode_basestring as quote
from typing import Any

import msgspec

from engines.errors import InvalidRequest
from engines.loaded_model import ModelTexts
from handlers.contract import Call, ContractError, Reply
from handlers.contract_routes import PLACED_BYTES, ModelView, check_body, check_text
from handlers.json_fields import json_kind
from handlers.tgi.errors import JSON, does_not_fit, error_document
from handlers.tgi.request import Body, max_input_tokens, read

TGI_VERSION = "3.3.6"  # The release whose contract this is; clients derive their limits from it.
# TGI's defaults, which clients look for in /info; Slipway has no separate limit on the size of a batch.
_MAX_CLIENT_BATCH_SIZE, _VALIDATION_WORKERS = 4, 2
_BLOCK = 4096  # Tokens that are encoded together.
_UNHEALTHY = Reply(503, JSON, error_document("unhealthy", "healthcheck").encode())


def health(_: Call, views: Sequence[ModelView]) -> Reply:
    """200 without a body if all models can serve."""
    return Reply(200, "", b"") if all(view.state == "ready" for view in views) else _UNHEALTHY


def info(_: Call, view: ModelView) -> Reply:
    """Return the model and its limits."""
    model = view.text()
    info: dict[str, Any] = {
        "model_id": view.settings.model_id,
        "model_sha": view.settings.revision,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": view.max_requests,
        "max_best_of": view.settings.max_best_of,
        "max_stop_sequences": view.settings.max_stop_sequences,
        "max_input_tokens": max_input_tokens(model, view.settings),
        "max_total_tokens": model.max_model_len,
        "validation_workers": _VALIDATION_WORKERS,
        "max_client_batch_size": _MAX_CLIENT_BATCH_SIZE,
        "router": "slipway",
        "version": TGI_VERSION,
        "sha": None,
        "docker_label": None,
    }
    return Reply(200, JSON, msgspec.json.encode(info))


def tokenize(call: Call, view: ModelView) -> Reply:
    """Return the tokens of `inputs` with their places; only the last `truncate` of them."""
    texts = view.text().texts
    check_body(call)
    body, _ = read(call, Body)
    truncate = body.parameters.truncate if body.parameters is not None else None
    tokens = _tokens(check_text("inputs", body.inputs, PLACED_BYTES), texts, special=True, truncate=truncate)
    return Reply(200, JSON, b"[%b]" % tokens)


def chat_tokenize(call: Call, view: ModelView) -> Reply:
    """Return the prompt that a chat becomes, and its tokens."""
    texts = view.text().texts
    check_body(call)
    chat, _ = read(call, Chat)
    text = check_text("messages", templated(chat, texts), PLACED_BYTES)
    tokens = _tokens(text, texts, special=False)
    return Reply(200, JSON, b'{"tokenize_response":[%b],"templated_text":%b}' % (tokens, quote(text).encode()))


def _tokens(text: str, texts: ModelTexts, *, special: bool, truncate: int | None = None) -> bytes:
    """Return the last `truncate` tokens as JSON objects.

    Args:
        special: With those that the model wants around a text.
    """
    try:
        ids, places = texts.places(text, special=special)
    except Exception as error:  # a tokenizer may raise anything
        raise InvalidRequest(f"tokenizer error {error}") from error
    first = 0 if truncate is None else max(len(ids) - truncate, 0)
    if places is None:  # a tokenizer written in Python; TGI shows no places then
        return b",".join(b'{"id":%d,"text":"","start":0,"stop":0}' % token_id for token_id in ids[first:])
    byte = _byte_places(text)
    parts = (
        f'{{"id":{ids[i]},"text":{quote(text[places[i][0] : places[i][1]])},"start":{byte[places[i][0]]},'
        f'"stop":{byte[places[i][1]]}}}'
        for i in range(first, len(ids))
    )
    # In blocks: separate strings for a million tokens would take a hundred megabytes.
    return b",".join(",".join(block).encode() for block in iter(lambda: list(islice(parts, _BLOCK)), []))


def _byte_places(text: str) -> Sequence[int]:
    """Return the byte in the text's UTF-8 at which each character begins, and the one at which the last ends."""
    if text.isascii():
        return range(len(text) + 1)
    return array("L", accumulate((len(character.encode()) for character in text), initial=0))


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Chat(msgspec.Struct, frozen=True):
    """The fields of a chat request that make the prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def templated(chat: Chat, texts: ModelTexts) -> str:
    """Return the prompt of a chat; it ends before the model's turn, or with the model's last turn.

    Raises ContractError: the model has no template, or the template does not take these messages.
    """
    messages = [msgspec.to_builtins(message) | {"content": _text(message.content)} for message in chat.messages]
    if not texts.has_chat_template:
        raise _template_error("template not found: this model has no chat template")
    try:
        text = texts.chat(messages, chat.tools, True)
    except Exception as error:  # a template is the model's own code, and may raise anything
        raise _template_error(str(error) or type(error).__name__) from error
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (place := text.rfind(last["content"])) < 0:
        return text
    return text[: place + len(last["content"])].rstrip()


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the texts of all parts, joined; an image becomes a link, as in TGI."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part, content))


def _part(part: dict[str, Any]) -> str:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        return f"![]({image['url']})"
    raise does_not_fit(
        "messages: a part of `content` must be of type `text` or `image_url` and hold it, "
        f"got {json_kind(part.get('type'))} as type"
    )


def _template_error(reason: str) -> ContractError:
    text = f"Template error: {reason}"
    return ContractError(Reply(422, JSON, error_document(text, "template_error").encode("utf-8", "replace")), text)
