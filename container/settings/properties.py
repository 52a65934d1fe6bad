"""serving.properties, as Java reads it."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

import javaproperties

from container.settings.values import NOT_TEXT, Value

FILE_NAME = "serving.properties"


def read_properties(directory: Path, problems: list[str], warnings: list[str]) -> dict[str, Value]:
    """The values of a model directory's file, by key; what is wrong with it is added to `problems` and `warnings`."""
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{FILE_NAME} cannot be read: {error.strerror or type(error).__name__}")
        return {}
    return parse_properties(data, problems, warnings)


def parse_properties(data: bytes, problems: list[str], warnings: list[str]) -> dict[str, Value]:
    r"""Parse ISO-8859-1 text with \uXXXX escapes, comments and continued lines.

    Trailing blanks are kept. Of a key that occurs twice, the last value counts. A byte order mark, which Java takes for
    part of the first key, is skipped.
    """
    values: dict[str, Value] = {}
    lines: dict[str, int] = {}
    if data.startswith(codecs.BOM_UTF8):
        data = data.removeprefix(codecs.BOM_UTF8)
        warnings.append(f"{FILE_NAME} begins with a byte order mark, which is ignored; LMI takes it for text")
    for line, key, text in _entries(data.decode("iso-8859-1"), problems):
        if NOT_TEXT.search(text) or not key.isprintable():
            problems.append(f"{FILE_NAME}, line {line}: a NUL, half a surrogate pair or a key that cannot be shown")
            continue
        if key in values and values[key].text != text:
            warnings.append(f"{FILE_NAME}, line {line}: {key} is in line {lines[key]} already; the last value counts")
        values[key], lines[key] = Value(text, f"{FILE_NAME}: {key}"), line
    if not data.isascii() and _is_utf8(data):
        warnings.append(
            f"{FILE_NAME} seems to be UTF-8; as a Java properties file it is read as ISO-8859-1: "
            r"write other characters as \uXXXX"
        )
    return values


def _entries(text: str, problems: list[str]) -> Iterator[tuple[int, str, str]]:
    """Number of the first line, key and value of each entry; an entry with a wrong escape becomes a problem."""
    stream = io.StringIO(text, newline=None)
    text, line, position = stream.getvalue(), 1, 0
    while position < len(text):
        try:
            element = next(javaproperties.parse(stream))  # reads the lines of one entry
            if isinstance(element, javaproperties.KeyValue):
                yield line, element.key, element.value
        except javaproperties.InvalidUEscapeError as error:
            escape = "".join(character if character.isprintable() else "?" for character in error.escape)
            problems.append(
                f"{FILE_NAME}, line {line}: {escape} is not an escape; "
                r"allowed: \u and four hexadecimal digits (a backslash itself is written \\)"
            )
        line += text.count("\n", position, stream.tell())
        position = stream.tell()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
