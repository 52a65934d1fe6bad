"""LMI's management API for adapters: its calls and its replies. The replies match LMI's byte for byte.

A call that changes an adapter has one of two forms. In LMI's form, the parameters are in the query, and the reply is a
JSON object. In SageMaker's form, they are in a JSON body, and the reply is a line of text. In both forms, errors are
those of DJL Serving's front end. Sources: "DJL Serving Adapters Management API"; AWS's package
model-hosting-container-standards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engines import errors
from engines.adapters import Adapter, AdapterOrder, AdapterRegistry
from handlers.contract import JSON, Call, Reply, media_type
from handlers.djl_errors import front_end_reply
from handlers.management import Management
from handlers.parsing.json_fields import JsonError, decode_json, json_kind

ALIAS_HEADER = "X-Amzn-SageMaker-Adapter-Alias"
MOST_LISTED = 100  # The maximum number of adapters in one reply.
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


async def register(call: Call, management: Management) -> Reply:
    """`POST .../adapters`."""
    registry = _registry(call, management)
    order = read_registration(call)
    return confirmation(call, order.name, "registered", await registry.register(order))


async def update(call: Call, management: Management) -> Reply:
    """`POST .../adapters/<name>/update`."""
    registry = _registry(call, management)
    order = read_update(call)
    return confirmation(call, order.name, "updated", await registry.update(order))


async def unregister(call: Call, management: Management) -> Reply:
    """`DELETE .../adapters/<name>`."""
    name = call.path_parameters["adapter"]
    message = await _registry(call, management).unregister(name, alias(call))
    return confirmation(call, name, "unregistered", message)


async def describe(call: Call, management: Management) -> Reply:
    """`GET .../adapters/<name>`."""
    return description(_registry(call, management).get(call.path_parameters["adapter"]))


async def list_adapters(call: Call, management: Management) -> Reply:
    """`GET .../adapters`."""
    return adapter_list(call, _registry(call, management).all())


def _registry(call: Call, management: Management) -> AdapterRegistry:
    """Return the adapters of the model that the path names, or of the startup model."""
    return management.adapters(call.path_parameters.get("model"))


def read_registration(call: Call) -> AdapterOrder:
    """Read `POST .../adapters`.

    Raises:
        InvalidRequest: `name` or `src` is missing, or a value has the wrong type.
    """
    given = _given(call)
    order = _order(given, _text(given, "name", required=True), call)
    _text(given, "src", required=True)
    return order


def read_update(call: Call) -> AdapterOrder:
    """Read `POST .../adapters/<name>/update`.

    Raises:
        InvalidRequest: A value has the wrong type.
    """
    return _order(_given(call), call.path_parameters["adapter"], call)


def alias(call: Call) -> str:
    """Return the adapter's name for messages. SageMaker sends it in a header. Empty if the header is absent."""
    return (call.header(ALIAS_HEADER) or "").strip()


def confirmation(call: Call, name: str, action: str, message: str) -> Reply:
    """Return the reply to a successful change.

    Args:
        call: The call.
        name: The adapter's name.
        action: The past participle of the action, such as "registered".
        message: The text of a custom handler, which replaces the usual text. It may be empty.
    """
    text = message or f"Adapter {alias(call) or name} {action}"
    if _is_json(call):
        return Reply(200, _TEXT, text.encode("utf-8", "replace"))
    return _document({"status": text})


def description(adapter: Adapter) -> Reply:
    """Return the reply to `GET .../adapters/<name>`."""
    return _document(_entry(adapter))


def adapter_list(call: Call, adapters: Sequence[Adapter]) -> Reply:
    """Return the reply to `GET .../adapters`: at most `limit` adapters, and the token of the next page.

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
    """Return the reply to an error."""
    status, kind = next(
        ((status, kind) for cause, status, kind in _REFUSALS if isinstance(error, cause)),
        (500, "InternalServerException"),
    )
    return front_end_reply(status, kind, error.message)


def wrong_method(call: Call) -> Reply:
    """Return the reply to a method that the route does not have."""
    message = f"Method {call.method[:20]} is not allowed for {call.path[: errors.SHOWN]}"
    return front_end_reply(405, "MethodNotAllowedException", message)


def _entry(adapter: Adapter) -> dict[str, Any]:
    return {"name": adapter.name, "src": adapter.src, "preload": adapter.preload, "pin": adapter.pin}


def _document(content: Mapping[str, Any]) -> Reply:
    text = msgspec.json.encode(content).decode("utf-8", "replace")
    return Reply(200, JSON, (msgspec.json.format(text, indent=2) + "\n").encode())


def _is_json(call: Call) -> bool:
    """Return True if a call has SageMaker's form. A call with a query and the body `{}` has LMI's form."""
    body = call.body.strip()
    return media_type(call.content_type) == JSON and bool(body) and not (body == b"{}" and call.query)


def _given(call: Call) -> dict[str, Any]:
    """Return the parameters of a call. A JSON body takes precedence over the query."""
    if not _is_json(call):
        return dict(call.query)
    try:
        document = decode_json(call.body)
    except JsonError as error:
        raise errors.InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise errors.InvalidRequest(f"the body must be a JSON object with `name` and `src`, got {json_kind(document)}")
    return {**dict(call.query), **{name: value for name, value in document.items() if value is not None}}


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
    parsed = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if parsed is None:
        shown = repr(value[: errors.SHOWN]) if isinstance(value, str) else json_kind(value)
        raise errors.InvalidRequest(f"`{name}` must be true or false, got {shown}")
    return parsed


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise errors.InvalidRequest(f"`{name}` must be a number, got {text[: errors.SHOWN]!r}")
    return int(text)
