"""TGI's request bodies: types and nothing more, as serde checks them before TGI looks at any value.

Source: contracts/tgi.md sections 2 and 5; TGI's router, `GenerateRequest` and `GenerateParameters`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from handlers.contracts.json_fault import json_fault
from handlers.contracts.protocol import Call
from handlers.contracts.tgi.errors import DOES_NOT_FIT, NO_JSON_TYPE, NOT_JSON, unreadable

Unsigned32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Signed32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]
"""msgspec knows no bounds beyond 63 bits; who reads the number looks at its upper end."""

_decode = msgspec.json.Decoder().decode
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_LARGEST_SINGLE = 3.4028234e38

T = TypeVar("T")


class Parameters(msgspec.Struct, frozen=True):
    """`parameters` as sent; null counts as absent throughout."""

    best_of: Unsigned64 | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Signed32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: Unsigned32 | None = None
    return_full_text: bool | None = None
    stop: tuple[str, ...] | None = None
    truncate: Unsigned64 | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Unsigned64 | None = None
    top_n_tokens: Unsigned32 | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class Body(msgspec.Struct, frozen=True):
    """A request of /generate and its like."""

    inputs: str
    parameters: Parameters | None = None
    """None: decode as TGI does where they are missing altogether, which is sampling."""
    stream: bool | None = None
    """Only / reads it."""


def read(call: Call, shape: type[T]) -> tuple[T, dict[str, Any]]:
    """The body in its shape, and as it came.

    Raises:
        ContractError: with the reply that TGI's web framework gives.
    """
    kind = call.content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise unreadable(NO_JSON_TYPE, "Expected request with `Content-Type: application/json`")
    try:
        document = _decode(call.body)
    except (ValueError, RecursionError) as error:  # ValueError: also what msgspec raises, and numbers too long to read
        raise unreadable(
            NOT_JSON, f"Failed to parse the request body as JSON: {json_fault(call.body, error)}"
        ) from None
    try:
        return msgspec.convert(document, shape), document
    except msgspec.ValidationError as error:
        raise _unfit(str(error)) from None


def _unfit(message: str) -> Exception:
    place = _PLACE.fullmatch(message)
    if place is not None:
        message = f"{place[2]}: {place[1]}" if place[2] else place[1]
    return unreadable(DOES_NOT_FIT, f"Failed to deserialize the JSON body into the target type: {message}")


def unknown_fields(document: dict[str, Any]) -> tuple[str, ...]:
    """Names in the body that mean nothing here, those of parameters first."""
    values = document.get("parameters")
    unknown = sorted(values.keys() - set(Parameters.__struct_fields__)) if isinstance(values, dict) else []
    return (*unknown, *sorted(document.keys() - set(Body.__struct_fields__)))


def beyond_single_precision(value: float) -> bool:
    """Whether a number is infinite to TGI, which reads single precision."""
    return abs(value) > _LARGEST_SINGLE
