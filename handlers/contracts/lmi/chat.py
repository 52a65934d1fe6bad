"""vLLM's chat and completions as LMI answers them: its own chat objects, or vLLM's as lines of JSON.

Source: LMI, "Chat Completions API Schema" for the chat objects; djl_python, `async_utils.py` for the lines, which
`option.async_mode=true` selects.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from json.encoder import encode_basestring as quote
from typing import Any, Protocol

import msgspec

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, front_end_reply, payload_error
from handlers.contracts.protocol import Reply

DONE = b"[DONE]"
_EVENT = b"data: "
_OVERLOADED = 503
"""vLLM's status for a full queue."""


class Shape(Protocol):
    """The form of one answer that vLLM gives; used once."""

    stream_type: str
    """Content type of a stream."""

    def reply(self, reply: Reply) -> Reply:
        """Reshape a whole reply of vLLM's."""

    def event(self, data: bytes) -> bytes:
        """Reshape a server-sent event of vLLM's, given without its frame: a chunk, an error object, or `[DONE]`."""


class VllmError(msgspec.Struct):
    """The inside of vLLM's error object."""

    message: str = ""
    code: int = 500


class _ErrorObject(msgspec.Struct):
    error: VllmError = msgspec.field(default_factory=VllmError)


class _Message(msgspec.Struct):
    """A message, or what a chunk adds to it."""

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
    """A completion or a chunk of one."""

    id: str
    created: int
    choices: list[_Choice]
    usage: _Usage | None = None


_json = json.JSONEncoder(ensure_ascii=False).encode
_decode = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_ErrorObject).decode


def events(data: bytes) -> list[bytes]:
    """The events in a piece of a stream, without frames; comments, which keep a connection alive, are left out."""
    return [part.removeprefix(_EVENT) for part in data.split(b"\n\n") if part.startswith(_EVENT)]


def is_error(event: bytes) -> bool:
    """Whether an event is an error object rather than a chunk."""
    return event.startswith(b'{"error"')


def error_of(body: bytes) -> VllmError:
    """The error that an error object holds; an empty one if the body is not an error object."""
    try:
        return _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return VllmError()


