"""Chats whose messages say null for what they do not have.

TGI's Python client sends every field of a message, and TGI takes null for absent, as our contracts do; vLLM does not.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from handlers.contracts.openai.family import error_reply
from handlers.contracts.protocol import LONG_BODY, Call, Reply

_CHAT_ROUTE = frozenset({"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"})
_MARKS = (b"{", b"[", b",")
"""What is between the parts of a document. Texts have them too, one to a token at most, but for a few odd ones."""
_MARKS_PER_TOKEN, _FURTHER_MARKS = 4, 10_000
_MARKS_OF_PROMPTS = 2_000_000
"""Token ids of many prompts; these cost a tenth of what messages do."""


def hopeless(body: bytes, path: str, max_model_len: int) -> Reply | None:
    """The reply to a body of more parts than could fit into the model's context; None for all others."""
    if len(body) < LONG_BODY:
        return None
    limit = _MARKS_PER_TOKEN * max_model_len + _FURTHER_MARKS
    if path not in _CHAT_ROUTE:
        limit = max(limit, _MARKS_OF_PROMPTS)
    if sum(map(body.count, _MARKS)) <= limit:
        return None
    return error_reply(
        f"the body has more parts than the model's context of {max_model_len} tokens can hold", "BadRequestError", 400
    )


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_model(call: Call, name: str) -> Call:
    """The call with another `model`; what is no JSON object is left to vLLM to refuse."""
    try:
        document = _decode_object(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return call
    document["model"] = msgspec.Raw(msgspec.json.encode(name))
    return replace(call, body=msgspec.json.encode(document))


_CHAT = "/v1/chat/completions"
_MESSAGES, _NULL, _CONTENT = "messages", b"null", "content"

_Raw = msgspec.Raw
_decode = msgspec.json.Decoder(dict[str, _Raw]).decode
_decode_messages = msgspec.json.Decoder(list[dict[str, _Raw]]).decode


def without_nulls(call: Call, path: str) -> Call:
    """The call without the null fields of its messages. A null `content` stays: a message with tool calls may have it.

    What is no chat, or has no null, is the same call; what cannot be read is left to vLLM to refuse.
    """
    if path != _CHAT or _NULL not in call.body:
        return call
    try:
        document = _decode(call.body)
        messages = _decode_messages(document[_MESSAGES])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return call
    kept = [{name: value for name, value in message.items() if _stays(name, value)} for message in messages]
    if kept == messages:
        return call
    document[_MESSAGES] = _Raw(msgspec.json.encode(kept))
    return replace(call, body=msgspec.json.encode(document))


def _stays(name: str, value: msgspec.Raw) -> bool:
    return name == _CONTENT or bytes(value) != _NULL
