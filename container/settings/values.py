"""The text of a setting, with its source. Quotes the text in messages, and parses it."""

from __future__ import annotations

import ast
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engines.vllm.arguments import table as vllm_arguments

Scalar = str | int | float | bool

TRUE, FALSE = vllm_arguments.TRUE, vllm_arguments.FALSE
FORMATTERS = ("json", "jsonlines", "sse")  # The built-in output formatters.
HIDDEN = "***"
LONGEST = 10**9  # Seconds. Clocks and waits of Python fail with far larger numbers.
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")  # Characters that no value may have.
_LONGEST_QUOTE = 200
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_SIZE = re.compile(vllm_arguments.SIZE_WITH_UNIT)
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_ZERO = re.compile(r"0+(\.0*)?")
_FUNCTION_NAME = re.compile(r"\w+")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=(.*)", re.DOTALL)

# Names of settings whose whole value is a credential. Names such as `max_num_batched_tokens` do not match.
_SECRET_NAME = re.compile(r"(token|api_?keys?|password|passwd|secret|credentials?|access_?key)$", re.IGNORECASE)
_WHOLLY_HIDDEN = frozenset({"option.env"})
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{12,}"  # a Hugging Face token
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # an AWS access key
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password in a URL
)


def masked(name: str, text: str) -> str:
    """Return the text of a setting, with credentials replaced.

    The setting's name and the text itself show whether it holds a credential.
    """
    if text and (name in _WHOLLY_HIDDEN or _SECRET_NAME.search(name)):
        return HIDDEN
    return _SECRET_VALUE.sub(HIDDEN, text)


def quoted(name: str, text: str) -> str:
    """Return the `masked` text for a message: in quotes, on one line, and shortened."""
    shown = masked(name, text)
    if len(shown) > _LONGEST_QUOTE:
        shown = shown[:_LONGEST_QUOTE] + "..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a value, and its source: "serving.properties: option.dtype" or "environment: OPTION_DTYPE"."""

    text: str
    source: str
    line: int = 0  # Of the file; 0: the value is not in a file.

    @property
    def place(self) -> str:
        """The source for a message that names the key."""
        return f"{self.source.partition(':')[0]}, line {self.line}" if self.line else self.source

    @property
    def word(self) -> str:
        return self.text.strip().lower()

    def describe(self, key: str) -> str:
        """Return `<key> is "<text>" (<source>)`, for a message."""
        return f"{key} is {quoted(key, self.text)} ({self.place})"


def is_true(value: Value | None) -> bool:
    """Return True if the value is one of the words for true."""
    return value is not None and value.word in TRUE


@dataclass(frozen=True, slots=True)
class Parser:
    """Converts text to a value. `allowed` describes the values for error messages and the documentation."""

    # Takes text without blanks at its ends. Raises ValueError for a value that is not allowed.
    convert: Callable[[str], Scalar]
    allowed: str
    keeps_blanks: bool = False  # Blanks at the ends of a text belong to the value.
    words: tuple[str, ...] = ()  # The allowed words, if there are some.

    def __call__(self, text: str) -> Scalar:
        """Convert `text`.

        Raises:
            ValueError: The value is not allowed.
        """
        try:
            return self.convert(text if self.keeps_blanks else text.strip())
        except (RecursionError, OverflowError):  # JSON that is nested too deeply, or a number that is too large.
            raise ValueError(text) from None


