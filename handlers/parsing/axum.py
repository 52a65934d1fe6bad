"""Reads JSON bodies and answers with plain-text errors, like axum, the web framework of TGI and TEI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engines import errors
from handlers.contract import JSON, Call, ContractError, Reply, media_type
from handlers.parsing.json_fields import JsonError, decode_json

_TEXT = "text/plain; charset=utf-8"
_VALIDATION_PATH = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)

T = TypeVar("T")


def read_request(call: Call, shape: type[T]) -> tuple[T, dict[str, Any]]:
    """Decode a body.

    Returns:
        The body in two forms: an object of the class `shape`, and a JSON document.

    Raises:
        ContractError: The body is not JSON of this shape. The reply has axum's text.
    """
    kind = media_type(call.content_type)
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise unreadable_body(415, "Expected request with `Content-Type: application/json`")
    try:
        document = decode_json(call.body)
    except JsonError as error:
        raise unreadable_body(400, f"Failed to parse the request body as JSON: {error}") from None
    try:
        return msgspec.convert(document, shape), document
    except msgspec.ValidationError as error:
        message = str(error)
        if (match := _VALIDATION_PATH.fullmatch(message)) is not None:
            message = f"{match[2]}: {match[1]}" if match[2] else match[1]
        raise wrong_shape(message) from None


def notes_of_unknown(names: Sequence[str], *, strict: bool) -> tuple[str, ...]:
    """Return the log lines about the fields with these names, which have no effect.

    Raises:
        InvalidRequest: There are such fields, and option.strict_parameters is on.
    """
    if not names:
        return ()
    if strict:
        raise errors.InvalidRequest(f"`{names[0]}` is not known to this server (option.strict_parameters is on)")
    return (f"fields without effect: {', '.join(names)}",)


def unreadable_body(status: int, explanation: str) -> ContractError:
    """Return the error of a body that is not a request. The reply is plain text."""
    return ContractError(Reply(status, _TEXT, explanation.encode("utf-8", "replace")), explanation)


def wrong_shape(reason: str) -> ContractError:
    """Return the error of a JSON body with wrong fields or types."""
    return unreadable_body(422, f"Failed to deserialize the JSON body into the target type: {reason}")


def refuse_unread(error: errors.RequestError) -> Reply | None:
    """Return the reply to an error that occurs before the body is read, or None for any other error."""
    if isinstance(error, errors.Unauthorized):
        return Reply(401, "", b"")
    if isinstance(error, errors.BodyTooLarge):
        return Reply(413, _TEXT, b"Failed to buffer the request body: length limit exceeded")
    if isinstance(error, errors.BodyTimeout):
        return Reply(408, _TEXT, f"Failed to buffer the request body: {error.message}".encode())
    return None
