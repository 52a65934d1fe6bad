"""happy_vllm's error bodies.

The original is a FastAPI application: 422 with `{"detail": [...]}` where a field has the wrong type, and 500 for all
else that a client may get wrong. Here whatever is the client's is 4xx, found before any text is generated, in the same
form; a 500 is the server's, in the form that happy_vllm has under EXPLICIT_ERRORS.
Source: contracts/happy_vllm.md section 4.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from handlers.contracts.family import error_body
from handlers.contracts.protocol import Call, ContractError, Reply
from handlers.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidParameter,
    InvalidRequest,
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
    UnknownModel,
)

JSON = "application/json"
UNPROCESSABLE = 422
FAILED = 500

_STATUS: tuple[tuple[type[RequestError], int], ...] = (
    (InvalidRequest, UNPROCESSABLE),
    (UnknownModel, 404),
    (NotServed, 404),
    (BodyTooLarge, 413),
    (BodyTimeout, 408),
    (NotReady, 503),
    (Overloaded, 503),
)
_VLLM_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    408: "BadRequestError",
    413: "BadRequestError",
    503: "ServiceUnavailableError",
}
_BYTE = re.compile(r" \(byte ([0-9]+)\)$")


def status_of(error: RequestError) -> int:
    """The HTTP status for a call that has failed before its first byte."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), FAILED)


def refuse(error: RequestError) -> Reply:
    """The reply to a call that has failed before its first byte."""
    status = status_of(error)
    if status == FAILED:
        return _reply(status, {"error": type(error).__name__, "messages": [error.message]})
    if isinstance(error, InvalidParameter):
        return field_error(error.parameter, error.message)
    return _reply(status, {"detail": error.message})


def field_error(parameter: str, message: str, kind: str = "value_error") -> Reply:
    """FastAPI's body for a field with a wrong value; `parameter` is a path with dots, as in `guided_decoding.json`."""
    return _unprocessable(kind, message, *parameter.split(".", 1))


def missing(parameter: str) -> Reply:
    """A field that must be there."""
    return _unprocessable("missing", "Field required", parameter)


def conflict(message: str) -> Reply:
    """Fields that are right by themselves, but not together."""
    return _reply(UNPROCESSABLE, {"detail": message})


def no_body() -> Reply:
    """A body was expected."""
    return _unprocessable("missing", "Field required")


def not_an_object() -> Reply:
    """The body is JSON, but no object."""
    return _unprocessable("dict_type", "Input should be a valid dictionary")


def not_json(reason: str) -> Reply:
    """The body is no JSON; `reason` is what the parser says, with the place at its end."""
    place = _BYTE.search(reason)
    entry = _entry("json_invalid", "JSON decode error", int(place[1]) if place else 0)
    return _reply(UNPROCESSABLE, {"detail": [entry | {"ctx": {"error": _BYTE.sub("", reason)}}]})


def vllm_error(error: RequestError | ContractError) -> Reply:
    """The same in vLLM's error object, which `/v2/tokenizer` and `/v2/decode` have."""
    if isinstance(error, ContractError):
        status, message, parameter = 400, error.reason, None
    else:
        status, message = status_of(error), error.message
        parameter = error.parameter if isinstance(error, InvalidParameter) else None
        status = 400 if status == UNPROCESSABLE else status
    kind = "model" if isinstance(error, UnknownModel) else parameter
    return Reply(status, JSON, error_body(message, _VLLM_TYPES.get(status, "InternalServerError"), status, kind))


def wrong_method(call: Call) -> Reply:
    """The path is ours, but not with this method."""
    return _reply(405, {"detail": "Method Not Allowed"})


def refused(reply: Reply, reason: str) -> ContractError:
    """The call is answered with `reply` and without inference."""
    return ContractError(reply, reason)


def _unprocessable(kind: str, message: str, *location: str) -> Reply:
    return _reply(UNPROCESSABLE, {"detail": [_entry(kind, message, *location)]})


def _entry(kind: str, message: str, *location: str | int) -> dict[str, Any]:
    """Pydantic's, but for `input`: an error does not send back what it was sent."""
    return {"type": kind, "loc": ["body", *location], "msg": message}


def _reply(status: int, body: dict[str, Any]) -> Reply:
    return Reply(status, JSON, msgspec.json.encode(body))
