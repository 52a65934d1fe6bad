"""Decodes JSON from clients, with a reason if decoding fails, and reads typed parameters from an object."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engines.errors import SHOWN, InvalidParameter
from handlers.parsing.json_limits import JsonDecoder

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1  # The range of integers that engines accept.
MAX_STRINGS, MAX_STRING_LENGTH = 64, 1000  # Limits on strings. Engines search for each string after each token.

Kind = str | list[str]  # The `type` in a JSON schema, such as "integer".

_KINDS = {str: "a string", int: "a number", float: "a number", list: "an array", dict: "an object", bool: "a boolean"}
_DIGITS = re.compile("[0-9]{1,19}").fullmatch
_TRUNCATED = "Input data was truncated"
# The first half of a surrogate pair that is not followed by the second half. A first half at the end of the text does
# not match.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\?\Z|\\u[0-9a-fA-F]{0,3}\Z|\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_decode = JsonDecoder[Any]().decode
_encoder = json.JSONEncoder(ensure_ascii=False)


class JsonError(ValueError):
    """A text is not JSON. The message says why."""


def decode_json(text: bytes | str) -> Any:
    """Return the document that a JSON text holds.

    Raises:
        JsonError: The text is not JSON, is nested too deeply, or would take too long to decode.
    """
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        raise JsonError(json_fault(text, error)) from None


def json_fault(text: bytes | str, error: Exception) -> str:
    """Return the reason that msgspec's `error` gives for refusing `text`.

    The reason is corrected if half a surrogate pair is near the end: msgspec then reports that the text was cut off.
    """
    reason = str(error)
    if reason != _TRUNCATED:
        return reason
    found = _LONE_SURROGATE.search(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    if found is None:
        return reason
    return f"JSON is malformed: {found[1].decode()} is half of a utf-16 surrogate pair (byte {found.start(1)})"


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value for a message, such as "a string" or "an array". None is "null"."""
    return _KINDS.get(type(value), "null")


