"""LMI's error bodies for generation, byte for byte.

A bad generation parameter and a failure while generating have the schema's own objects. These carry `error` and `code`
as well, so that a client finds the reason under the same keys everywhere. Source: LMI schema v0.31, "Error Responses".
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines.errors import EngineDead, InvalidRequest, Overloaded, RequestError
from handlers.contract import ContractError, Reply
from handlers.djl_errors import FAILED_DEPENDENCY, JSON, overloaded, payload_error


def payload_refused(message: str) -> ContractError:
    """Return a call whose payload cannot be understood, refused in the words of the parser of LMI."""
    text = f"Input Parsing failed. {message[:1].upper()}{message[1:]}."
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(text)), message)


def request_error(message: str, code: int, error_type: str | None = None) -> str:
    """Return the schema's object for a request that failed, if the answer is not streamed."""
    return (
        '{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        f'"tokens": null}}, {_reason(message, code, error_type)}}}'
    )


def stream_error(message: str, code: int, error_type: str | None = None) -> str:
    """Return the schema's record for a request that failed, if the answer is streamed.

    `error_type` under tgi_compat.
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
    """Return the HTTP status for a request that failed before its first byte."""
    return 500 if isinstance(error, EngineDead) else FAILED_DEPENDENCY


def tgi_error_type(error: RequestError) -> str:
    """TGI's `error_type`, by which its clients choose the exception."""
    if isinstance(error, InvalidRequest):
        return "validation"
    return "overloaded" if isinstance(error, Overloaded) else "generation"


def failure(error: RequestError, body: bytes, status: int | None = None) -> Reply:
    """Return the reply to a request that failed early: `body`, or the front end's if the queue is full."""
    if isinstance(error, Overloaded):
        return overloaded(error)
    return Reply(status_of(error) if status is None else status, JSON, body)


def _reason(message: str, code: int, error_type: str | None) -> str:
    kind = "" if error_type is None else f', "error_type": "{error_type}"'
    return f'"error": {quote(message)}{kind}, "code": {code}'
