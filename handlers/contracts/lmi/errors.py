"""LMI's error bodies, byte for byte. Source: contracts/lmi.md sections 1.6 and 4.6; LMI schema v0.31, Error Responses.

`E1` is what the front end answers (unknown model, full queue), `E2` a payload that cannot be understood, `E3` what a
failed handler or dynamic batch answers. A bad generation parameter and a failure while generating have the schema's
own objects; they carry `error` and `code` as well, so that a client reads what was wrong from the same keys everywhere.
"""

from __future__ import annotations

from json.encoder import encode_basestring

from handlers.contracts.protocol import ContractError, Reply
from handlers.errors import EngineDead, InvalidRequest, Overloaded, RequestError, UnknownAdapter

JSON = "application/json"
FAILED_DEPENDENCY = 424
"""LMI's status for whatever goes wrong with an inference request."""

# LMI's front end writes its JSON safe for embedding in HTML.
HTML_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "=": "\\u003d", "'": "\\u0027"})


def front_end_reply(status: int, kind: str, message: str) -> Reply:
    """E1: what the front end itself answers. `kind` is a class name of LMI's."""
    text = f'{{\n  "code": {status},\n  "type": {_safe(kind)},\n  "message": {_safe(message)}\n}}\n'
    return Reply(status, JSON, text.encode("utf-8", "replace"))


def payload_error(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """E2: a payload that cannot be understood."""
    return f'{{"error":{_safe(message)},"code":{code}}}'.encode("utf-8", "replace")


def payload_refused(message: str) -> ContractError:
    """The refusal of a payload that cannot be understood, in the words of LMI's parser."""
    text = f"Input Parsing failed. {message[:1].upper()}{message[1:]}."
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(text)), message)


def handler_failure(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """E3: a handler that failed, or a dynamic batch."""
    text = encode_basestring(message)
    return f'{{\n  "code":{code},\n  "message":"invoke handler failure",\n  "error":{text}\n}}'.encode(
        "utf-8", "replace"
    )


def request_error(message: str, code: int, error_type: str | None = None) -> str:
    """The schema's object for a request that failed, not streaming."""
    return (
        '{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        f'"tokens": null}}, {_reason(message, code, error_type)}}}'
    )


def stream_error(message: str, code: int, error_type: str | None = None) -> str:
    """The schema's record for a request that failed, streaming; `error_type` only under tgi_compat."""
    token = (
        '{"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": ' + encode_basestring(message) + "}"
        if error_type is None
        else '{"id": -1, "text": "", "logprob": -1, "special": true}'
    )
    return (
        f'{{"token": {token}, "generated_text": "", '
        '"details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}, '
        f"{_reason(message, code, error_type)}}}"
    )


def status_of(error: RequestError) -> int:
    """The HTTP status for a request that failed before its first byte."""
    return 500 if isinstance(error, EngineDead) else FAILED_DEPENDENCY


def tgi_error_type(error: RequestError) -> str:
    """TGI's `error_type`, by which its clients choose the exception."""
    if isinstance(error, InvalidRequest):
        return "validation"
    return "overloaded" if isinstance(error, Overloaded) else "generation"


def overloaded(error: Overloaded, status: int) -> Reply:
    """The answer to a request for which the queue has no place."""
    return front_end_reply(status, "WlmCapacityException", error.message)


def unknown_adapter(error: UnknownAdapter) -> Reply:
    """The answer to a request for an adapter that is not registered: E2. Source: contracts/lmi.md section 9.4."""
    return Reply(FAILED_DEPENDENCY, JSON, payload_error(error.message))


def _reason(message: str, code: int, error_type: str | None) -> str:
    kind = "" if error_type is None else f', "error_type": "{error_type}"'
    return f'"error": {encode_basestring(message)}{kind}, "code": {code}'


def _safe(text: str) -> str:
    return encode_basestring(text).translate(HTML_SAFE)
