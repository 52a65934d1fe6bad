"""Converts vLLM's replies to chats and completions into LMI's form.

With option.async_mode=true, LMI sends vLLM's objects as lines of JSON. Otherwise it has other chat objects. Sources:
djl_python, `async_utils.py` for the lines; LMI, "Chat Completions API Schema" for the chat objects.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from handlers.contract import JSON, Reply
from handlers.djl_errors import FAILED_DEPENDENCY, front_end_reply, payload_error

DONE = b"[DONE]"
_EVENT = b"data: "
_OVERLOADED = 503  # vLLM's status for a full queue.


class VllmError(msgspec.Struct):
    """The fields of an error object of vLLM."""

    message: str = ""
    code: int = 500


class _ErrorObject(msgspec.Struct):
    error: VllmError = msgspec.field(default_factory=VllmError)


class _Message(msgspec.Struct):
    """A message, or the delta of a chunk."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int = 0


class _Answer(msgspec.Struct):
    id: str
    created: int
    choices: list[_Choice]
    usage: _Usage | None = None


_json = json.JSONEncoder(ensure_ascii=False).encode
_decode = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_ErrorObject).decode


def events(data: bytes) -> list[bytes]:
    """Return the data of the events in a part of a stream. Comments are left out."""
    return [part.removeprefix(_EVENT) for part in data.split(b"\n\n") if part.startswith(_EVENT)]


def is_error(event: bytes) -> bool:
    """Return True if an event is an error object rather than a chunk."""
    return event.startswith(b'{"error"')


def error_of(body: bytes) -> VllmError:
    """Return the error in an error object, or an empty error if the body is not an error object."""
    try:
        return _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return VllmError()


class LmiChatShape:
    """The form of a chat's reply in LMI's rolling batch. An object converts one reply."""

    def __init__(self, *, sse: bool = False, stop_token_ids: Collection[int] = (), overload_status: int = 503) -> None:
        """Create the form.

        Args:
            sse: A stream consists of server-sent events instead of lines.
            stop_token_ids: The stop tokens of the request. vLLM reports further end tokens of the model as stop tokens.
            overload_status: The status of a reply if the queue is full.
        """
        self.stream_type = "text/event-stream" if sse else "application/jsonlines"
        self._sse = sse
        self._before, self._after = ("data: ", "\n\n") if sse else ("", "\n")
        self._stop_token_ids = stop_token_ids
        self._overload_status = overload_status
        self._chunk: dict[str, Any] = {}  # The fields that all records of the stream have.
        self._roles: dict[int, str] = {}

    def reply(self, reply: Reply) -> Reply:
        """Return vLLM's reply with LMI's fields. Every fault of the request is 424, as in the rest of LMI."""
        if reply.status >= 400:
            status = FAILED_DEPENDENCY if reply.status < 500 else reply.status
            return _lmi_error(error_of(reply.body), status, self._overload_status)
        answer = _decode(reply.body)
        document = {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": _usage(answer.usage or _Usage()),
        }
        return Reply(reply.status, JSON, _json(document).encode(), reply.headers)

    def event(self, data: bytes) -> bytes:
        """Return LMI's bytes for the data of an event of vLLM: a chunk, an error object, or `[DONE]`."""
        if data == DONE:
            return b"data: [DONE]\n\n" if self._sse else b""
        if is_error(data):
            return self._error(error_of(data).message)
        chunk = _decode(data)
        if not self._chunk:
            self._chunk = {"id": chunk.id, "object": "chat.completion.chunk", "created": chunk.created}
        if not chunk.choices:
            return self._record([], usage=_usage(chunk.usage)) if chunk.usage else b""
        return b"".join([self._delta(choice) for choice in chunk.choices])

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        message = choice.message or _Message()
        shown: dict[str, Any] = {"role": message.role or "assistant"}
        if message.reasoning is not None:
            shown["reasoning_content"] = message.reasoning
        shown["content"] = message.content
        if message.tool_calls:
            shown["tool_calls"] = message.tool_calls
        return {"index": choice.index, "message": shown, **self._ending(choice)}

    def _delta(self, choice: _Choice) -> bytes:
        """Return the record of a chunk.

        vLLM sends the role in a separate chunk. LMI sends it with the first text, after the text.
        """
        delta = choice.delta or _Message()
        if delta.role is not None:
            self._roles[choice.index] = delta.role
        shown: dict[str, Any] = {}
        if delta.reasoning is not None:
            shown["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            shown["tool_calls"] = delta.tool_calls
        if delta.content or (choice.finish_reason is not None and not shown):
            shown["content"] = delta.content or ""
        if not shown and choice.logprobs is None:
            return b""
        if (role := self._roles.pop(choice.index, None)) is not None:
            shown["role"] = role
        return self._record([{"index": choice.index, "delta": shown, **self._ending(choice)}])

    def _ending(self, choice: _Choice) -> dict[str, Any]:
        reason = choice.finish_reason
        if reason == "stop":
            own = isinstance(choice.stop_reason, str) or choice.stop_reason in self._stop_token_ids
            reason = "stop_sequence" if own else "eos_token"
        return {"logprobs": choice.logprobs, "finish_reason": reason}

    def _record(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return self._line({**self._chunk, "choices": choices, **more})

    def _error(self, message: str) -> bytes:
        error = {"error": message, "code": FAILED_DEPENDENCY}
        if not self._chunk:
            return self._line(error)
        return self._record(
            [{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "error"}], **error
        )

    def _line(self, document: dict[str, Any]) -> bytes:
        return (self._before + _json(document) + self._after).encode("utf-8", "replace")


def _usage(usage: _Usage) -> dict[str, int]:
    return msgspec.structs.asdict(usage) | {"completion_tokens": usage.completion_tokens or 0}


class AsyncShape:
    """The form of a chat's or a completion's reply in LMI's asynchronous mode.

    Each object of vLLM is a line. A stream ends with an empty line.
    """

    stream_type = "application/jsonlines"

    def __init__(self, overload_status: int = 503, refusal_status: int | None = None) -> None:
        """Create the form.

        Args:
            overload_status: The status of a reply if the queue is full.
            refusal_status: The status of errors of the client. None keeps the status of vLLM.
        """
        self._overload_status, self._refusal_status = overload_status, refusal_status

    def reply(self, reply: Reply) -> Reply:
        if reply.status >= 400:
            status = self._refusal_status if self._refusal_status and reply.status < 500 else reply.status
            return _lmi_error(error_of(reply.body), status, self._overload_status)
        return Reply(reply.status, reply.content_type, reply.body + b"\n", reply.headers)

    def event(self, data: bytes) -> bytes:
        return b"\n" if data == DONE else data + b"\n"


Shape = LmiChatShape | AsyncShape


def _lmi_error(error: VllmError, status: int, overload_status: int) -> Reply:
    """Return vLLM's error in LMI's form.

    It is an error of DJL Serving's front end if the queue is full, otherwise a payload error.
    """
    if status == _OVERLOADED:
        return front_end_reply(overload_status, "WlmCapacityException", error.message)
    return Reply(status, JSON, payload_error(error.message, status))
