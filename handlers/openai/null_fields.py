"""Chats whose messages say null for what they do not have.

TGI's Python client sends every field of a message, and TGI takes null for absent, as our contracts do; vLLM does not.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from handlers.contracts.protocol import Call

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
