"""Managing adapters: orders read, and answers written, in LMI's form and in SageMaker's.

LMI's is the query, answered with a JSON object; SageMaker's a JSON body, answered with a line of text. Errors are LMI's
E1 in both. Source: contracts/lmi.md sections 1.6, 1.7 and 9.1; contracts/sagemaker_hosting.md section 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from handlers.adapters import Adapter, AdapterOrder
from handlers.contracts.json_fields import json_fault, json_kind
from handlers.contracts.lmi.errors import JSON, front_end_reply
from handlers.contracts.protocol import Call, Reply, adapter_header
from handlers.errors import (
    AdapterConflict,
    AdapterFailed,
    BodyTimeout,
    BodyTooLarge,
    EngineDead,
    InvalidRequest,
    NoRoomForAdapter,
    NotReady,
    NotServed,
    RequestError,
    UnknownAdapter,
    UnknownModel,
)

_MARK = b'"adapters"'


class _Fields(msgspec.Struct):
    adapters: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


def adapter_query(call: Call) -> str | None:
    """What the query parameter `adapter` names; None if there is none."""
    return next((value for name, value in call.query if name == "adapter"), None)


def adapters_of(call: Call, given: Any, prompts: int) -> tuple[str | None, ...]:
    """The adapter of each prompt; None for the model itself.

    `given`: the body's `adapters`, one for all prompts or a list with one for each.

    Raises:
        InvalidRequest: it is of another kind, or there are not as many as prompts.
    """
    if (header := adapter_header(call)) is not None:
        return (header or None,) * prompts
    if given is None:
        return (adapter_query(call) or None,) * prompts
    if isinstance(given, str):
        return (given or None,) * prompts
    if not isinstance(given, list) or not all(isinstance(name, str) or name is None for name in given):
        kind = json_kind(given) if not isinstance(given, list) else "an array of other things"
        raise InvalidRequest(f"`adapters` must be a string or an array of strings, got {kind}")
    if len(given) != prompts:
        raise InvalidRequest(f"`adapters` must name one adapter for each prompt: got {len(given)} for {prompts}")
    return tuple(name or None for name in given)


def adapters_in(body: bytes) -> Any:
    """The field `adapters` of a body of JSON; None where there is none, or the body cannot be read."""
    if _MARK not in body:
        return None
    try:
        return _decode(body).adapters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # whoever reads the whole body says what is wrong with it


def named_adapter(call: Call) -> str | None:
    """The one adapter that a call names, as far as can be told without understanding the rest of it."""
    try:
        return adapters_of(call, adapters_in(call.body), 1)[0]
    except InvalidRequest:
        return None


ALIAS_HEADER = "X-Amzn-SageMaker-Adapter-Alias"
MOST_LISTED = 100
"""Adapters in one answer."""
DISABLED = "LoRA is not enabled: set option.enable_lora=true"

_TEXT = "text/plain; charset=utf-8"
_KNOWN = frozenset({"name", "src", "preload", "pin", "model_name", "model_version"})
_BOOLEANS = {"true": True, "false": False}
_PAGE, _LIMIT = "next_page_token", "limit"

_REFUSALS: tuple[tuple[type[RequestError], int, str], ...] = (
    (UnknownModel, 404, "ModelNotFoundException"),
    (UnknownAdapter, 404, "ResourceNotFoundException"),
    (NotServed, 400, "BadRequestException"),
    (InvalidRequest, 400, "BadRequestException"),
    (AdapterConflict, 409, "IllegalArgumentException"),
    (AdapterFailed, 424, "EngineException"),
    (NoRoomForAdapter, 507, "WlmOutOfMemoryException"),
    (BodyTooLarge, 413, "BadRequestException"),
    (BodyTimeout, 408, "BadRequestException"),
    (NotReady, 503, "ServiceUnavailableException"),
    (EngineDead, 500, "EngineException"),
)
_encode = msgspec.json.encode


def registration(call: Call) -> AdapterOrder:
    """What `POST .../adapters` orders.

    Raises:
        InvalidRequest: `name` or `src` is missing, or a value is of the wrong kind.
    """
    given = _given(call)
    order = _order(given, _text(given, "name", required=True), call)
    _text(given, "src", required=True)
    return order


def change(call: Call) -> AdapterOrder:
    """What `POST .../adapters/<name>/update` orders.

    Raises:
        InvalidRequest: a value is of the wrong kind.
    """
    return _order(_given(call), call.path_parameters["adapter"], call)


def alias(call: Call) -> str:
    """What messages are to call the adapter; empty if they are not told."""
    return next((value.strip() for name, value in call.headers if name.lower() == ALIAS_HEADER.lower()), "")


def done(call: Call, name: str, what: str, message: str) -> Reply:
    """The answer to an order that was carried out. `what`: such as "registered". `message`: the handler's, if any."""
    text = message or f"Adapter {alias(call) or name} {what}"
    if _is_json(call):
        return Reply(200, _TEXT, text.encode("utf-8", "replace"))
    return _document({"status": text})


