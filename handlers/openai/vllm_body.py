"""Translates bodies for vLLM's front end, and refuses bodies that would take the front end a long time to read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import LONG_BODY, Call
from handlers.openai.constraints import (
    BATCH,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    FIELDS,
    MESSAGES,
    RENDER,
    RESPONSES,
    TOKENIZE,
    enforceable,
    uses_tools,
)
from handlers.openai.current_call import OpenAICall
from handlers.parsing.json_fields import json_fault
from handlers.parsing.json_limits import JsonDecoder, JsonTooCostly, NotUtf8, check_limits
from handlers.route_declarations import MOST_BYTES, check_text

_CONVERSATIONS = frozenset({CHAT, BATCH, MESSAGES, COUNT_TOKENS, RESPONSES, RENDER})
# The maximum number of items, members, objects and arrays of a body with messages. vLLM's front end reads such a body
# on the event loop. Pydantic tries all types that a message may have, so each value takes 0.01 ms. An item of `input`
# takes 0.15 ms.
_MOST_VALUES, _MOST_VALUES_OF_RESPONSES = 40_000, 8_000

_LARGE = 16 * 1024  # Bytes. The inputs of larger bodies are counted.
_INPUTS = frozenset(
    ("input", "inputs", "texts", "images", "documents", "queries", "data_1", "data_2", "text_1", "text_2")
)
_TEXTS = _INPUTS | {"prompt", "query", "messages"}
_COUNTED = frozenset({TOKENIZE, DETOKENIZE, RENDER})  # The model's context does not limit the prompts of these paths.
_MEDIA = frozenset(("image_url", "audio_url", "video_url", "input_audio"))  # The fields of a part that hold media.
_TRUNCATE = "truncate_prompt_tokens"
_OF_PROMPTS = frozenset(("tools", "documents", "chat_template_kwargs"))  # Fields that a template reads.
_ID = re.compile(r"[\x21-\x7e]{1,128}")  # The id of a request, as in headers.

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_split = JsonDecoder(dict[str, msgspec.Raw]).decode_with_size
_decode_messages = JsonDecoder(list[dict[str, msgspec.Raw]]).decode


def for_vllm(
    call: Call, path: str, openai_call: OpenAICall, *, model: str | None = None, parses_tools: bool = False
) -> Call:
    """Translate a call for vLLM's serving classes.

    A body that is not JSON is returned unchanged, because vLLM refuses it.

    Constraints get the form in which vLLM enforces them. Null fields of a chat's messages are removed: TGI's Python
    client sends every field, and null counts as absent for TGI and Slipway's contracts. Null fields in a body of the
    Responses API are removed, because vLLM copies some of them into its answer, which cannot hold null. Fields without
    effect that vLLM would refuse, such as an empty `tools`, are removed too. If no header has a request id, the body's
    `request_id` is used.

    Args:
        call: The call.
        path: The path of OpenAI's API that the call is for.
        openai_call: The state of the call. This function records in it the form that the body demands for the text,
            whether the model may call tools, and whether the answer is a stream.
        model: Replaces the `model` of the body.
        parses_tools: True if the model has a tool-call parser.

    Raises:
        InvalidRequest: The body is not strict JSON but vLLM can read it, or reading the body would take too long.
        InvalidParameter: vLLM would not enforce one of the constraints.
    """
    try:
        document, size = _split(call.body) if call.fields is None else (call.fields, check_limits(call.body))
        given = {name: msgspec.json.decode(document[name]) for name in FIELDS.intersection(document)}
    except JsonTooCostly as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        if isinstance(error, NotUtf8) or _is_read_by_python(call.body):
            reason = error.reason if isinstance(error, NotUtf8) else json_fault(call.body, error)
            raise InvalidRequest(f"the body is not JSON in UTF-8 (RFC 8259): {reason}") from None
        return call
    openai_call.streams |= bytes(document.get("stream", b"null")) not in (b"null", b"false")
    if size is not None and (path in _CONVERSATIONS or "messages" in document):
        _check_values(size, path)
    if len(call.body) > _LARGE:
        try:
            _check_sizes(document, path, openai_call)
        except msgspec.DecodeError:
            return call  # vLLM refuses it.
    if len(call.body) >= LONG_BODY and bytes(document.get("messages", b"")).startswith(b'"'):
        raise InvalidParameter("messages", "must be an array, got a string")  # vLLM would iterate over characters
    changes: dict[str, Any] = {}
    if path == RESPONSES:
        changes = {name: None for name, value in document.items() if bytes(value) == b"null"}
        if b'"assistant"' in call.body:
            changes |= _with_read_messages(document)
    if model is not None:
        changes["model"] = model
    openai_call.uses_tools = uses_tools(given)
    if given := {name: value for name, value in given.items() if value is not None}:
        enforced, openai_call.form = enforceable(given, path, parses_tools=parses_tools)
        changes |= enforced
    if path in (CHAT, TOKENIZE, RENDER) and b"null" in call.body:
        changes |= _without_nulls(document)
    changes |= _without_idle(document, path)
    if path not in (MESSAGES, COUNT_TOKENS) and call.request_id.encode() not in call.headers.values():
        call = replace(call, request_id=_id_in(document) or call.request_id)
    if not changes:
        return call
    fields = {name: value for name, value in {**document, **changes}.items() if value is not None}
    return replace(call, body=msgspec.json.encode(fields), fields=None)


def _id_in(document: Mapping[str, msgspec.Raw]) -> str:
    """Return the `request_id` of a body. Empty if the body has none, or if vLLM refuses it.

    Raises:
        InvalidParameter: The id would not be safe in headers and logs.
    """
    if _first(document.get("request_id", b"")) != b'"':
        return ""
    request_id = msgspec.json.decode(document["request_id"], type=str)
    if request_id and not _ID.fullmatch(request_id):
        raise InvalidParameter("request_id", "must have 1 to 128 characters of visible ASCII")
    return request_id


def _without_idle(document: Mapping[str, msgspec.Raw], path: str) -> dict[str, None]:
    """Return the fields to remove, because they have no effect. Some clients send them with every request."""
    if path not in (CHAT, BATCH, COMPLETIONS, TOKENIZE, RENDER):
        return {}
    idle = [
        name for name, value in (("suffix", b'""'), ("request_id", b"null")) if bytes(document.get(name, b"")) == value
    ]
    if bytes(document.get("stream", b"null")) in (b"null", b"false"):
        idle.append("stream_options")
    tools = document.get("tools", b"null")
    if bytes(tools) == b"null" or (_first(tools) == b"[" and not _decode_items(tools)):
        idle.append("tools")
        if bytes(document.get("tool_choice", b"")) in (b'"auto"', b'"none"'):
            idle.append("tool_choice")
    return {name: None for name in idle if name in document}


def _with_read_messages(document: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return `input` with the assistant's messages in a form that vLLM reads completely.

    OpenAI's API does not require the `type` of messages, but vLLM does. vLLM reads only the first part of a message,
    and does not read refusals.
    """
    if _first(document.get("input", b"")) != b"[":
        return {}
    items = [
        msgspec.json.decode(item) if b'"assistant"' in bytes(item) else item
        for item in _decode_items(document["input"])
    ]
    for item in items:
        if isinstance(item, dict) and item.get("role") == "assistant" and item.get("type") in (None, "message"):
            item["type"], parts = "message", item.get("content")
            if isinstance(parts, list):
                given = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
                texts = [text for text in given if isinstance(text, str)]
                if len(texts) == len(parts):
                    item["content"] = [{"type": "output_text", "text": "\n".join(texts), "annotations": []}]
    return {"input": items}


