"""Triton's error bodies and statuses: `{"error": "<message>"}`.

Source: Triton 2.68, "Generate Extension", "Generate Response JSON Error Object". Messages are Triton's own, because
clients search them for known texts. An invalid request always gets the status 400, as this document says, even if
Triton itself answers 500.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring as quote

from engines import errors
from handlers.contract import JSON, Reply
from handlers.model_config import ModelConfig

VERSION = "1"  # The only version of a model.
# The status of each error. All other errors have the status 500.
_STATUS: dict[int, tuple[type[errors.RequestError], ...]] = {
    400: (errors.InvalidRequest, errors.BodyTooLarge),
    401: (errors.Unauthorized,),
    404: (errors.UnknownModel,),
    408: (errors.BodyTimeout,),
    501: (errors.NotServed,),
    503: (errors.Overloaded, errors.NotReady, errors.DeadlineExceeded),
}
_LARGEST_VERSION = 2**63 - 1
_MOST_NAMES = 100  # The maximum number of adapter names in a message.


class TritonRefusal(errors.InvalidRequest):
    """A refusal whose message gets no prefix. See `message_of`."""


class SeveralResponses(TritonRefusal):
    """A call of `/generate` with `stream` true has several responses. `/generate` can send only one."""

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


def error_reply(status: int, message: str) -> Reply:
    """Return the reply with an error object."""
    return Reply(status, JSON, error_object(message).encode("utf-8", "replace"))


def error_object(message: str) -> str:
    """Return the error object of a reply or a stream."""
    return f'{{"error":{quote(message)}}}'


def message_of(error: errors.RequestError) -> str:
    """Return the message for the client. Errors that Triton's vLLM backend reports get the backend's prefix."""
    if isinstance(error, errors.UnknownModel):
        return unknown_model(error.name)
    if isinstance(error, errors.UnknownAdapter):
        known = sorted(error.registered)[:_MOST_NAMES]
        return f"LoRA {error.name[: errors.SHOWN]} is not supported, we currently support {known}"
    if isinstance(error, errors.UnusableImage):
        return f"Error generating stream: `image` {error.reason}"
    if isinstance(error, errors.DeadlineExceeded):  # like Triton's scheduler
        return f"Request timeout expired: {error.message}"
    if isinstance(error, errors.InvalidRequest | errors.GenerationFailed) and not isinstance(error, TritonRefusal):
        return f"Error generating stream: {error.message}"
    return error.message


def refusal(error: errors.RequestError) -> Reply:
    """Return the reply to a call that ends with an error before anything was sent."""
    status = next((status for status, kinds in _STATUS.items() if isinstance(error, kinds)), 500)
    return error_reply(status, message_of(error))


def unknown_model(name: str, version: str | None = None) -> str:
    """Return Triton's message for a model or a version that is not served."""
    which = "" if version is None else f" version {version}"
    return f"Request for unknown model: '{name[: errors.SHOWN]}'{which} is not found"


def missing_model(names: Mapping[str, str], config: ModelConfig) -> Reply | None:
    """Return the error for a path, or None if the path names the served model and version."""
    name, version = names["model"], names.get("version")
    if name != config.name:
        return error_reply(404, unknown_model(name))
    if version is None or version.lstrip("0") == VERSION:
        return None
    number = version.lstrip("0") or "0"
    if len(number) > len(str(_LARGEST_VERSION)) or int(number) > _LARGEST_VERSION:
        return error_reply(400, "failed to get model version from specified version string")
    return error_reply(404, unknown_model(name, number))
