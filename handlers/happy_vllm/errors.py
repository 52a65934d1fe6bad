"""happy_vllm's error bodies.

The original is a FastAPI application. It answers 422 with `{"detail": [...]}` if a field has the wrong type, and 500
for any other client error. Here all client errors have a 4xx status, and their body has `detail`. On the `/v2` routes,
errors in the body's content have vLLM's error object instead. Client errors are found before any text is generated.
Server errors with the status 500 have the body that happy_vllm sends if EXPLICIT_ERRORS is set.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from engines import errors
from handlers.contract import JSON, Reply
from handlers.route_declarations import error_body

# The status of each error. All other errors have the status 500.
_STATUS: dict[int, tuple[type[errors.RequestError], ...]] = {
    401: (errors.Unauthorized,),
    404: (errors.UnknownModel, errors.NotServed),
    408: (errors.BodyTimeout,),
    413: (errors.BodyTooLarge,),
    422: (errors.InvalidRequest,),
    503: (errors.NotReady, errors.Overloaded),
    504: (errors.DeadlineExceeded,),
}
_VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
_BYTE = re.compile(r" \(byte ([0-9]+)\)$")


def json_reply(body: dict[str, Any] | None, status: int = 200) -> Reply:
    """Return a reply with JSON as Starlette writes it: compact, in UTF-8."""
    return Reply(status, JSON, msgspec.json.encode(body))


class WrongBody(errors.InvalidRequest):
    """A body that is not an object, or lacks a field."""

    def __init__(self, message: str, kind: str, text: str, *location: str | int) -> None:
        super().__init__(message)
        self.entry = _entry(kind, text, *location)


def not_json(reason: str) -> WrongBody:
    """Return the refusal of a body that is not JSON.

    Args:
        reason: The decoder's message, which ends with the position.
    """
    place = _BYTE.search(reason)
    error = WrongBody("the body is not JSON", "json_invalid", "JSON decode error", int(place[1]) if place else 0)
    error.entry["ctx"] = {"error": _BYTE.sub("", reason)}
    return error


def refuse(error: errors.RequestError) -> Reply:
    """Return the reply to a call that has failed before the first byte of its reply."""
    status = _status_of(error)
    if status == 500:
        return json_reply({"error": type(error).__name__, "messages": [error.message]}, status)
    if isinstance(error, WrongBody):
        return json_reply({"detail": [error.entry]}, status)
    if isinstance(error, errors.InvalidParameter):
        return json_reply({"detail": [_entry("value_error", error.message, *error.parameter.split(".", 1))]}, status)
    return json_reply({"detail": error.message}, status)


def vllm_error(error: errors.RequestError) -> Reply:
    """Return the error reply of `/v2/tokenizer` and `/v2/decode`. The reply has vLLM's error object."""
    status, parameter = _status_of(error), None
    if status == 422:
        status = 400
    if isinstance(error, errors.InvalidParameter):
        parameter = error.parameter
    elif isinstance(error, errors.UnknownModel):
        parameter = "model"
    kind = _VLLM_TYPES.get(status, "InternalServerError")
    return Reply(status, JSON, error_body(error.message, kind, status, parameter))


def _status_of(error: errors.RequestError) -> int:
    return next((status for status, kinds in _STATUS.items() if isinstance(error, kinds)), 500)


def _entry(kind: str, message: str, *location: str | int) -> dict[str, Any]:
    """Return an error in Pydantic's format, but without `input`, which would repeat the client's text."""
    return {"type": kind, "loc": ["body", *location], "msg": message}
