"""Triton's error bodies and statuses: `{"error": "<message>"}`.

Source: Triton generate 2.68, "Generate Response JSON Error Object"; contracts/triton_generate.md section 8. Messages
are Triton's, so that a client which looks for them finds them. What the client got wrong is always 400, as the
specification says, also where Triton itself answers 500.
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from handlers.contracts.protocol import ContractError, Reply
from handlers.errors import (
    BodyTimeout,
    BodyTooLarge,
    GenerationFailed,
    InvalidRequest,
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
    UnknownModel,
)

JSON = "application/json"
VERSION = "1"
"""The only version of the model that is served."""
_LARGEST_VERSION = 2**63 - 1
_LONGEST_NAME = 200


class TritonRefusal(ContractError):
    """A call that is answered without inference."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(error_reply(status, message), message)


class SeveralResponses(InvalidRequest):
    """`/generate`, which has room for one response, with `stream` true and a model that has more of them."""

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


def error_reply(status: int, message: str) -> Reply:
    """An error as Triton writes it."""
    return Reply(status, JSON, error_object(message).encode("utf-8", "replace"))


def error_object(message: str) -> str:
    """The object alone, as it stands in a stream."""
    return f'{{"error":{quote(message)}}}'


def status_of(error: RequestError) -> int:
    """Triton's status for each kind of error: not found, unavailable, unsupported, internal, and all else 400."""
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, Overloaded | NotReady):
        return 503
    if isinstance(error, NotServed):
        return 501
    if isinstance(error, BodyTimeout):
        return 408
    return 400 if isinstance(error, InvalidRequest | BodyTooLarge) else 500


def message_of(error: RequestError) -> str:
    """What the client reads; what the model refuses or fails at has the words of Triton's vLLM backend before it."""
    if isinstance(error, UnknownModel):
        return unknown_model(error.name)
    if isinstance(error, InvalidRequest | GenerationFailed) and not isinstance(error, SeveralResponses):
        return f"Error generating stream: {error.message}"
    return error.message


def refusal(error: RequestError) -> Reply:
    """The reply to a call that ends with `error` before anything was sent."""
    return error_reply(status_of(error), message_of(error))


def unknown_model(name: str, version: str | None = None) -> str:
    """Triton's message for a model, or a version of it, that is not served."""
    which = "" if version is None else f" version {version}"
    return f"Request for unknown model: '{name[:_LONGEST_NAME]}'{which} is not found"


def missing_model(served: str, name: str, version: str | None) -> Reply | None:
    """The reply to a path that names another model or version than the one served; None if it is that one.

    `version`: digits, as they stand in the path.
    """
    if name != served:
        return error_reply(404, unknown_model(name))
    if version is None or version.lstrip("0") == VERSION:
        return None
    number = version.lstrip("0") or "0"
    if len(number) > len(str(_LARGEST_VERSION)) or int(number) > _LARGEST_VERSION:
        return error_reply(400, "failed to get model version from specified version string")
    return error_reply(404, unknown_model(name, number))
