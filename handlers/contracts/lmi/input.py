"""From an HTTP request to what the handler sees. Source: contracts/lmi.md section 1.3."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from handlers.contracts.lmi.errors import front_end_reply
from handlers.contracts.lmi.form_fields import FormError, form_fields, is_form
from handlers.contracts.protocol import Call, ContractError

DEFAULT_PRIORITY = 3

_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ALLOW_OVERRIDE = "ALLOW_REQUEST_HANDLER_OVERRIDE"
_RESERVED = re.compile(
    r"batch_size|batch_\d.*|reset_rollingbatch|model_dir|device_id|.*_formatter|prediction_handler|init_handler",
    re.IGNORECASE | re.DOTALL,
)
"""Properties by which the server tells a handler something; a client cannot."""


class HandlerInput(NamedTuple):
    """What an `Input` holds."""

    properties: tuple[tuple[str, str], ...]
    contents: tuple[tuple[str | None, bytes], ...]


def input_of(call: Call) -> HandlerInput:
    """Query parameters and body as contents; headers, SageMaker's attributes and the request's id as properties.

    Raises:
        ContractError: 400; the form is broken, or the request names a handler function.
    """
    properties = _Properties()
    for name, value in call.headers:
        if name.lower() != _CUSTOM_ATTRIBUTES:
            properties.set(name, value)
            continue
        for attribute in value.split(";"):
            key, equals, text = attribute.partition("=")
            if equals:
                properties.set(key.strip(), text.strip())
    if call.content_type:
        properties.set("Content-Type", call.content_type)
    if properties.get("handler") is not None and os.environ.get(_ALLOW_OVERRIDE, "").lower() != "true":
        raise _bad_request("The handler can't be overridden in a request")
    properties.set("requestId", call.request_id)
    query = tuple((key, value.encode()) for key, value in call.query)
    return HandlerInput(properties.pairs(), (*query, *_body(call)))


def priority_of(given: HandlerInput) -> int:
    """Property `x-priority`; lower ones are served first.

    Raises:
        ContractError: 400; it is no integer.
    """
    text = next((value for name, value in given.properties if name.lower() == "x-priority"), "")
    try:
        return int(text) if text else DEFAULT_PRIORITY
    except ValueError:
        raise _bad_request(f"x-priority is no integer: {text}") from None


def _body(call: Call) -> tuple[tuple[str | None, bytes], ...]:
    if not is_form(call.content_type):
        return (("data", call.body),)
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError as error:
        raise _bad_request(str(error)) from None
    # An input without any content is the initializing call, which no client may make.
    return tuple(fields) or (("data", call.body),)


class _Properties:
    """Names count whatever their case; a later value replaces an earlier one."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[str, str]] = {}

    def set(self, name: str, value: str) -> None:
        if _RESERVED.fullmatch(name):
            return
        if name.lower() == "handler":  # handlers look it up as it is written here
            name = "handler"
        known = self._pairs.get(name.lower())
        self._pairs[name.lower()] = (known[0] if known else name, value)

    def get(self, name: str) -> str | None:
        pair = self._pairs.get(name.lower())
        return pair[1] if pair else None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._pairs.values())


def _bad_request(message: str) -> ContractError:
    return ContractError(front_end_reply(400, "BadRequestException", message), message)
