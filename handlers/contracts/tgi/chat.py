"""Chat messages as TGI reads them, made into a prompt by the model's own template.

Source: contracts/tgi.md sections 1 and 5; TGI's router, `infer/chat_template.rs`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contracts.chat_template import NoChatTemplate, TemplateRefusal, render
from handlers.contracts.family import Texts
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.protocol import ContractError, Reply
from handlers.contracts.tgi.errors import DOES_NOT_FIT, JSON, error_document, unreadable


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Chat(msgspec.Struct, frozen=True):
    """What of a chat request makes the prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def templated(chat: Chat, texts: Texts) -> str:
    """The prompt; it ends where the model's turn begins, or goes on with the model's own last turn.

    Raises:
        ContractError: the model has no template, or the template does not take these messages.
    """
    messages = [msgspec.to_builtins(message) | {"content": _text(message.content)} for message in chat.messages]
    try:
        text = render(texts, messages, chat.tools)
    except NoChatTemplate:
        raise _template_error("template not found: this model has no chat template") from None
    except TemplateRefusal as error:
        raise _template_error(str(error)) from error
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (place := text.rfind(last["content"])) < 0:
        return text
    return text[: place + len(last["content"])].rstrip()


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Texts of all parts, joined; an image is a link, as TGI writes it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part, content))


def _part(part: dict[str, Any]) -> str:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    image = part.get("image_url")
    if part.get("type") == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        return f"![]({image['url']})"
    raise unreadable(
        DOES_NOT_FIT,
        "Failed to deserialize the JSON body into the target type: messages: a part of `content` must be of type "
        f"`text` or `image_url` and hold it, got {json_kind(part.get('type'))} as type",
    )


def _template_error(reason: str) -> ContractError:
    text = f"Template error: {reason}"
    return ContractError(Reply(422, JSON, error_document(text, "template_error").encode("utf-8", "replace")), text)
