"""Adapters in LMI's calls: the one that a call names, and the API that manages them.

Orders come in LMI's form, a query that is answered with a JSON object, or in SageMaker's, a JSON body that is answered
with a line of text. Errors are the front end's in both. Source: "DJL Serving Adapters Management API"; AWS's package
model-hosting-container-standards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines import errors
from engines.adapters import Adapter, AdapterOrder
from handlers.contract import Call, Reply, adapter_header
from handlers.djl_errors import JSON, front_end_reply
from handlers.forms import media_type
from handlers.json_cost import JsonDecoder
from handlers.json_fields import JsonError, decode_json, json_kind

ALIAS_HEADER = "X-Amzn-SageMaker-Adapter-Alias"
MOST_LISTED = 100  # Adapters in one answer.
DISABLED = "LoRA is not enabled: set option.enable_lora=true"

_FIELD = b'"adapters"'
_TEXT = "text/plain; charset=utf-8"
_KNOWN = frozenset({"name", "src", "preload", "pin", "model_name", "model_version"})
_BOOLEANS = {"true": True, "false": False}

_REFUSALS: tuple[tuple[type[errors.RequestError], int, str], ...] = (
    (errors.Unauthorized, 401, "UnauthorizedException"),
    (errors.CrossSite, 403, "ForbiddenException"),
    (errors.UnknownModel, 404, "ModelNotFoundException"),
    (errors.UnknownAdapter, 404, "ResourceNotFoundException"),
    (errors.NotServed, 400, "BadRequestException"),
    (errors.InvalidRequest, 400, "BadRequestException"),
    (errors.AdapterConflict, 409, "IllegalArgumentException"),
    (errors.AdapterFailed, 424, "EngineException"),
    (errors.NoRoomForAdapter, 507, "WlmOutOfMemoryException"),
    (errors.BodyTooLarge, 413, "BadRequestException"),
    (errors.BodyTimeout, 408, "BadRequestException"),
    (errors.NotReady, 503, "ServiceUnavailableException"),
    (errors.EngineDead, 500, "EngineException"),
)


class _Fields(msgspec.Struct):
    adapters: Any = None


_decode_adapters = JsonDecoder(_Fields).decode


def named_adapter(call: Call) -> str | None:
    """Return the one adapter that a call names, as far as its body can be read."""
    try:
        return adapters_of(call, adapters_in(call.body), 1)[0]
    except errors.InvalidRequest:
        return None


def adapters_of(call: Call, given: Any, prompts: int) -> tuple[str | None, ...]:
    """The adapter of each prompt, None for the model itself: by the header, the body or the query, in this order.

    Args:
        given: The body's `adapters`, one for all prompts or a list with one for each.

    Raises:
        InvalidRequest: It is of another kind, or the list is not as long as that of the prompts.
    """
    if (header := adapter_header(call)) is not None:
        given = header
    elif given is None:
        given = adapter_query(call)
    if given is None or isinstance(given, str):
        return (given or None,) * prompts
    if not isinstance(given, list) or not all(isinstance(name, str) or name is None for name in given):
        kind = json_kind(given) if not isinstance(given, list) else "an array of other things"
        raise errors.InvalidRequest(f"`adapters` must be a string or an array of strings, got {kind}")
    if len(given) != prompts:
        raise errors.InvalidRequest(f"`adapters` must name one adapter for each prompt: got {len(given)} for {prompts}")
    return tuple(name or None for name in given)


def adapters_in(body: bytes) -> Any:
    """Return the field `adapters` of a JSON body; None if it has none, or cannot be read."""
    if _FIELD not in body and b"\\u" not in body:  # its name may be written with escapes
        return None
    try:
        return _decode_adapters(body).adapters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the reader of the whole body reports the fault


def adapter_query(call: Call) -> str | None:
    """Return the query parameter `adapter`; None if it is absent."""
    return next((value for name, value in call.query if name == "adapter"), None)


def registration(call: Call) -> AdapterOrder:
    """Return the order of `POST .../adapters`.

    Raises:
        InvalidRequest: `name` or `src` is missing, or a value is of the wrong kind.
    """
    given = _given(call)
    order = _order(given, _text(given, "name", required=True), call)
    _text(given, "src", required=True)
    return order


def change(call: Call) -> AdapterOrder:
    """Return the order of `POST .../adapters/<name>/update`.

    Raises:
        InvalidRequest: A value is of the wrong kind.
    """
    return _order(_given(call), call.path_parameters["adapter"], call)


def alias(call: Call) -> str:
    """Return the adapter's name for messages, from its header; empty if it is absent."""
    return next((value.strip() for name, value in call.headers if name.lower() == ALIAS_HEADER.lower()), "")


