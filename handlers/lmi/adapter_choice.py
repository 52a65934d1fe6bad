"""Reads the adapters that an LMI call names.

The names come from SageMaker's header, the body or the query, in this order. The first source that is present counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engines.errors import InvalidRequest
from handlers.contract import Call, adapter_header
from handlers.parsing.json_fields import json_kind
from handlers.parsing.json_limits import JsonDecoder

_FIELD = b'"adapters"'


class _Fields(msgspec.Struct):
    adapters: Any = None


_decode_fields = JsonDecoder(_Fields).decode


def named_adapter(call: Call) -> str | None:
    """Return the one adapter that a call names.

    Returns:
        None if the call names no adapter, several adapters, or an adapter that cannot be read.
    """
    try:
        return adapters_of(call, adapters_in(call.body), 1)[0]
    except InvalidRequest:
        return None


def adapters_of(call: Call, given: Any, prompts: int) -> tuple[str | None, ...]:
    """Return the adapter of each prompt. None means the model itself.

    Args:
        call: The call. Its header and its query may name an adapter.
        given: The body's field `adapters`: one name for all prompts, or a list with a name for each prompt.
        prompts: The number of prompts.

    Raises:
        InvalidRequest: `adapters` is neither a string nor an array of strings, or its length is not the number of
            prompts.
    """
    if (header := adapter_header(call)) is not None:
        given = header
    elif given is None:
        given = adapter_query(call)
    if given is None or isinstance(given, str):
        return (given or None,) * prompts
    if not isinstance(given, list) or not all(isinstance(name, str) or name is None for name in given):
        kind = json_kind(given) if not isinstance(given, list) else "an array of other things"
        raise InvalidRequest(f"`adapters` must be a string or an array of strings, got {kind}")
    if len(given) != prompts:
        raise InvalidRequest(f"`adapters` must name one adapter for each prompt: got {len(given)} for {prompts}")
    return tuple(name or None for name in given)


def adapters_in(body: bytes) -> Any:
    """Return the field `adapters` of a JSON body. None if the field is absent, or if the body cannot be read."""
    if _FIELD not in body and b"\\u" not in body:  # The field's name may be written with escapes.
        return None
    try:
        return _decode_fields(body).adapters
    except msgspec.DecodeError:
        return None  # The reader of the whole body reports the error.


def adapter_query(call: Call) -> str | None:
    """Return the query parameter `adapter`, or None if it is absent."""
    return next((value for name, value in call.query if name == "adapter"), None)