def _check_values(size: int, path: str) -> None:
    """Raise InvalidRequest if a body with messages would make vLLM's front end block the event loop for a long time."""
    most = _MOST_VALUES_OF_RESPONSES if path == RESPONSES else _MOST_VALUES
    if size > most:
        raise InvalidRequest(
            f"the body has {size} items, members, objects and arrays; with messages, this route takes {most}"
        )


def _check_sizes(document: Mapping[str, msgspec.Raw], path: str, openai_call: OpenAICall) -> None:
    """Check the fields of a large body. Some fields can give vLLM more work than the model's context allows.

    Raises:
        InvalidParameter: A field is too large. The error names it.
    """
    for name in () if path in _CONVERSATIONS else _INPUTS.intersection(document):
        if (count := _count_inputs(document[name])) > openai_call.most_sequences:
            raise InvalidParameter(name, f"has {count} inputs; at most {openai_call.most_sequences} can be served")
    if path in _COUNTED and "messages" in document:
        size = sum(_size(document[name]) for name in _OF_PROMPTS.intersection(document))
        size += _size_of_messages(document["messages"])
        if size > MOST_BYTES:
            raise InvalidParameter("messages", f"may have at most {MOST_BYTES} bytes of text, got {size}")
    elif path in _COUNTED and _first(document.get("prompt", b"")) == b'"':
        check_text("prompt", msgspec.json.decode(document["prompt"], type=str))
    truncates = bytes(document.get(_TRUNCATE, b"null")) != b"null"
    if truncates and bytes(document.get("truncation_side", b"null")) == b"null":
        longest = max((_longest_text(document[name]) for name in _TEXTS.intersection(document)), default=0)
        if longest > MOST_BYTES:
            raise InvalidParameter(_TRUNCATE, f"needs `truncation_side` for a text of more than {MOST_BYTES} bytes")