def described(adapter: Adapter) -> Reply:
    """The answer to `GET .../adapters/<name>`."""
    return _document(_entry(adapter))


def listed(call: Call, adapters: Sequence[Adapter]) -> Reply:
    """The answer to `GET .../adapters`: at most `limit` of them, and where to go on.

    Raises:
        InvalidRequest: `limit` or `next_page_token` is no number.
    """
    query = dict(call.query)
    limit = _number(query.get(_LIMIT, ""), _LIMIT, MOST_LISTED)
    start = _number(query.get(_PAGE, ""), _PAGE, 0)
    end = start + (limit if 0 < limit <= MOST_LISTED else MOST_LISTED)
    document: dict[str, Any] = {"nextPageToken": str(end)} if end < len(adapters) else {}
    return _document(document | {"adapters": [_entry(adapter) for adapter in adapters[start:end]]})


def refuse(error: RequestError) -> Reply:
    """The answer to anything that went wrong."""
    status, kind = next(
        ((status, kind) for cause, status, kind in _REFUSALS if isinstance(error, cause)),
        (500, "InternalServerException"),
    )
    return front_end_reply(status, kind, error.message)


def wrong_method(method: str, path: str) -> Reply:
    """405."""
    message = f"Method {method[:20]} is not allowed for {path[:200]}"
    return front_end_reply(405, "MethodNotAllowedException", message)


def _entry(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.src, "preload": adapter.preload, "pin": adapter.pin}


def _document(content: Mapping[str, Any]) -> Reply:
    text = _encode(content).decode("utf-8", "replace")
    return Reply(200, JSON, (msgspec.json.format(text, indent=2) + "\n").encode())


def _is_json(call: Call) -> bool:
    return call.content_type.partition(";")[0].strip().lower() == JSON and bool(call.body.strip())


def _given(call: Call) -> dict[str, Any]:
    if not _is_json(call):
        return dict(call.query)
    try:
        document = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {json_fault(call.body, error)}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object with `name` and `src`, got {json_kind(document)}")
    return {name: value for name, value in document.items() if value is not None}


def _order(given: Mapping[str, Any], name: str, call: Call) -> AdapterOrder:
    options = {key: value if isinstance(value, str) else _encode(value).decode() for key, value in given.items()}
    return AdapterOrder(
        name=name,
        src=_text(given, "src") or None,
        preload=_boolean(given, "preload"),
        pin=_boolean(given, "pin"),
        alias=alias(call),
        options={key: value for key, value in options.items() if key not in _KNOWN},
    )


def _text(given: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"`{name}` must be a string, got {json_kind(value)}")
    if required and not value:
        raise InvalidRequest(f"`{name}` is required")
    return value


def _boolean(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value
    meant = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        shown = repr(value[:50]) if isinstance(value, str) else json_kind(value)
        raise InvalidRequest(f"`{name}` must be true or false, got {shown}")
    return meant


def _number(text: str, name: str, default: int) -> int:
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequest(f"`{name}` must be a number, got {text[:50]!r}")
    return int(text)
