"""Converts the replies of vLLM's serving classes to LMI's form.

For chats, `handlers.lmi.chat_answers` writes the same bytes from the engine's deltas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec

from engines.request import DEADLINE
from handlers.contract import JSON, Reply, ReplyWriter
from handlers.djl_errors import FAILED_DEPENDENCY, front_end_reply, payload_error
from handlers.openai.answer import AnswerForm

DONE = b"[DONE]"
_EVENT = b"data: "
_OVERLOADED = 503  # vLLM's status for a full queue.


class Shape(Protocol):
    """Converts one reply of vLLM."""

    stream_type: str  # The content type of a stream.

    def refusal(self, reply: Reply) -> Reply:
        """Return the reply for an error object of vLLM."""

    def whole(self, reply: Reply) -> Reply:
        """Return the reply for a complete (non-streamed) answer from vLLM."""

    def event(self, data: bytes) -> bytes:
        """Return the bytes for an event of vLLM. `data` is a chunk, an error object, or `[DONE]`."""


class VllmError(msgspec.Struct):
    """The fields of an error object of vLLM."""

    message: str = ""
    code: int = 500


class _ErrorObject(msgspec.Struct):
    error: VllmError = msgspec.field(default_factory=VllmError)


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
    except (msgspec.DecodeError, UnicodeDecodeError):
        return VllmError()


def lmi_error(reply: Reply, status: int, overload_status: int) -> Reply:
    """Return the reply for an error object of vLLM.

    If the queue is full, the reply is an error of DJL Serving's front end. Otherwise it is a payload error.
    """
    message = error_of(reply.body).message
    if status == _OVERLOADED:
        return front_end_reply(overload_status, "WlmCapacityException", message)
    return Reply(status, JSON, payload_error(message, status))


class ShapedReply:
    """Implements `ReplyWriter`: passes vLLM's replies to another writer, in the form that `shape` gives them."""

    def __init__(self, writer: ReplyWriter, shape: Shape) -> None:
        self._writer, self._shape = writer, shape
        self._headers: tuple[tuple[str, str], ...] = ()
        self._status = 0
        self._started = self._ended = False

    def reply(self, reply: Reply) -> None:
        # A stream that vLLM sends as a single reply has only one token, or an early error.
        if reply.status == 200 and reply.content_type.startswith("text/event-stream"):
            self.start(reply.status, reply.content_type, reply.headers)
            self.end(reply.body)
        elif reply.status >= 400:
            self._ended = True
            self._writer.reply(self._shape.refusal(reply))
        else:
            self._whole(reply)

    def start(self, status: int, content_type: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Wait for the first event. If it is an error, the reply is not streamed."""
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        for event in events(data):
            self._event(event)

    def write_latest(self, part: Callable[[], bytes]) -> None:
        self.write(part())

    def end(self, data: bytes) -> None:
        self.write(data)
        if self._ended:
            return
        if not self._started:
            self._begin()
        self._ended = True
        self._writer.end(b"")

    async def drain(self) -> None:
        await self._writer.drain()

    def _event(self, event: bytes) -> None:
        if self._ended:
            return
        if not self._started and is_error(event):
            self._ended = True
            self._writer.reply(self._shape.refusal(Reply(error_of(event).code, JSON, event)))
            return
        if data := self._shape.event(event):
            if not self._started:
                self._begin()
            self._writer.write(data)

    def _whole(self, reply: Reply) -> None:
        self._writer.reply(self._shape.whole(reply))

    def _begin(self) -> None:
        self._started = True
        self._writer.start(self._status, self._shape.stream_type, self._headers)


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
_decode_answer = msgspec.json.Decoder(_Answer).decode


def reason_of_stop(stop_reason: int | str | None, stop_token_ids: Collection[int]) -> str:
    """Return LMI's finish reason for a text that ended at a stop string, at a stop token, or at the model's end token.

    Args:
        stop_reason: The stop string or the stop token.
        stop_token_ids: The stop tokens of the request. If vLLM reports another stop token, that is an end token of the
            model.
    """
    return "stop_sequence" if isinstance(stop_reason, str) or stop_reason in stop_token_ids else "eos_token"


class LmiChatShape:
    """The form of a chat's reply in LMI's rolling batch. An instance converts one reply."""

    def __init__(self, form: AnswerForm, stop_token_ids: Collection[int] = ()) -> None:
        """Create the shape.

        Args:
            form: The form of the errors and of the records.
            stop_token_ids: The stop tokens of the request.
        """
        self.stream_type, self.refusal = form.stream_type, form.refusal
        self._form, self._stop_token_ids = form, stop_token_ids
        self._chunk: dict[str, Any] = {}  # The fields that all records of the stream share.
        self._roles: dict[int, str] = {}

    def whole(self, reply: Reply) -> Reply:
        """Return vLLM's answer with LMI's fields."""
        answer = _decode_answer(reply.body)
        document = {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": _usage(answer.usage or _Usage()),
        }
        return Reply(reply.status, JSON, _json(document).encode(), reply.headers)

    def event(self, data: bytes) -> bytes:
        """Return LMI's bytes for an event of vLLM. `data` is a chunk, an error object, or `[DONE]`."""
        if data == DONE:
            return self._form.done.encode()
        if is_error(data):
            return self._error(error_of(data).message)
        chunk = _decode_answer(data)
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

        vLLM sends the role in a separate chunk. In LMI, it is the last key of `delta` in the first record of a choice.
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
            reason = reason_of_stop(choice.stop_reason, self._stop_token_ids)
        told = {"stop_reason": DEADLINE} if choice.stop_reason == DEADLINE and reason == "length" else {}
        return {"logprobs": choice.logprobs, "finish_reason": reason, **told}

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
        return (self._form.before + _json(document) + self._form.after).encode("utf-8", "replace")


def _usage(usage: _Usage) -> dict[str, int]:
    return msgspec.structs.asdict(usage) | {"completion_tokens": usage.completion_tokens or 0}
