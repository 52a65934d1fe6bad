"""LMI's error bodies, byte for byte.

Source: LMI schema v0.31, "Error Responses"; DJL Serving, `NettyUtils.java`. There are three plain forms: what the front
end answers (unknown model, full queue), a payload that cannot be understood, and a handler or dynamic batch that
failed. A bad generation parameter and a failure while generating have the schema's own objects; these carry `error` and
`code` as well, so that a client finds the reason under the same keys everywhere.
"""

from __future__ import annotations

from json.encoder import encode_basestring as quote

from engines.errors import EngineDead, InvalidRequest, Overloaded, RequestError, UnknownAdapter
from handlers.contract import ContractError, Reply

JSON = "application/json"
FAILED_DEPENDENCY = 424  # LMI's status for whatever goes wrong with an inference request.
# LMI's front end writes JSON that can be embedded in HTML.
HTML_SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "=": "\\u003d", "'": "\\u0027"})


def front_end_reply(status: int, kind: str, message: str) -> Reply:
    """What the front end itself answers. `kind`: a class name of DJL Serving's."""
    text = f'{{\n  "code": {status},\n  "type": {_html_safe(kind)},\n  "message": {_html_safe(message)}\n}}\n'
    return Reply(status, JSON, text.encode("utf-8", "replace"))


def refused(status: int, kind: str, message: str) -> ContractError:
    """A call that the front end refuses. `kind`: a class name of DJL Serving's."""
    return ContractError(front_end_reply(status, kind, message), message)


def bad_request(message: str) -> ContractError:
    """A call that the front end refuses with 400: a parameter is missing or wrong."""
    return refused(400, "BadRequestException", message)


def payload_error(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """The body that says that a payload cannot be understood."""
    return f'{{"error":{_html_safe(message)},"code":{code}}}'.encode("utf-8", "replace")


def failed_dependency(message: str) -> ContractError:
    """A call that is refused with 424."""
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(message)), message)


def payload_refused(message: str) -> ContractError:
    """A call whose payload cannot be understood, refused in the words of LMI's parser."""
    text = f"Input Parsing failed. {message[:1].upper()}{message[1:]}."
    return ContractError(Reply(FAILED_DEPENDENCY, JSON, payload_error(text)), message)


def handler_failure(message: str, code: int = FAILED_DEPENDENCY) -> bytes:
    """The body that says that a handler or a dynamic batch failed."""
    text = f'{{\n  "code":{code},\n  "message":"invoke handler failure",\n  "error":{quote(message)}\n}}'
    return text.encode("utf-8", "replace")


def request_error(message: str, code: int, error_type: str | None = None) -> str:
    """The schema's object for a request that failed, where the answer is not streamed."""
    return (
        '{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        f'"tokens": null}}, {_reason(message, code, error_type)}}}'
    )


def stream_error(message: str, code: int, error_type: str | None = None) -> str:
    """The schema's record for a request that failed, where the answer is streamed; `error_type` under tgi_compat."""
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
    """The HTTP status for a request that failed before its first byte."""
    return 500 if isinstance(error, EngineDead) else FAILED_DEPENDENCY


def tgi_error_type(error: RequestError) -> str:
    """TGI's `error_type`, by which its clients choose the exception."""
    if isinstance(error, InvalidRequest):
        return "validation"
    return "overloaded" if isinstance(error, Overloaded) else "generation"


def failure(error: RequestError, body: bytes, status: int | None = None) -> Reply:
    """The reply to a request that failed before its first byte: `body`, or the front end's own for a full queue."""
    if isinstance(error, Overloaded):
        return overloaded(error)
    return Reply(status_of(error) if status is None else status, JSON, body)


def overloaded(error: Overloaded) -> Reply:
    """The reply to a request for which the queue has no place."""
    return front_end_reply(error.status, "WlmCapacityException", error.message)


def unknown_adapter(error: UnknownAdapter) -> Reply:
    """The reply to a request for an adapter that is not registered."""
    return Reply(FAILED_DEPENDENCY, JSON, payload_error(error.message))


def _reason(message: str, code: int, error_type: str | None) -> str:
    kind = "" if error_type is None else f', "error_type": "{error_type}"'
    return f'"error": {quote(message)}{kind}, "code": {code}'


def _html_safe(text: str) -> str:
    return quote(text).translate(HTML_SAFE)
