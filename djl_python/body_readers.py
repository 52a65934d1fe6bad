"""Bodies by content type: which kind one is, and readers of text and images.

Readers raise ValueError for a broken body, and ImportError without the package that they need.
"""

from __future__ import annotations

import csv
import io
import json
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from djl_python.lazy_import import require

if TYPE_CHECKING:
    from PIL.Image import Image

Body = bytes | bytearray
_MISSING_CELLS = 1_000_000
"""Cells of CSV that rows may lack. Each takes memory, although nothing was sent for it."""


class Kind(Enum):
    """How a body is read."""

    UNKNOWN = auto()
    """No content type was given."""
    JSON = auto()
    CSV = auto()
    PLAIN = auto()
    TEXT = auto()
    """Any other `text/*`."""
    IMAGE = auto()
    NPZ = auto()
    ND_LIST = auto()
    """An npy file, too."""
    FORM = auto()
    BYTES = auto()


_KINDS = {
    "application/json": Kind.JSON,
    "text/csv": Kind.CSV,
    "text/plain": Kind.PLAIN,
    "tensor/npz": Kind.NPZ,
    "tensor/ndlist": Kind.ND_LIST,
    "application/x-npy": Kind.ND_LIST,
    "application/x-www-form-urlencoded": Kind.FORM,
    "text/": Kind.TEXT,
    "image/": Kind.IMAGE,
}
"""By what a content type contains, the first that fits."""


def kind_of(content_type: str | None) -> Kind:
    """The kind of content; parameters such as `; charset=utf-8` and the case of letters do not matter."""
    if not content_type:
        return Kind.UNKNOWN
    return next((kind for part, kind in _KINDS.items() if part in content_type.lower()), Kind.BYTES)


def read_text(body: Body) -> str:
    """UTF-8 text."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The body is not UTF-8: byte 0x{body[error.start]:02x} at {error.start}") from error


def read_json(body: Body) -> Any:
    """One JSON document."""
    text = read_text(body)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("The body is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"The body is not JSON: {error}") from error


def read_csv(body: Body) -> list[dict[str, str]]:
    """Rows by the names of the header."""
    return read_csv_text(read_text(body))[1]


def read_csv_text(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the header, and rows by them. A cell that a row lacks is None.

    Raises ValueError: it is not CSV, or too many cells are missing: short rows below a long header would fill memory.
    """
    try:
        reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
        names, rows, cells = list(reader.fieldnames or ()), [], 0
        for row in reader:
            cells += len(names)
            # Each cell that was sent has at least one character, its separator.
            if cells > len(text) + _MISSING_CELLS:
                raise ValueError(f"The body is not CSV: rows lack too many of the header's {len(names)} columns")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"The body is not CSV: {error}") from error
    return names, rows


def read_image(body: Body) -> Image:
    """A Pillow image, decoded, because Pillow reports a broken image only when it decodes it."""
    pillow = require("PIL.Image", "an image body", "Pillow")
    try:
        image: Image = pillow.open(io.BytesIO(body))
        image.load()
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise ValueError(f"The body is not an image that can be read: {error}") from error
    return image
