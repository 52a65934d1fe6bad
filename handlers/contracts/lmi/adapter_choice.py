"""Which adapter a call to `/invocations` names. Source: contracts/lmi.md section 9.4.

SageMaker's header goes before the body's `adapters`, and that before the query's or the form's `adapter`. An empty name
is the model without any adapter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contracts.adapter_header import adapter_header
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.protocol import Call
from handlers.errors import InvalidRequest

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