class LmiChatShape:
    """Chat as LMI's rolling batch answers it.

    `sse`: a stream is server-sent events instead of lines. `stop_token_ids`: the request's own; vLLM reports further
    end tokens of the model as stop tokens, too.
    """

    def __init__(self, *, sse: bool = False, stop_token_ids: Collection[int] = (), overload_status: int = 503) -> None:
        self.stream_type = "text/event-stream" if sse else "application/jsonlines"
        self._sse = sse
        self._before, self._after = ("data: ", "\n\n") if sse else ("", "\n")
        self._stop_token_ids = stop_token_ids
        self._overload_status = overload_status
        self._head = ""
        self._roles: dict[int, str] = {}

    def reply(self, reply: Reply) -> Reply:
        """vLLM's reply in LMI's fields; 424 for whatever is wrong with the request, as in the rest of LMI."""
        if reply.status >= 400:
            status = FAILED_DEPENDENCY if reply.status < 500 else reply.status
            return _lmi_error(error_of(reply.body), status, self._overload_status)
        answer = _decode(reply.body)
        usage = answer.usage or _Usage()
        choices = ", ".join(self._choice(choice) for choice in answer.choices)
        text = (
            f'{{"id": {quote(answer.id)}, "object": "chat.completion", "created": {answer.created}, '
            f'"choices": [{choices}], "usage": {_usage(usage)}}}'
        )
        return Reply(reply.status, JSON, text.encode(), reply.headers)

    def event(self, data: bytes) -> bytes:
        if data == DONE:
            return b"data: [DONE]\n\n" if self._sse else b""
        if is_error(data):
            return self._error(error_of(data).message)
        chunk = _decode(data)
        if not self._head:
            self._head = (
                f'{self._before}{{"id": {quote(chunk.id)}, "object": "chat.completion.chunk", '
                f'"created": {chunk.created}, "choices": ['
            )
        if not chunk.choices:
            return self._record(f'], "usage": {_usage(chunk.usage)}}}') if chunk.usage else b""
        return b"".join([self._delta(choice) for choice in chunk.choices])

    def _choice(self, choice: _Choice) -> str:
        message = choice.message or _Message()
        parts = [f'"role": {quote(message.role or "assistant")}']
        if message.reasoning is not None:
            parts.append(f'"reasoning_content": {quote(message.reasoning)}')
        parts.append(f'"content": {_json(message.content)}')
        if message.tool_calls:
            parts.append(f'"tool_calls": {_json(message.tool_calls)}')
        return f'{{"index": {choice.index}, "message": {{{", ".join(parts)}}}, {self._ending(choice)}}}'

    def _delta(self, choice: _Choice) -> bytes:
        """vLLM sends the role in a chunk of its own; LMI together with the first text, after it."""
        delta = choice.delta or _Message()
        if delta.role is not None:
            self._roles[choice.index] = delta.role
        parts = []
        if delta.reasoning is not None:
            parts.append(f'"reasoning_content": {quote(delta.reasoning)}')
        if delta.tool_calls:
            parts.append(f'"tool_calls": {_json(delta.tool_calls)}')
        if delta.content or (choice.finish_reason is not None and not parts):
            parts.append(f'"content": {quote(delta.content or "")}')
        if not parts and choice.logprobs is None:
            return b""
        if (role := self._roles.pop(choice.index, None)) is not None:
            parts.append(f'"role": {quote(role)}')
        return self._record(f'{{"index": {choice.index}, "delta": {{{", ".join(parts)}}}, {self._ending(choice)}}}]}}')

    def _ending(self, choice: _Choice) -> str:
        logprobs = "null" if choice.logprobs is None else _json(choice.logprobs)
        reason = self._finish_reason(choice)
        return f'"logprobs": {logprobs}, "finish_reason": {"null" if reason is None else quote(reason)}'

    def _finish_reason(self, choice: _Choice) -> str | None:
        if choice.finish_reason != "stop":
            return choice.finish_reason
        own = isinstance(choice.stop_reason, str) or choice.stop_reason in self._stop_token_ids
        return "stop_sequence" if own else "eos_token"

    def _record(self, rest: str) -> bytes:
        return (self._head + rest + self._after).encode("utf-8", "replace")

    def _error(self, message: str) -> bytes:
        if not self._head:
            record = f'{self._before}{{"error": {quote(message)}, "code": {FAILED_DEPENDENCY}}}{self._after}'
            return record.encode("utf-8", "replace")
        choice = '{"index": 0, "delta": {"content": ""}, "logprobs": null, "finish_reason": "error"}'
        return self._record(f'{choice}], "error": {quote(message)}, "code": {FAILED_DEPENDENCY}}}')


def _usage(usage: _Usage) -> str:
    return (
        f'{{"prompt_tokens": {usage.prompt_tokens}, "completion_tokens": {usage.completion_tokens or 0}, '
        f'"total_tokens": {usage.total_tokens}}}'
    )


class AsyncShape:
    """Chat and completions of LMI's asynchronous handler: vLLM's documents as lines, and an empty line at the end."""

    stream_type = "application/jsonlines"

    def __init__(self, overload_status: int = 503) -> None:
        self._overload_status = overload_status

    def reply(self, reply: Reply) -> Reply:
        if reply.status >= 400:
            return _lmi_error(error_of(reply.body), reply.status, self._overload_status)
        return Reply(reply.status, reply.content_type, reply.body + b"\n", reply.headers)

    def event(self, data: bytes) -> bytes:
        return b"\n" if data == DONE else data + b"\n"


def _lmi_error(error: VllmError, status: int, overload_status: int) -> Reply:
    """vLLM's error in LMI's words: the front end's for a full queue, else that of a payload."""
    if status == _OVERLOADED:
        return front_end_reply(overload_status, "WlmCapacityException", error.message)
    return Reply(status, JSON, payload_error(error.message, status))