class ParameterReader:
    """Reads parameters by name, type and range. Null counts as absent.

    All methods that return a value raise `InvalidParameter` if the value is wrong. The error names the allowed and the
    given value.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._values

    def unread(self) -> set[str]:
        """Return the names of parameters that were given but never read."""
        return self._values.keys() - self._read

    def boolean(self, name: str, default: bool) -> bool:
        value = self._take(name, "boolean", default)
        if isinstance(value, bool):
            return value
        raise _wrong(name, "true or false", value)

    def integer(self, name: str, default: int, *, minimum: int | None = None, maximum: int | None = None) -> int:
        """Return a whole number from `minimum` to `maximum`."""
        value = self._integer(name, "integer", default, minimum, maximum)
        return default if value is None else value

    def optional_integer(
        self, name: str, *, minimum: int | None = None, maximum: int | None = None, digits: bool = False
    ) -> int | None:
        """Return a whole number from `minimum` to `maximum`, or None if absent.

        Args:
            digits: True also accepts a string of digits.
        """
        return self._integer(name, ["integer", "string"] if digits else "integer", None, minimum, maximum)

    def _integer(self, name: str, kind: Kind, default: Any, minimum: int | None, maximum: int | None) -> int | None:
        value = self._take(name, kind, default, minimum=minimum, maximum=maximum)
        if value is None:
            return None
        if kind != "integer" and isinstance(value, str) and _DIGITS(value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(name, "a whole number", value)
        _check_range(name, value, MIN_INT64 if minimum is None else minimum, maximum or MAX_INT64, None)
        return value

    def number(
        self,
        name: str,
        default: float,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        above: float | None = None,
    ) -> float:
        """Return a finite number from `minimum` to `maximum`. It must be greater than `above`."""
        value = self._take(name, "number", default, minimum=minimum, maximum=maximum, exclusiveMinimum=above)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            raise _wrong(name, "a finite number", value) from None
        if not math.isfinite(number):
            raise _wrong(name, "a finite number", value)
        _check_range(name, number, minimum, maximum, above)
        return number

    def optional_string(self, name: str) -> str | None:
        value = self._take(name, "string", None)
        if value is None or isinstance(value, str):
            return value
        raise _wrong(name, "a string", value)

    def optional_object(self, name: str) -> dict[str, Any] | None:
        value = self._take(name, "object", None)
        if value is None or isinstance(value, dict):
            return value
        raise _wrong(name, "an object", value)

    def value(self, name: str, kind: Kind) -> Any:
        """Return the value unchanged, or None if absent.

        Args:
            kind: The expected JSON type. The items of an array are strings.
        """
        return self._take(name, kind, None, items={"type": "string"} if kind == "array" else None)

    def strings(
        self, name: str, *, most: int = MAX_STRINGS, longest: int = MAX_STRING_LENGTH, empty: bool = False
    ) -> tuple[str, ...]:
        """Return a list of strings. A single string counts as a list of one string.

        Args:
            empty: True also accepts empty strings.
        """
        items = {"type": "string", "maxLength": longest}
        value = self._take(name, ["array", "string"], [], items=items, maxItems=most)
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(name, "a list of strings", value)
        if "" in value and not empty:
            raise InvalidParameter(name, "must not contain an empty string")
        if len(value) > most or any(len(item) > longest for item in value):
            raise InvalidParameter(name, f"may hold {most} strings of {longest} characters at most")
        return tuple(value)

    def integers(self, name: str, *, minimum: int) -> tuple[int, ...]:
        value = self._take(name, "array", [], items={"type": "integer", "minimum": minimum})
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise _wrong(name, "a list of whole numbers", value)
        for item in value:
            _check_range(name, item, minimum, MAX_INT64, None)
        return tuple(value)

    def logit_bias(self, name: str) -> dict[int, float] | None:
        """Return a mapping of token ids, which are strings in JSON, to numbers from -100 to 100."""
        value = self._take(name, "object", None, additionalProperties={"type": "number"})
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _wrong(name, "an object of token ids and numbers", value)
        biases = {}
        for token_id, bias in value.items():
            numeric = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not (_DIGITS(token_id) and numeric and -100 <= bias <= 100):
                raise InvalidParameter(
                    name, f"must map token ids to numbers from -100 to 100, got {shown({token_id: bias})}"
                )
            biases[int(token_id)] = float(bias)
        return biases

    def _take(self, name: str, kind: Kind, default: Any, **limits: Any) -> Any:
        """Return the value, or the default.

        Args:
            kind: The type of the value, as in a JSON schema.
            limits: Further keywords of the JSON schema.
        """
        self._read.add(name)
        if (given := self._values.get(name)) is None:
            return default
        if (value := self._meant(kind, given)) is None:
            del self._values[name]
            return default
        return value

    def _meant(self, kind: Kind, value: Any) -> Any:
        """Return the value unchanged. Subclasses may convert it to the expected type."""
        return value


Reader = Callable[[Mapping[str, Any]], ParameterReader]


def _check_range(name: str, value: float, minimum: float | None, maximum: float | None, above: float | None) -> None:
    if minimum is not None and value < minimum:
        raise InvalidParameter(name, f"must be at least {minimum:g}, got {value}")
    if above is not None and value <= above:
        raise InvalidParameter(name, f"must be greater than {above:g}, got {value}")
    if maximum is not None and value > maximum:
        raise InvalidParameter(name, f"must be at most {maximum:g}, got {value}")


def _wrong(name: str, expected: str, value: Any) -> InvalidParameter:
    return InvalidParameter(name, f"must be {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return the beginning of a value in JSON, for a message."""
    text = ""
    for part in _encoder.iterencode(value):  # The value may be long or deeply nested.
        text += part
        if len(text) > SHOWN:
            return text[: SHOWN - 3] + "..."
    return text
