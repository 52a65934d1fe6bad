"""The forms of errors on OpenAI's and Anthropic's routes, in whole replies and at the ends of streams."""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contract import Reply
from handlers.openai import anthropic
from handlers.openai.constraints import MESSAGES, RESPONSES


class ErrorForm:
    """vLLM's form. A failed stream ends with the error object and `[DONE]`."""

    def whole(self, reply: Reply) -> Reply:
        """Convert the reply with vLLM's error object to this form."""
        return reply

    def sent(self, data: bytes) -> None:
        """Record a part of the stream that was sent."""

    def last_events(self, reply: Reply) -> bytes:
        """Return the events that end the stream with the error of `reply`."""
        return b"data: " + reply.body + b"\n\ndata: [DONE]\n\n"


class MessagesErrors(ErrorForm):
    """Anthropic's form. A failed stream ends with the event `error`."""

    def whole(self, reply: Reply) -> Reply:
        return anthropic.error_reply(reply)

    def last_events(self, reply: Reply) -> bytes:
        return b"event: error\ndata: " + self.whole(reply).body + b"\n\n"


class ResponsesErrors(ErrorForm):
    """The form of OpenAI's Responses API. A failed stream ends with the events `error` and `response.failed`.

    Some clients know only one of the two events.
    """

    def __init__(self) -> None:
        self._first = self._last = b""  # The first event of the stream, and the last part that was sent.

    def sent(self, data: bytes) -> None:
        self._first = self._first or data.partition(b"\n\n")[0]
        self._last = data

    def last_events(self, reply: Reply) -> bytes:
        error = msgspec.json.decode(reply.body)["error"]
        code = {429: "rate_limit_exceeded", 503: "rate_limit_exceeded"}.get(
            reply.status, "invalid_prompt" if reply.status < 500 else "server_error"
        )
        number = _document(self._last).get("sequence_number", -1) + 1
        events: list[dict[str, Any]] = [
            {"type": "error", "code": code, "message": error["message"], "param": error["param"]}
        ]
        if (response := _document(self._first).get("response")) is not None:
            response |= {"status": "failed", "error": {"code": code, "message": error["message"]}}
            events.append({"type": "response.failed", "response": response})
        return b"".join([_event(event, number + place) for place, event in enumerate(events)])


def error_form(path: str) -> ErrorForm:
    """Return the form of errors for a call of this path."""
    if path.startswith(MESSAGES):
        return MessagesErrors()
    return ResponsesErrors() if path.startswith(RESPONSES) else ErrorForm()


def _document(event: bytes) -> dict[str, Any]:
    """Return the document of the last event in these bytes, or an empty document."""
    data = event.rpartition(b"\ndata: ")[2] or b"{}"
    document: dict[str, Any] = msgspec.json.decode(data)
    return document


def _event(document: dict[str, Any], number: int) -> bytes:
    data = msgspec.json.encode({**document, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), data)
