"""TGI's error replies and error events. Source: TGI's router, `src/infer/mod.rs` and `src/server.rs`."""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines import errors
from handlers.contract import JSON, Reply
from handlers.parsing.axum import refuse_unread

EVENTS = "text/event-stream"
_IMAGE_FAULTS = {
    "fetch": "Could not fetch image",
    "base64": "base64 encoding is invalid",
    "content": "invalid image content",
}


def refuse(error: errors.RequestError) -> Reply:
    """Return the reply to an error if nothing was sent yet and the client did not ask for a stream."""
    if (reply := refuse_unread(error)) is not None:
        return reply
    status, kind, text = _status_kind_and_text(error)
    return Reply(status, JSON, error_document(text, kind).encode("utf-8", "replace"))


def refuse_stream(error: errors.RequestError, headers: tuple[tuple[str, str], ...]) -> Reply:
    """Return the reply to an error if the client asked for a stream: status 200 and an error event."""
    return Reply(200, EVENTS, error_event(error), headers)


def error_event(error: errors.RequestError) -> bytes:
    """Return the event that ends a stream with an error."""
    _, kind, text = _status_kind_and_text(error)
    return f"data:{error_document(text, kind)}\n\n".encode("utf-8", "replace")


def error_document(text: str, kind: str) -> str:
    """Return the JSON object of an error.

    Args:
        text: The message.
        kind: The value of `error_type`, by which clients choose their exception.
    """
    return f'{{"error":{quote(text)},"error_type":{quote(kind)}}}'


class IncompleteGeneration(errors.GenerationFailed):
    """A generation ended with a finish reason that TGI lacks, for example because it was aborted."""

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


INCOMPLETE_STREAM = b'data:{"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'


def _status_kind_and_text(error: errors.RequestError) -> tuple[int, str, str]:
    if isinstance(error, errors.InvalidChat):
        return 422, "template_error", f"Template error: {error.message}"
    if isinstance(error, errors.InvalidRequest):
        return 422, "validation", f"Input validation error: {_validation_message(error)}"
    if isinstance(error, errors.Overloaded):
        return 429, "overloaded", "Model is overloaded"
    if isinstance(error, errors.NotReady):
        return 503, "healthcheck", f"unhealthy: {error.message}"
    if isinstance(error, errors.UnknownModel | errors.NotServed):
        return 404, "not_found", error.message
    if isinstance(error, errors.DeadlineExceeded):
        # TGI's router has no such error. For this status, TGI's Python client raises its timeout error.
        return 504, "timeout", f"Request failed during generation: {error.message}"
    if isinstance(error, IncompleteGeneration):
        return 500, "incomplete_generation", error.message
    return 424, "generation", f"Request failed during generation: {error.message}"


def _validation_message(error: errors.InvalidRequest) -> str:
    if isinstance(error, errors.UnusableImage):
        return f"{_IMAGE_FAULTS[error.fault]}: {error.reason}"
    if isinstance(error, errors.PromptTooLong):
        return f"`inputs` must have less than {error.most + 1} tokens. Given: {error.prompt_tokens}"
    if not isinstance(error, errors.ContextExceeded):
        return error.message
    if error.new_tokens == 1:
        return f"`inputs` must have less than {error.context} tokens. Given: {error.prompt_tokens}"
    return (
        f"`inputs` tokens + `max_new_tokens` must be <= {error.context}. Given: {error.prompt_tokens} `inputs` tokens "
        f"and {error.new_tokens} `max_new_tokens`"
    )
