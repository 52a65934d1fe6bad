"""Makes the `Input` of a customer's handler from a call.

Source: DJL Serving, `RequestParser.java`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from djl_python import Input
from handlers.contract import Call
from handlers.djl_errors import bad_request
from handlers.parsing.forms import FormError, form_fields, is_form

DEFAULT_PRIORITY = 3

_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Headers that LMI's documentation writes in lower case.
_LOWER = ("x-request-id", "x-synchronous", "x-starting-token", "x-next-token", "x-max-items", "x-priority")
_SAGEMAKER = "x-amzn-sagemaker-"
_ALLOW_OVERRIDE = "ALLOW_REQUEST_HANDLER_OVERRIDE"
# The server uses these properties to control a handler. A client cannot set them.
_RESERVED = re.compile(
    r"batch_size|batch_\d.*|reset_rollingbatch|model_dir|device_id|trust_remote_code|.*_formatter|prediction_handler"
    r"|init_handler",
    re.IGNORECASE | re.DOTALL,
)


class HandlerInput(NamedTuple):
    """The headers of a call, and the properties and the contents of a handler's `Input`."""

    headers: tuple[tuple[str, str], ...]  # The names have canonical case, such as `X-Amzn-SageMaker-Session-Id`.
    properties: tuple[tuple[str, str], ...]
    contents: tuple[tuple[str | None, bytes], ...]


@lru_cache(maxsize=512)
def _canonical(name: bytes) -> str:
    text = name.decode("latin-1")
    if text in _LOWER or "_" in text:
        return text
    if text.startswith(_SAGEMAKER):
        return "X-Amzn-SageMaker-" + "-".join(map(str.capitalize, text.removeprefix(_SAGEMAKER).split("-")))
    return "-".join(map(str.capitalize, text.split("-")))


def input_of(call: Call) -> HandlerInput:
    """Return the input for a call.

    Query parameters and the body become contents. Headers, SageMaker's custom attributes and the request's id become
    properties.

    Raises:
        ContractError: 400. The form is broken, or the request names a handler function.
    """
    given: list[tuple[str, str]] = []
    headers = tuple([(_canonical(name), value.decode("latin-1")) for name, value in call.headers.items()])
    for name, value in headers:
        if name.lower() != _CUSTOM_ATTRIBUTES:
            given.append((name, value))
            continue
        for attribute in value.split(";"):
            key, equals, text = attribute.partition("=")
            if equals:
                given.append((key.strip(), text.strip()))
    if call.content_type:
        given.append(("Content-Type", call.content_type))
    properties = _properties([*given, ("requestId", call.request_id)])
    if "handler" in properties and os.environ.get(_ALLOW_OVERRIDE, "").lower() != "true":
        raise bad_request("The handler can't be overridden in a request")
    query = tuple((key, value.encode()) for key, value in call.query)
    return HandlerInput(headers, tuple(properties.values()), (*query, *_contents(call)))


def sdk_input(call: Call) -> Input:
    """Return the `Input` that LMI gives to formatters in this process.

    Raises:
        ContractError: See `input_of`.
    """
    _, properties, contents = input_of(call)
    given = Input()
    given.properties = dict(properties)
    for key, value in contents:
        given.content.add(key, value)
    return given


def priority_of(given: HandlerInput) -> int:
    """Return the property `x-priority`.

    Requests with a lower priority are served first.

    Raises:
        ContractError: 400. The property is not an integer.
    """
    text = next((value for name, value in given.properties if name.lower() == "x-priority"), "")
    try:
        return int(text) if text else DEFAULT_PRIORITY
    except ValueError:
        raise bad_request(f"x-priority is no integer: {text}") from None


def _contents(call: Call) -> tuple[tuple[str | None, bytes], ...]:
    whole = (("data", call.body),)
    if not is_form(call.content_type):
        return whole
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError as error:
        raise bad_request(error.message) from None
    # The body of an empty form becomes `data`: an input without content would initialize the handler, which a client
    # must not do.
    return tuple(fields) or whole


def _properties(given: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the properties, keyed by name in lower case. If a name occurs twice, the later value counts."""
    found: dict[str, tuple[str, str]] = {}
    for name, value in given:
        key = name.lower()
        if _RESERVED.fullmatch(name):
            continue
        # Handlers look up the property `handler` in lower case.
        shown = "handler" if key == "handler" else found.get(key, (name, ""))[0]
        found[key] = (shown, value)
    return found
