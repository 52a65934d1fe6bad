"""Parsers for the values of settings."""

from __future__ import annotations

import ast
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")
Scalar = str | int | float | bool

TRUE = frozenset({"true", "1", "yes", "on"})
FALSE = frozenset({"false", "0", "no", "off"})
TRUE_OR_FALSE = "true or false (also 1/0, yes/no, on/off)"
# Like vLLM, this allows decimals only with the units of 1000: `1.5k`, but not `1.5K`.
SIZE_WITH_UNIT = r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]"
_LONGEST = 10**9  # The longest time in seconds. Python's clocks and timeouts fail with far larger numbers.
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_SIZE = re.compile(SIZE_WITH_UNIT)
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_ZERO = re.compile(r"0+(\.0*)?")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parser(Generic[T]):
    """Converts text to a value. `allowed` describes the values for error messages and the documentation."""

    # Gets the text without blanks at its ends, unless `keeps_blanks` is set. Raises ValueError for a value that is not
    # allowed.
    convert: Callable[[str], T]
    allowed: str
    keeps_blanks: bool = False  # Whether blanks at the ends of the text belong to the value.
    words: tuple[str, ...] = ()  # The allowed words, if the value must be one of a few words.
    writes_json: bool = False  # Whether reports show the value as JSON instead of the given text.

    def __call__(self, text: str) -> T:
        """Convert `text`.

        Raises:
            ValueError: The value is not allowed.
        """
        try:
            return self.convert(text if self.keeps_blanks else text.strip())
        except (RecursionError, OverflowError):  # JSON that is nested too deeply, or a number that is too large.
            raise ValueError(text) from None

    def shown(self, text: str) -> Scalar:
        """Return the value of `text` for a report.

        Raises:
            ValueError: The value is not allowed.
        """
        value = self(text)
        if self.writes_json:
            return json.dumps(value)
        return value if isinstance(value, str | int | float) else text.strip()