def _size_of_messages(value: msgspec.Raw) -> int:
    """Return the number of bytes of messages, without images and other media."""
    size = 0
    for message in _decode_items(value) if _first(value) == b"[" else ():
        members = _decode_members(message) if _first(message) == b"{" else {"": message}
        content = members.pop("content", b"")
        size += sum(map(_size, members.values()))
        for part in _decode_items(content) if _first(content) == b"[" else [content]:
            within = _decode_members(part) if _first(part) == b"{" else {"": part}
            size += sum(_size(member) for name, member in within.items() if name not in _MEDIA)
    return size


def _size(value: msgspec.Raw | bytes) -> int:
    """Return the number of bytes of a JSON value. The escapes in a text are decoded first."""
    text = _first(value) == b'"'
    return len(msgspec.json.decode(value, type=str).encode()) if text else len(memoryview(value))


def _longest_text(value: msgspec.Raw) -> int:
    """Return the length in bytes of the longest text in a field: a string, an item, or the text of a message."""
    if _first(value) == b'"':
        return len(memoryview(value))
    if _first(value) == b"{":
        members = _decode_members(value)
        return max((_longest_text(members[name]) for name in ("content", "text") if name in members), default=0)
    return max(map(_longest_text, _decode_items(value)), default=0) if _first(value) == b"[" else 0


def _count_inputs(value: msgspec.Raw) -> int:
    """Return the number of prompts in a field. A text is one prompt, and an array of numbers is one prompt."""
    if _first(value) == b"{":
        content = _decode_members(value).get("content")
        return 1 if content is None else _count_inputs(content)
    if _first(value) != b"[":
        return 1
    items = _decode_items(value)
    return len(items) if items and _first(items[0]) in (b'"', b"[", b"{") else 1


def _first(value: msgspec.Raw | bytes) -> bytes:
    """Return the first character of a JSON value."""
    return bytes(memoryview(value)[:1])


def _is_read_by_python(body: bytes) -> bool:
    """Return True if vLLM can read a body that is not strict JSON in UTF-8.

    vLLM uses Python's `json`, which also accepts NaN, half surrogate pairs, a byte order mark, UTF-16 and UTF-32.
    """
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _without_nulls(document: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return `messages` without null fields. A null `content` stays, because a message with tool calls may have it."""
    try:
        messages = _decode_messages(bytes(document["messages"]))
    except (msgspec.DecodeError, KeyError):
        return {}
    kept = [
        {name: value for name, value in message.items() if name == "content" or bytes(value) != b"null"}
        for message in messages
    ]
    return {} if kept == messages else {"messages": kept}