def done(call: Call, name: str, what: str, message: str) -> Reply:
    """Return the answer to an order that was carried out.

    Args:
        what: Such as "registered".
        message: A custom handler's own, which replaces the usual text.
    """
    text = message or f"Adapter {alias(call) or name} {what}"
    if _is_json(call):
        return Reply(200, _TEXT, text.encode("utf-8", "replace"))
    return _document({"status": text})


def described(adapter: Adapter) -> Reply:
    """Return the answer to `GET .../adapters/<name>`."""
    return _document(_entry(adapter))


def listed(call: Call, adapters: Sequence[Adapter]) -> Reply:
    """Return the answer to `GET .../adapters`: at most `limit` of them, and the token of the next page.

    Raises:
        InvalidRequest: `limit` or `next_page_token` is not a number.
    """
    query = dict(call.query)
    limit = _number(query, "limit", MOST_LISTED)
    start = _number(query, "next_page_token", 0)
    end = start + (limit if 0 < limit <= MOST_LISTED else MOST_LISTED)
    document: dict[str, Any] = {"nextPageToken": str(end)} if end < len(adapters) else {}
    return _document(document | {"adapters": [_entry(adapter) for adapter in adapters[start:end]]})


def refuse(error: errors.RequestError) -> Reply:
    """Return the answer to an error."""
    status, kind = next(
        ((status, kind) for cause, status, kind in _REFUSALS if isinstance(error, cause)),
        (500, "InternalServerException"),
    )
    return front_end_reply(status, kind, error.message)


def wrong_method(call: Call) -> Reply:
    """Return the answer to a method that the route does not have."""
    message = f"Method {call.method[:20]} is not allowed for {call.path[:200]}"
    return front_end_reply(405, "MethodNotAllowedException", message)


def _entry(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.src, "preload": adapter.preload, "pin": adapter.pin}


def _document(content: Mapping[str, Any]) -> Reply:
    text = msgspec.json.encode(content).decode("utf-8", "replace")
    return Reply(200, JSON, (msgspec.json.format(text, indent=2) + "\n").encode())


def _is_json(call: Call) -> bool:
    return media_type(call.content_type) == JSON and bool(call.body.strip())


def _given(call: Call) -> dict[str, Any]:
    if not _is_json(call):
        return dict(call.query)
    try:
        document = decode_json(call.body)
    except JsonError as error:
        raise errors.InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise errors.InvalidRequest(f"the body must be a JSON object with `name` and `src`, got {json_kind(document)}")
    return {name: value for name, value in document.items() if value is not None}


def _order(given: Mapping[str, Any], name: str, call: Call) -> AdapterOrder:
    options = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in given.items()
    }
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
        raise errors.InvalidRequest(f"`{name}` must be a string, got {json_kind(value)}")
    if required and not value:
        raise errors.InvalidRequest(f"`{name}` is required")
    return value


def _boolean(given: Mapping[str, Any], name: str) -> bool | None:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value
    meant = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        shown = repr(value[:50]) if isinstance(value, str) else json_kind(value)
        raise errors.InvalidRequest(f"`{name}` must be true or false, got {shown}")
    return meant


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise errors.InvalidRequest(f"`{name}` must be a number, got {text[:50]!r}")
    return int(text)
