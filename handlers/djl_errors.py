"""DJL Serving's error bodies, byte for byte. LMI's routes and customers' handlers use them.

There are three formats: for errors of DJL Serving's front end (unknown model, full queue); `payload_error`, for refused
requests and for failures in formatters, in the asynchronous mode, in rolling batches and in calls for vectors; and
`handler_failure`, for other failed handlers and for dynamic batches. Source: LMI schema v0.31, "Error Responses"; DJL
Serving, `NettyUtils.java`.
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines import errors
from engines.errors import Overloaded, RequestError, UnknownAdapter
from handlers.contract import JSON, ContractError, Reply

FAILED_DEPENDENCY = 424  # LMI's status for all inference requests that failed.
# LMI's reply headers. Replies to requests that are refused before their model is looked up (401, ...) have none of
# them.
NO_CACHE = (
    ("pragma", "no-cache"),
    ("cache-control", "no-cache; no-store, must-revalidate, private"),
    ("expires", "Thu, 01 Jan 1970 00:00:00 UTC"),
)
# The front end writes JSON that can be embedded in HTML.
HTML_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "=": "\\u003d", "'": "\\u0027"})


def front_end_reply(status: int, kind: str, message: str) -> Reply:
    """Return an error reply in the format of DJL Serving's front end.

    Args:
        kind: The name of an exception class of DJL Serving, for the field `type`.
    """
    text = f'{{\n  "code": {status},\n  "type": {_html_safe(kind)},\n  "message": {_html_safe(message)}\n}}\n'
    return Reply(status, JSON, text.encode("utf-8", "replace"))


def front_end_refusal(error: RequestError, not_ready: int = 503, otherwise: int = 500) -> Reply:
    """Return the front end's reply to a request that it could not read or pass to a model.

    Args:
        error: The reason.
        not_ready: The status if the model is not ready.
        otherwise: The status of internal errors.
    """
    match error:
        case errors.BodyTooLarge():
            return Reply(413, JSON, b"")
        case errors.BodyTimeout():
            return front_end_reply(408, "BadRequestException", error.message)
        case errors.ModelNotNamed():
            return front_end_reply(400, "BadRequestException", f"Parameter model_name is required: {error.message}")
        case errors.UnknownModel():
            return front_end_reply(404, "ModelNotFoundException", error.message)
        case errors.NoWorkers():
            return front_end_reply(503, "WlmShutdownException", error.message)
        case errors.Unauthorized():
            return front_end_reply(401, "UnauthorizedException", error.message)
        case errors.CrossSite():
            return front_end_reply(403, "ForbiddenException", error.message)
        case errors.NotReady():
            return front_end_reply(not_ready, "ServiceUnavailableException", error.message)
        case errors.Overloaded():
            return front_end_reply(error.status, "WlmCapacityException", error.message)
        case errors.InvalidRequest():
            return front_end_reply(400, "BadRequestException", error.message)
        case _:
            return front_end_reply(otherwise, "InternalServerException", error.message)


def refused(status: int, kind: str, message: str) -> ContractError:
    """Return the error of a call that the front end refuses.

    Args:
        kind: As in `front_end_reply`.
    """
    return ContractError(front_end_reply(status, kind, message), message)


def bad_request(message: str) -> ContractError:
    """Return the error of a call that the front end refuses with 400, because a parameter is missing or wrong."""
    return refused(400, "BadRequestException", message)


def payload_error(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """Return the error body of a refused request or a failed call. The module's docstring names these calls."""
    return f'{{"error":{_html_safe(message)},"code":{code}}}'.encode("utf-8", "replace")


def failed_dependency(message: str) -> ContractError:
    """Return the error of a call that is refused with 424."""
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(message)), message)


def handler_failure(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """Return the body that says that a handler or a dynamic batch failed."""
    text = f'{{\n  "code":{code},\n  "message":"invoke handler failure",\n  "error":{quote(message)}\n}}'
    return text.encode("utf-8", "replace")


def overloaded(error: Overloaded) -> Reply:
    """Return the reply to a request for which the queue has no room."""
    return front_end_reply(error.status, "WlmCapacityException", error.message)


def unknown_adapter(error: UnknownAdapter) -> Reply:
    """Return the reply to a request for an adapter that is not registered."""
    return Reply(FAILED_DEPENDENCY, JSON, payload_error(error.message))


def _html_safe(text: str) -> str:
    return quote(text).translate(HTML_SAFE)
