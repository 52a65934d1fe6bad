"""TGI's error replies and error events. Source: TGI's router, `src/infer/mod.rs` and `src/server.rs`."""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines import errors
from handlers.contract import ContractError, Reply

JSON = "application/json"
EVENTS = "text/event-stream"
_TEXT = "text/plain; charset=utf-8"


def unreadable(status: int, explanation: str) -> ContractError:
    """Return the refusal of a body that is not a request; the reason is plain text, as from TGI's web framework."""
    return ContractError(Reply(status, _TEXT, explanation.encode("utf-8", "replace")), explanation)


def does_not_fit(reason: str) -> ContractError:
    """Return the refusal of a body that is JSON of another shape."""
    return unreadable(422, f"Failed to deserialize the JSON body into the target type: {reason}")


def refuse(error: errors.RequestError) -> Reply:
    """Return the reply to an error before the first byte of an answer that is not streamed."""
    if isinstance(error, errors.Unauthorized):
        return Reply(401, "", b"")
    if isinstance(error, errors.BodyTooLarge):
        return Reply(413, _TEXT, b"Failed to buffer the request body: length limit exceeded")
    if isinstance(error, errors.BodyTimeout):
        return Reply(408, _TEXT, f"Failed to buffer the request body: {error.message}".encode())
    status, kind, text = _meaning(error)
    return Reply(status, JSON, error_document(text, kind).encode("utf-8", "replace"))


def refuse_stream(error: errors.RequestError, headers: tuple[tuple[str, str], ...]) -> Reply:
    """Return the same for a stream: the status is 200, and the error an event."""
    return Reply(200, EVENTS, event(error), headers)


def event(error: errors.RequestError) -> bytes:
    """Return the event that ends a stream."""
    _, kind, text = _meaning(error)
    return f"data:{error_document(text, kind)}\n\n".encode("utf-8", "replace")


def error_document(text: str, kind: str) -> str:
    """Return an error's JSON object.

    Args:
        kind: The `error_type`, by which clients choose the exception.
    """
    return f'{{"error":{quote(text)},"error_type":{quote(kind)}}}'


class Incomplete(errors.GenerationFailed):
    """An answer that is not streamed was ended from outside."""

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


INCOMPLETE_STREAM = b'data:{"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'


def _meaning(error: errors.RequestError) -> tuple[int, str, str]:
    if isinstance(error, errors.InvalidRequest):
        return 422, "validation", f"Input validation error: {_what_is_wrong(error)}"
    if isinstance(error, errors.Overloaded):
        return 429, "overloaded", "Model is overloaded"
    if isinstance(error, errors.NotReady):
        return 503, "healthcheck", f"unhealthy: {error.message}"
    if isinstance(error, errors.UnknownModel | errors.NotServed):
        return 404, "not_found", error.message
    if isinstance(error, Incomplete):
        return 500, "incomplete_generation", error.message
    return 424, "generation", f"Request failed during generation: {error.message}"


def _what_is_wrong(error: errors.InvalidRequest) -> str:
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
