"""A conversation as one prompt, by the model's own chat template, for `/v2/tokenizer`."""

from __future__ import annotations

from typing import Any

from handlers.contracts.chat_template import NoChatTemplate, TemplateRefusal, render
from handlers.contracts.family import Texts
from handlers.contracts.json_kinds import json_kind
from handlers.errors import InvalidParameter, InvalidRequest


def chat_prompt(texts: Texts, messages: Any, add_generation_prompt: bool) -> str:
    """The prompt that the template makes of the messages.

    Raises:
        InvalidRequest: there is no template, or the messages do not suit it.
    """
    conversation = _conversation(messages)
    try:
        return render(texts, conversation, add_generation_prompt=add_generation_prompt)
    except NoChatTemplate:
        raise InvalidRequest("this model has no chat template; send `prompt` instead of `messages`") from None
    except TemplateRefusal as error:
        raise InvalidRequest(f"the model's chat template does not take these messages: {error}") from None


def _conversation(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", "must be an array of at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages.{index}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidParameter(where, "must be an object with a string `role`")
    return {**message, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: Any) -> str:
    """Text, or OpenAI's list of parts, of which vLLM joins the texts by line feeds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(where, f"must be a string or an array of text parts, got {json_kind(content)}")
    return "\n".join(_part(where, part) for part in content)


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidParameter(where, "must be a string or an array of text parts; this route tokenizes text alone")
