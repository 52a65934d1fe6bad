"""LMI's error bodies for generation, byte for byte.

LMI's schema has objects for a wrong generation parameter and for a failed generation. Slipway's objects also have the
keys `error` and `code`, so that clients find the reason under the same keys in all errors. Source: LMI schema v0.31,
"Error Responses".
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines.errors import EngineDead, InvalidRequest, Overloaded, RequestError
from handlers.contract import JSON, ContractError, Reply
from handlers.djl_errors import FAILED_DEPENDENCY, overloaded, payload_error


def payload_refused(message: str) -> ContractError:
    """Return the error of a call whose body cannot be parsed, in the words of LMI's parser."""
    text = f"Input Parsing failed. {message[:1].upper()}{message[1:]}."
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(text)), message)


def request_error(message: str, code: int, error_type: str | None = None) -> str:
    """Return the JSON object that reports a failed request in an answer that is not streamed."""
    return (
        '{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        f'"tokens": null}}, {_reason(message, code, error_type)}}}'
    )


def stream_error(message: str, code: int, error_type: str | None = None) -> str:
    """Return the record of a failed request if the answer is streamed.

    Args:
        message: The error's message.
        code: The status.
        error_type: TGI's `error_type` with option.tgi_compat, otherwise None.
    """
    token = (
        '{"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": ' + quote(message) + "}"
        if error_type is None
        else '{"id": -1, "text": "", "logprob": -1, "special": true}'
    )
    return (
        f'{{"token": {token}, "generated_text": "", '
        '"details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}, '
        f"{_reason(message, code, error_type)}}}"
    )


def status_of(error: RequestError) -> int:
    """Return the HTTP status of a request that failed before the first byte was sent."""
    return 500 if isinstance(error, EngineDead) else FAILED_DEPENDENCY


def tgi_error_type(error: RequestError) -> str:
    """Return TGI's `error_type`. It tells TGI's clients which exception to raise."""
    if isinstance(error, InvalidRequest):
        return "validation"
    return "overloaded" if isinstance(error, Overloaded) else "generation"


def failure(error: RequestError, body: bytes, status: int | None = None) -> Reply:
    """Return the reply to a request that failed before the first byte was sent.

    Args:
        error: The error.
        body: The body of the reply. If the queue is full, DJL Serving's error body is used instead.
        status: The status. None uses `status_of`.
    """
    if isinstance(error, Overloaded):
        return overloaded(error)
    return Reply(status_of(error) if status is None else status, JSON, body)


def _reason(message: str, code: int, error_type: str | None) -> str:
    kind = "" if error_type is None else f', "error_type": "{error_type}"'
    return f'"error": {quote(message)}{kind}, "code": {code}'
