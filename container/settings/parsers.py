"""From a setting's text to its value: each parser knows, in words, what it allows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from container.error_rates import error_rate

Scalar = str | int | float | bool

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_ZERO = re.compile(r"0+(\.0*)?")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
TRUE = frozenset({"true", "1", "yes", "on"})
FALSE = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class Parser:
    """Converts text, already stripped of blanks; `convert` raises ValueError for what is not allowed."""

    convert: Callable[[str], Scalar]
    allowed: str

    def __call__(self, text: str) -> Scalar:
        """Convert `text`, whose blanks at either end do not count.

        Raises:
            ValueError: the value is not allowed; `allowed` says what is.
        """
        return self.convert(text.strip())


def _boolean(text: str) -> bool:
    folded = text.lower()
    if folded in TRUE:
        return True
    if folded in FALSE:
        return False
    raise ValueError(text)


def _non_empty(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def integer(minimum: int, maximum: int | None = None) -> Parser:
    """Decimal digits within a range, both ends included."""

    def convert(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(text)
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Parser(convert, f"an integer {limits}")


def _positive(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(text)
    return value


def _positive_or_0(text: str) -> float:
    return 0.0 if _ZERO.fullmatch(text) else _positive(text)


def _error_rate(text: str) -> str:
    error_rate(text)
    return text


def choice(values: Mapping[str, Scalar] | tuple[str, ...]) -> Parser:
    """One of some words, in any case; a mapping gives synonyms."""
    words: Mapping[str, Scalar] = values if isinstance(values, Mapping) else {word: word for word in values}
    folded = {word.lower(): value for word, value in words.items()}

    def convert(text: str) -> Scalar:
        try:
            return folded[text.lower()]
        except KeyError:
            raise ValueError(text) from None

    return Parser(convert, ", ".join(words))


def matching(pattern: re.Pattern[str], allowed: str) -> Parser:
    """Text that matches a pattern as a whole."""

    def convert(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(text)
        return text

    return Parser(convert, allowed)


def integer_or(word: str, minimum: int) -> Parser:
    """An integer, or one word in any case."""
    number = integer(minimum)

    def convert(text: str) -> Scalar:
        return word if text.lower() == word else number.convert(text)

    return Parser(convert, f"{number.allowed}, or {word}")


def _milliseconds(text: str) -> float:
    return int(integer(0).convert(text)) / 1000


def _strings(text: str) -> str:
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(text)
    return text


def names(text: str) -> tuple[str, ...]:
    """Names of a list: a JSON array, or with commas or blanks between; quotes around one, and empty ones, fall away."""
    if text.lstrip().startswith("["):
        values = json.loads(text)
    else:
        values = [word.strip("\"'") for word in text.replace(",", " ").split()]
    return tuple(value for value in values if value)


def _names(text: str) -> str:
    if not _non_empty(text) or not all(isinstance(name, str) for name in names(text)):
        raise ValueError(text)
    return text


_FUNCTION_NAME = re.compile(r"\w+")
_BUILT_IN_FORMATTERS = ("json", "jsonlines", "sse")


def _formatter(text: str) -> str:
    if text.lower() in _BUILT_IN_FORMATTERS:
        return text.lower()
    if not _FUNCTION_NAME.fullmatch(text):
        raise ValueError(text)
    return text


ANYTHING = Parser(lambda text: text, "anything")
STRINGS = Parser(_strings, 'strings as a JSON array, such as ["a", "b"]')
NAMES = Parser(_names, "names with commas between, or a JSON array of them")
TEXT = Parser(_non_empty, "text that is not empty")
BOOLEAN = Parser(_boolean, "true or false (also 1/0, yes/no, on/off)")
FORMATTER = Parser(_formatter, "json, jsonlines, sse, or the name of a function in model.py")
MILLISECONDS = Parser(_milliseconds, "milliseconds, an integer of at least 0")
SECONDS = Parser(_positive, "seconds, a number above 0")
SECONDS_OR_NEVER = Parser(_positive_or_0, "seconds, a number of at least 0")
ERROR_RATE = Parser(_error_rate, "a number, or a number and an ISO-8601 duration, such as 10/PT5M")
HTTP_ERROR = integer(400, 599)
HEADER_NAME = matching(_HEADER_NAME, "the name of an HTTP header")
HEADER_VALUE = matching(re.compile(r"[\x20-\x7e]+"), "the value of an HTTP header, in ASCII")
MODEL_NAME = matching(_MODEL_NAME, "letters, digits and _ . -")
DTYPE = choice(
    {
        "auto": "auto",
        "fp32": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float32": "float32",
        "float16": "float16",
        "bfloat16": "bfloat16",
        "float": "float32",
        "half": "float16",
    }
)
