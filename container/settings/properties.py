"""Reads serving.properties as Java does."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

import javaproperties

from container.settings.values import NOT_TEXT, Value

FILE_NAME = "serving.properties"
_LINE_END = re.compile("\r\n|\r|\n")


def read_properties(directory: Path, problems: list[str]) -> dict[str, Value]:
    """Return the values of the file in a model directory, by key. Add the file's faults to `problems`."""
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{FILE_NAME} cannot be read: {error.strerror or type(error).__name__}")
        return {}
    return parse_properties(data, problems)


def parse_properties(data: bytes, problems: list[str]) -> dict[str, Value]:
    r"""Parse ISO-8859-1 text with \uXXXX escapes, comments and continued lines.

    Trailing blanks are kept. If a key occurs twice, the last value counts. A byte order mark is skipped, although Java
    treats it as part of the first key.
    """
    try:
        elements = list(javaproperties.parse(data.removeprefix(codecs.BOM_UTF8).decode("iso-8859-1")))
    except javaproperties.InvalidUEscapeError as error:
        problems.append(
            f"{FILE_NAME}: {ascii(error.escape)[1:-1]} is not an escape; "
            r"allowed: \u and four hexadecimal digits (a backslash itself is written \\)"
        )
        return {}
    values: dict[str, Value] = {}
    line = 1
    for element in elements:
        if isinstance(element, javaproperties.KeyValue):
            key, text = element.key, element.value
            if NOT_TEXT.search(text) or not key.isprintable():
                problems.append(
                    f"{FILE_NAME}, line {line}: {key!a} has a NUL or half a surrogate pair, or cannot be shown"
                )
            else:
                values[key] = Value(text, f"{FILE_NAME}: {key}", line)
        line += len(_LINE_END.findall(element.source))
    return values