def integer(minimum: int, maximum: int | None = None) -> Parser[int]:
    """Return a parser for integers from `minimum` to `maximum`, both included."""

    def convert(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(text)
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Parser(convert, f"an integer {limits}")


def size(minimum: int) -> Parser[int]:
    """Return a parser for integers, with or without one of vLLM's units: `8k` is 8000, `8K` is 8192."""
    number = integer(minimum)

    def convert(text: str) -> int:
        if not _SIZE.fullmatch(text):
            return number.convert(text)
        base = 1000 if text[-1].islower() else 1024
        return number.convert(str(int(float(text[:-1]) * base ** (1 + "kmgt".index(text[-1].lower())))))

    return Parser(convert, f"{number.allowed}, or a number such as 8k (8000) or 8K (8192)")


def integer_or(word: str, minimum: int) -> Parser[int | str]:
    """Return a parser for an integer or one word. The word's case does not matter."""
    number = integer(minimum)
    return Parser(lambda text: word if text.lower() == word else number.convert(text), f"{number.allowed}, or {word}")


def choice(words: Mapping[str, T]) -> Parser[T]:
    """Return a parser that maps words to values. The case of a word does not matter."""
    folded = {word.lower(): value for word, value in words.items()}

    def convert(text: str) -> T:
        if text.lower() not in folded:
            raise ValueError(text)
        return folded[text.lower()]

    return Parser(convert, ", ".join(words), words=tuple(words))


def one_of(words: Mapping[str, T]) -> Parser[Any]:
    """Return a parser that maps words to values, and returns any other text unchanged.

    The case of a word does not matter. `Setting.serves` refuses other text, and the message has the setting's advice.
    """
    return Parser(lambda text: words.get(text.lower(), text), ", ".join(dict.fromkeys(map(str, words.values()))))


def matching(pattern: str, allowed: str, flags: re.RegexFlag = re.NOFLAG) -> Parser[str]:
    """Return a parser for text that fully matches a regular expression."""
    compiled = re.compile(pattern, flags)
    return checked(lambda text: compiled.fullmatch(text) is not None, allowed)


def json_value(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has NaN, an infinite number or a duplicate key.
    """
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def names(text: str) -> tuple[str, ...]:
    """Return the names in a JSON array, or in a list with commas or blanks as separators.

    Quotes and empty names are dropped.
    """
    if text.lstrip().startswith("["):
        values = json_value(text)
    else:
        values = [word.strip("\"'") for word in text.replace(",", " ").split()]
    return tuple(value for value in values if value)


def _assignments(text: str) -> dict[str, str]:
    """Return the variables in `K=V,K=V`. A comma without a `K=` after it belongs to the value before it.

    As in LMI, blanks around names and values are dropped. A comma at the end is dropped, too.

    Raises:
        ValueError: The text does not begin with a name and `=`.
    """
    variables: dict[str, str] = {}
    name = ""
    for part in text.rstrip(", \t").split(","):
        if found := _ASSIGNMENT.fullmatch(part):
            name, variables[found[1]] = found[1], found[2]
        elif name:
            variables[name] += f",{part}"
        else:
            raise ValueError(text)
    return {name: value.strip() for name, value in variables.items()}


def checked(check: Callable[[str], object], allowed: str) -> Parser[str]:
    """Return a parser that checks the text and returns it unchanged.

    Args:
        check: Returns False or raises ValueError for text that is not allowed.
        allowed: The description of the allowed text.
    """

    def convert(text: str) -> str:
        if check(text) is False:
            raise ValueError(text)
        return text

    return Parser(convert, allowed)


def _positive(text: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < value <= _LONGEST:
        raise ValueError(text)
    return value


def _strings(text: str) -> tuple[str, ...]:
    """Return the strings of a JSON array, or of a Python list. LMI's examples have Python lists."""
    try:
        values = json_value(text)
    except ValueError:
        try:
            values = ast.literal_eval(text)
        except (SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(text) from None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(text)
    return tuple(values)


_ADAPTER_KEYS = frozenset({"name", "path", "revision", "base_model_name", "is_3d_lora_weight"})
_ADAPTER_WORD = re.compile(r"[^\s,{][^\s,]*")


def _adapters(text: str) -> tuple[dict[str, str], ...]:
    """Return LoRA adapters, each with `name` and `path`, and optionally `revision`.

    The text has the form of `vllm serve --lora-modules`. Each adapter is `name=path` or a JSON object. Adapters are
    separated by blanks or commas, or are the items of a JSON array.
    """
    given = json_value(text) if text.startswith("[") else list(_adapter_parts(text))
    adapters = [_adapter(each) for each in given]
    if not adapters or len({adapter["name"] for adapter in adapters}) < len(adapters):
        raise ValueError(text)
    return tuple(adapters)


def _adapter_parts(text: str) -> Iterator[Any]:
    at = 0
    while at < len(text):
        if text[at] == "{":
            value, at = _JSON.raw_decode(text, at)
            yield value
        elif found := _ADAPTER_WORD.match(text, at):
            yield found[0]
            at = found.end()
        else:
            at += 1


def _adapter(given: Any) -> dict[str, str]:
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = json_value(given)
    elif isinstance(given, str):
        name, _, path = given.partition("=")
        given = {"name": name.strip(), "path": path.strip()}
    if not isinstance(given, dict) or given.keys() - _ADAPTER_KEYS or given.get("is_3d_lora_weight"):
        raise ValueError(given)
    adapter = {key: given[key] for key in ("name", "path", "revision") if given.get(key) is not None}
    if not {"name", "path"} <= adapter.keys() or not all(isinstance(part, str) and part for part in adapter.values()):
        raise ValueError(given)
    return adapter


def _names(text: str) -> tuple[str, ...]:
    found = names(text)
    if not text or not all(isinstance(name, str) for name in found):
        raise ValueError(text)
    return found


def _networks(text: str) -> tuple[str, ...]:
    found = _names(text)
    for network in found:
        ipaddress.ip_network(network)
    return found


TEXT = matching(".+", "text that is not empty", re.DOTALL)
PROMPT = Parser(str, "text", keeps_blanks=True)
BOOLEAN = Parser(choice(dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False)).convert, TRUE_OR_FALSE)
STRINGS = Parser(_strings, 'strings as a JSON array, such as ["a", "b"]', writes_json=True)
NAMES = Parser(_names, "names with commas between, or a JSON array")
NAMES_OR_NONE = Parser(lambda text: _names(text) if text else (), NAMES.allowed)
NETWORKS = Parser(_networks, "networks such as 10.0.0.0/8, with commas between")
ADAPTERS = Parser(
    _adapters,
    "name=path (blanks or commas separate several of them), or JSON objects with name and path",
    writes_json=True,
)
ASSIGNMENTS = Parser(_assignments, "NAME=value (commas separate several of them)")
MILLISECONDS = Parser(
    lambda text: int(integer(0, _LONGEST * 1000).convert(text)) / 1000,
    f"milliseconds, an integer from 0 to {_LONGEST * 1000}",
)
SECONDS = Parser(_positive, f"seconds, a number above 0, at most {_LONGEST}")
SECONDS_OR_NEVER = Parser(
    lambda text: 0.0 if _ZERO.fullmatch(text) else _positive(text), f"seconds, a number from 0 to {_LONGEST}"
)
DTYPE = choice(
    {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float32": "float32"}
    | {"float16": "float16", "bfloat16": "bfloat16", "float": "float32", "half": "float16"}
)
