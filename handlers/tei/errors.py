"""TEI's error replies. Source: TEI's router 1.9, `src/lib.rs` and `src/http/server.rs`."""

from __future__ import annotations

from json.encoder import encode_basestring as quote
from typing import Literal

from engines import errors
from handlers.contract import JSON, Reply
from handlers.parsing.axum import refuse_unread

Kind = Literal["Empty", "Validation", "Tokenizer", "Backend", "Overloaded", "Unhealthy"]

_STATUS: dict[Kind, int] = {
    "Empty": 400,
    "Validation": 422,
    "Tokenizer": 422,
    "Backend": 424,
    "Overloaded": 429,
    "Unhealthy": 503,
}
_INVALID = "Input validation error: "


class TeiRefusal(errors.InvalidRequest):
    """A refusal with one of TEI's own messages. The message gets no prefix."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WrongKind(errors.NotServed):
    """The route does not support this kind of model."""


def empty(name: str, *, prefixed: bool = True) -> TeiRefusal:
    """Return the error of an empty text or list. TEI's message has a prefix in some places."""
    return TeiRefusal("Empty", f"{_INVALID if prefixed else ''}`{name}` cannot be empty")


def error_reply(kind: Kind, message: str, status: int | None = None) -> Reply:
    """Return a reply with an error object. If `status` is None, the reply has the kind's status."""
    body = f'{{"error":{quote(message)},"error_type":"{kind}"}}'
    return Reply(status or _STATUS[kind], JSON, body.encode("utf-8", "replace"))


def refuse(error: errors.RequestError) -> Reply:
    """Return the reply to an error."""
    if (reply := refuse_unread(error)) is not None:
        return reply
    match error:
        case TeiRefusal():
            return error_reply(error.kind, error.message)
        case errors.ContextExceeded():
            return error_reply("Validation", _too_long(error.context, error.prompt_tokens))
        case errors.PromptTooLong():
            return error_reply("Validation", _too_long(error.most, error.prompt_tokens))
        case errors.InvalidRequest():
            return error_reply("Validation", _INVALID + error.message)
        case errors.Overloaded():
            return error_reply("Overloaded", "Model is overloaded")
        case errors.NotReady():
            return error_reply("Unhealthy", f"unhealthy: {error.message}")
        case errors.UnknownModel():
            return error_reply("Validation", error.message, 404)
        case _:
            return error_reply("Backend", f"Backend error: {error.message}")


def _too_long(most: int, given: int) -> str:
    return f"{_INVALID}`inputs` must have less than {most} tokens. Given: {given}"
