"""The `model` of a body, where something else than the body says which it is."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from handlers.contracts.protocol import Call

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_model(call: Call, name: str) -> Call:
    """The call with another `model`; what is no JSON object is left to vLLM to refuse."""
    try:
        document = _decode(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return call
    document["model"] = msgspec.Raw(msgspec.json.encode(name))
    return replace(call, body=msgspec.json.encode(document))
