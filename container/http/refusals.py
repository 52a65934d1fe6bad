"""Replies to requests that the server refuses, in the form of DJL Serving's front end."""

from __future__ import annotations

from container.http.reply import Headers
from container.models.registry import ModelNotNamed, NoWorkers
from engines.errors import (
    BodyTimeout,
    BodyTooLarge,
    CrossSite,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestError,
    Unauthorized,
    UnknownModel,
)
from handlers.contract import JSON, Reply
from handlers.djl_errors import front_end_reply


def front_end_refusal(error: RequestError, not_ready: int = 503, otherwise: int = 500) -> Reply:
    """Return the front end's reply to a request that it could not read or give to a model.

    Args:
        error: The reason.
        not_ready: The status if the model is not ready.
        otherwise: The status of internal errors.
    """
    match error:
        case BodyTooLarge():
            return Reply(413, JSON, b"")
        case BodyTimeout():
            return front_end_reply(408, "BadRequestException", error.message)
        case ModelNotNamed():
            return front_end_reply(400, "BadRequestException", f"Parameter model_name is required: {error.message}")
        case UnknownModel():
            return front_end_reply(404, "ModelNotFoundException", error.message)
        case NoWorkers():
            return front_end_reply(503, "WlmShutdownException", error.message)
        case Unauthorized():
            return front_end_reply(401, "UnauthorizedException", error.message)
        case CrossSite():
            return front_end_reply(403, "ForbiddenException", error.message)
        case NotReady():
            return front_end_reply(not_ready, "ServiceUnavailableException", error.message)
        case Overloaded():
            return front_end_reply(error.status, "WlmCapacityException", error.message)
        case InvalidRequest():
            return front_end_reply(400, "BadRequestException", error.message)
        case _:
            return front_end_reply(otherwise, "InternalServerException", error.message)


def connection_headers(error: RequestError, *, body_read: bool) -> Headers:
    """Return the headers of a refusal about the connection and the next attempt.

    Args:
        error: The reason for the refusal.
        body_read: True if the whole body was read, so that the connection can serve the next request.
    """
    match error:
        case NotReady():
            return [(b"retry-after", b"5"), (b"connection", b"close")]
        case BodyTooLarge() | BodyTimeout() | Overloaded() if not body_read:
            return [(b"connection", b"close")]  # nothing reads the rest of the body
        case _:
            return []
