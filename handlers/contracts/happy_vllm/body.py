"""Reading the body of a happy_vllm call: a JSON object, whatever the content type says.

Source: contracts/happy_vllm.md sections 4 and 6 to 8.
"""

from __future__ import annotations

import codecs
from typing import Any

import msgspec

from handlers.contracts.happy_vllm.errors import missing, no_body, not_an_object, not_json, refused
from handlers.contracts.json_fault import json_fault
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.parameter_reader import ParameterReader
from handlers.contracts.protocol import Call
from handlers.errors import InvalidParameter

_decode = msgspec.json.Decoder().decode


def document(call: Call) -> dict[str, Any]:
    """The call's JSON object.

    Raises:
        ContractError: there is none.
    """
    body = call.body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise refused(no_body(), "the body is empty")
    try:
        value = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(not_json(json_fault(body, error)), "the body is not JSON") from None
    if not isinstance(value, dict):
        raise refused(not_an_object(), f"the body is {json_kind(value)}, not an object")
    return value


def required_string(values: dict[str, Any], name: str) -> str:
    """A string that must be there; null counts as absent.

    Raises:
        ContractError: it is absent.
        InvalidParameter: it is no string.
    """
    value = values.get(name)
    if value is None:
        raise refused(missing(name), f"`{name}` is missing")
    if not isinstance(value, str):
        raise InvalidParameter(name, f"must be a string, got {json_kind(value)}")
    return value


def required_ids(values: dict[str, Any], name: str, vocabulary_size: int) -> list[int]:
    """Token ids that must be there.

    Raises:
        ContractError: they are absent.
        InvalidParameter: they are no ids of the vocabulary.
    """
    if values.get(name) is None:
        raise refused(missing(name), f"`{name}` is missing")
    ids = list(ParameterReader(values).integers(name, minimum=0))
    if ids and max(ids) >= vocabulary_size:
        raise InvalidParameter(name, f"must be ids of the vocabulary, below {vocabulary_size}, got {max(ids)}")
    return ids
