"""TGI's routes /tokenize and /chat_tokenize. Source: TGI's router, `src/server.rs`."""

from __future__ import annotations

from json.encoder import encode_basestring as quote
from typing import Any

import msgspec

from engines.errors import InvalidRequest
from engines.loaded_model import ModelTexts
from handlers.axum import read_request, wrong_shape
from handlers.contract import JSON, Call, ContractError, Reply
from handlers.contract_routes import PLACED_BYTES, ModelView, check_body, check_text
from handlers.json_fields import json_kind
from handlers.tgi.errors import error_document
from handlers.tgi.request import TgiRequest
from handlers.token_rows import byte_positions, joined


def tokenize(call: Call, view: ModelView) -> Reply:
    """Return the tokens of `inputs`, with their positions in the text. `truncate` has no effect, as in TGI."""
    texts = view.text().texts
    check_body(call)
    request, _ = read_request(call, TgiRequest)
    tokens = _tokens(check_text("inputs", request.inputs, PLACED_BYTES), texts, special=True)
    return Reply(200, JSON, b"[%b]" % tokens)


def chat_tokenize(call: Call, view: ModelView) -> Reply:
    """Return the prompt that the chat template makes of a chat, and its tokens."""
    texts = view.text().texts
    check_body(call)
    chat, _ = read_request(call, ChatRequest)
    text = check_text("messages", _templated(chat, texts), PLACED_BYTES)
    tokens = _tokens(text, texts, special=False)
    return Reply(200, JSON, b'{"tokenize_response":[%b],"templated_text":%b}' % (tokens, quote(text).encode()))


def _tokens(text: str, texts: ModelTexts, *, special: bool) -> bytes:
    """Return the tokens as JSON objects.

    Args:
        text: The text.
        texts: The model's tokenizer.
        special: Add the special tokens that the model expects before and after a text.

    Raises:
        InvalidRequest: The tokenizer failed.
    """
    try:
        ids, positions = texts.places(text, special=special)
    except Exception as error:  # A tokenizer may raise any exception.
        raise InvalidRequest(f"tokenizer error {error}") from error
    if positions is None:  # The tokenizer is written in Python. TGI shows no positions then.
        return b",".join(b'{"id":%d,"text":"","start":0,"stop":0}' % token_id for token_id in ids)
    byte = byte_positions(text)
    parts = (
        f'{{"id":{ids[i]},"text":{quote(text[positions[i][0] : positions[i][1]])},"start":{byte[positions[i][0]]},'
        f'"stop":{byte[positions[i][1]]}}}'
        for i in range(len(ids))
    )
    return joined(parts)


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """The fields of a chat request that determine the prompt."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None


def _templated(chat: ChatRequest, texts: ModelTexts) -> str:
    """Return the prompt of a chat.

    If the last message is the model's, the prompt ends with that message.

    Raises:
        ContractError: The model has no chat template, or the template refuses the messages.
    """
    messages = [msgspec.to_builtins(message) | {"content": _text(message.content)} for message in chat.messages]
    if not texts.has_chat_template:
        raise _template_error("template not found: this model has no chat template")
    try:
        text = texts.chat(messages, chat.tools, True)
    except Exception as error:  # A template is code of the model and may raise any exception.
        raise _template_error(str(error) or type(error).__name__) from error
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (position := text.rfind(last["content"])) < 0:
        return text
    return text[: position + len(last["content"])].rstrip()


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the joined texts of all parts. An image becomes a Markdown link, as in TGI."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part, content))


def _part(part: dict[str, Any]) -> str:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        return f"![]({image['url']})"
    raise wrong_shape(
        "messages: a part of `content` must be of type `text` or `image_url` and hold it, "
        f"got {json_kind(part.get('type'))} as type"
    )


def _template_error(reason: str) -> ContractError:
    text = f"Template error: {reason}"
    return ContractError(Reply(422, JSON, error_document(text, "template_error").encode("utf-8", "replace")), text)