def integer(minimum: int, maximum: int | None = None) -> Parser:
    """Return a parser of integers within a range. The range includes both ends."""

    def convert(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise ValueError(text)
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Parser(convert, f"an integer {limits}")


def size(minimum: int) -> Parser:
    """Return a parser of integers that may have one of vLLM's units: `8k` is 8000, `8K` is 8192."""
    number = integer(minimum)

    def convert(text: str) -> Scalar:
        if not _SIZE.fullmatch(text):
            return number.convert(text)
        base = 1000 if text[-1].islower() else 1024
        return number.convert(str(int(float(text[:-1]) * base ** (1 + "kmgt".index(text[-1].lower())))))

    return Parser(convert, f"{number.allowed}, or one such as 8k (8000) or 8K (8192)")


def integer_or(word: str, minimum: int) -> Parser:
    """Return a parser that takes an integer, or one word in any case."""
    number = integer(minimum)
    return Parser(lambda text: word if text.lower() == word else number.convert(text), f"{number.allowed}, or {word}")


def choice(values: Mapping[str, Scalar] | tuple[str, ...]) -> Parser:
    """Return a parser of some words in any case. A mapping has the value of each word."""
    words: Mapping[str, Scalar] = values if isinstance(values, Mapping) else {word: word for word in values}
    folded = {word.lower(): value for word, value in words.items()}

    def convert(text: str) -> Scalar:
        if text.lower() not in folded:
            raise ValueError(text)
        return folded[text.lower()]

    return Parser(convert, ", ".join(words), words=tuple(words))


def matching(pattern: str, allowed: str, flags: re.RegexFlag = re.NOFLAG) -> Parser:
    """Return a parser of text. The whole text has to match a regular expression."""
    compiled = re.compile(pattern, flags)
    return checked(lambda text: compiled.fullmatch(text) is not None, allowed)


def json_value(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: The text is not JSON, has a key twice or NaN, or is nested too deeply.
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
    """Return the names in a JSON array, or in a list with commas or blanks. Quotes and empty names are dropped."""
    if text.lstrip().startswith("["):
        values = json_value(text)
    else:
        values = [word.strip("\"'") for word in text.replace(",", " ").split()]
    return tuple(value for value in values if value)


def assignments(text: str) -> dict[str, str]:
    """Return the variables in `K=V,K=V`. If no name and `=` follow a comma, the comma belongs to the value before it.

    Blanks around names and values are dropped, as in LMI, and so is a comma at the end.

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


def checked(check: Callable[[str], object], allowed: str) -> Parser:
    """Return a parser that returns the text unchanged.

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
    if not 0 < value <= LONGEST:
        raise ValueError(text)
    return value


def _formatter(text: str) -> str:
    if text.lower() in FORMATTERS:
        return text.lower()
    if not _FUNCTION_NAME.fullmatch(text):
        raise ValueError(text)
    return text


def _strings(text: str) -> str:
    """Return a list of strings as JSON. The quotes may be Python's, as in LMI's examples."""
    try:
        values = json_value(text)
    except ValueError:
        try:
            values = ast.literal_eval(text)
        except (SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(text) from None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(text)
    return json.dumps(values)


_ADAPTER_KEYS = frozenset({"name", "path", "revision", "base_model_name", "is_3d_lora_weight"})
_ADAPTER_WORD = re.compile(r"[^\s,{][^\s,]*")


def _adapters(text: str) -> str:
    """Return LoRA adapters as a JSON array of objects with `name`, `path` and perhaps `revision`.

    The forms are as in `vllm serve --lora-modules`: `name=path` or a JSON object, several with blanks or commas
    between, or all of them in a JSON array.
    """
    given = json_value(text) if text.startswith("[") else list(_adapter_parts(text))
    adapters = [_adapter(each) for each in given]
    if not adapters or len({adapter["name"] for adapter in adapters}) < len(adapters):
        raise ValueError(text)
    return json.dumps(adapters)


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


def _are_networks(text: str) -> bool:
    return _are_names(text) and all(ipaddress.ip_network(network) for network in names(text))


def _are_names(text: str) -> bool:
    return bool(text) and all(isinstance(name, str) for name in names(text))


TEXT = matching(".+", "text that is not empty", re.DOTALL)
PROMPT = Parser(str, "text", keeps_blanks=True)
_WORDS = choice(dict.fromkeys(TRUE, True) | dict.fromkeys(FALSE, False))
BOOLEAN = Parser(_WORDS.convert, vllm_arguments.TRUE_OR_FALSE)
STRINGS = Parser(_strings, 'strings as a JSON array, such as ["a", "b"]')
NAMES = checked(_are_names, "names with commas between, or a JSON array")
NAMES_OR_NONE = checked(lambda text: not text or _are_names(text), NAMES.allowed)
NETWORKS = checked(_are_networks, "networks such as 10.0.0.0/8, with commas between")
ADAPTERS = Parser(_adapters, "name=path, further ones after a blank or a comma, or JSON objects with name and path")
ASSIGNMENTS = checked(assignments, "NAME=value, further ones after a comma")
FORMATTER = Parser(_formatter, "json, jsonlines, sse, or the name of a function in model.py")
FUNCTION_NAME = matching(r"[^\W\d]\w*", "the name of a function")
MILLISECONDS = Parser(
    lambda text: int(integer(0, LONGEST * 1000).convert(text)) / 1000,
    f"milliseconds, an integer from 0 to {LONGEST * 1000}",
)
SECONDS = Parser(_positive, f"seconds, a number above 0, at most {LONGEST}")
SECONDS_OR_NEVER = Parser(
    lambda text: 0.0 if _ZERO.fullmatch(text) else _positive(text), f"seconds, a number from 0 to {LONGEST}"
)
HOST = matching(r"[A-Za-z0-9_.:%-]+", "a host name or an address")
HTTP_ERROR = integer(400, 599)
HEADER_NAME = matching(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "the name of an HTTP header")
HEADER_VALUE = matching(r"[\x20-\x7e]+", "the value of an HTTP header, in ASCII")
MODEL_NAME = matching(r"[A-Za-z0-9_.-]+", "letters, digits and _ . -")
LOG_LEVEL = choice({level: level for level in ("debug", "info", "warning", "error", "critical")} | {"warn": "warning"})
DTYPE = choice(
    {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float32": "float32"}
    | {"float16": "float16", "bfloat16": "bfloat16", "float": "float32", "half": "float16"}
)
