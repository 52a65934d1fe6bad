"""The input of a handler: its properties and its content. The content can be read in several formats."""

from __future__ import annotations

import csv
import io
import json
from functools import cache
from socket import socket
from typing import TYPE_CHECKING, Any

from djl_python import wire
from djl_python.lazy_import import require
from djl_python.np_util import from_nd_list, from_npz
from djl_python.pair_list import PairList

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

_INDEX = slice(6, 9)
_NAME = slice(10, None)


Body = bytes | bytearray
# The maximum number of missing cells in a CSV body. A missing cell takes memory, although the client has not sent it.
_MISSING_CELLS = 1_000_000


# For each kind of content, the name of the method that reads it. `decode` is also called with objects of other classes,
# so only methods that LMI's `Input` has are used.
READERS = {
    "application/json": "get_as_json",
    "text/csv": "get_as_string",
    "text/plain": "get_as_string",
    "tensor/npz": "get_as_npz",
    "tensor/ndlist": "get_as_numpy",
    "application/x-npy": "get_as_numpy",
    "application/x-www-form-urlencoded": "get_as_string",
    "text/": "get_as_string",
    "image/": "get_as_image",
    "": "get_as_bytes",
}
# LMI's `decode` reads these kinds of content, but LMI's `get_data` does not.
_ONLY_DECODED = ("application/x-npy", "application/x-www-form-urlencoded")


def kind_of(content_type: str | None) -> str:
    """Return the first key of `READERS` that a content type contains, or "". Case is ignored."""
    return next(kind for kind in READERS if kind in (content_type or "").lower())


class Input:
    """A request, a batch of requests, or the call that initializes a handler. The initializing call has no content."""

    def __init__(self) -> None:
        self.function_name: str | None = None
        self.properties: dict[str, Any] = {}
        self.content = PairList()

    def __str__(self) -> str:
        lines = [f"{key}: {self.get_data(key)}" for key in self.content.get_keys()]
        return "\n".join([f"properties: {self.properties}", *lines])

    def get_function_name(self) -> str | None:
        return self.function_name

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def get_property(self, key: str) -> Any:
        """Return a property, or None. The case of the name is ignored."""
        return next((value for name, value in self.properties.items() if name.lower() == key.lower()), None)

    def get_content(self) -> PairList:
        return self.content

    def contains_key(self, key: str) -> bool:
        return self.content.get(key) is not None

    def is_empty(self) -> bool:
        return self.content.is_empty()

    def is_batch(self) -> bool:
        return "batch_size" in self.properties

    def get_batch_size(self) -> int:
        return int(self.properties.get("batch_size", 1))

    def get_batches(self) -> list[Input]:
        """Return the requests of a batch, or `[self]` if this is not a batch.

        A key in a batch is `batch_NNN.name`, with any character in place of the dot. Properties without this prefix
        belong to the whole batch, and are left out.

        Raises:
            ValueError: A content key does not have the prefix, or a number in a prefix is not below the batch size.
        """
        if not self.is_batch():
            return [self]
        batch = [Input() for _ in range(self.get_batch_size())]
        for key, value in self.properties.items():
            if _is_batch_key(key):
                self._item(batch, key).properties[key[_NAME]] = value
        for content_key, value in zip(self.content.keys, self.content.values, strict=True):
            if content_key is None or not _is_batch_key(content_key):
                raise ValueError(f"Unexpected key in batch input: {content_key}")
            self._item(batch, content_key).content.add(content_key[_NAME], value)
        return batch

    @staticmethod
    def _item(batch: list[Input], key: str) -> Input:
        index = int(key[_INDEX])
        if index >= len(batch):
            raise ValueError(f"The key {key} does not belong to a batch of {len(batch)}")
        return batch[index]

    def get_data(self, key: str | None = None) -> Any:
        """Return the content in the format that the content type names. `docs/handler_sdk.md` has a table of formats.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The content is malformed.
            ImportError: The package for this kind of content is not installed.
        """
        kind = kind_of(self.get_property("content-type"))
        return self.get_as_bytes(key) if kind in _ONLY_DECODED else getattr(self, READERS[kind])(key)

    def get_as_bytes(self, key: str | None = None) -> Any:
        """Return the bytes of a content entry, or None if the input has no content.

        Args:
            key: The entry's name. The default is the entry `data`, or the first entry if there is no `data`.

        Raises:
            KeyError: The input has no content with this key.
        """
        if self.content.is_empty():
            return None
        value = self.content.get(key or "data")
        if value is not None:
            return value
        if key:
            raise KeyError(f"requested data for key:{key} is not found!")
        return self.content.value_at(0)

    def get_as_string(self, key: str | None = None) -> str:
        """Return the content as text.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The input has no content, or the content is not UTF-8.
        """
        return _read_text(self._body(key))

    def get_as_json(self, key: str | None = None) -> Any:
        """Return the content as one JSON document.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The content is not JSON.
        """
        text = _read_text(self._body(key))
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("The body is not JSON that can be read: it is nested too deeply") from error
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(f"The body is not JSON: {error.msg}", error.doc, error.pos) from error
        except ValueError as error:
            raise ValueError(f"The body is not JSON: {error}") from error

    def get_as_image(self, key: str | None = None) -> Image:
        """Return the content as a decoded Pillow image.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: Pillow cannot read the content.
            ImportError: Pillow is not installed.
        """
        body = self._body(key)
        pillow = require("PIL.Image", "an image body", "Pillow")
        try:
            image: Image = pillow.open(io.BytesIO(body))
            image.load()  # Pillow reports a malformed image only when the image is decoded.
        except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
            raise _image_error()(f"The body is not an image that can be read: {error}") from error
        return image

    def get_as_numpy(self, key: str | None = None) -> list[NDArray[Any]]:
        """Return the arrays in NDList, npz or npy content.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The content is malformed, or contains Python objects.
            ImportError: Numpy is not installed.
        """
        return from_nd_list(self._body(key))

    def get_as_npz(self, key: str | None = None) -> list[NDArray[Any]]:
        """Return the arrays in npz content. Pickled arrays are refused.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The content is malformed, or contains Python objects.
            ImportError: Numpy is not installed.
        """
        return from_npz(self._body(key))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]]:
        """Return the rows of CSV content as dictionaries. The keys are the names in the header.

        Raises:
            KeyError: The input has no content with this key.
            ValueError: The content is not CSV.
        """
        return read_csv_text(_read_text(self._body(key)))[1]

    def read(self, conn: socket) -> None:
        """Read the input in LMI's binary format.

        Raises:
            ValueError: The connection closes too early.
        """
        for _ in range(wire.read_integer(conn, "h")):
            name = wire.read_utf8(conn) or ""
            self.properties[name] = wire.read_utf8(conn)
        for _ in range(wire.read_integer(conn, "h")):
            key = wire.read_utf8(conn)
            self.content.add(key, wire.read_exactly(conn, wire.read_integer(conn, "i")))
        self.function_name = self.properties.get("handler")

    def _body(self, key: str | None) -> bytes | bytearray:
        value = self.get_as_bytes(key)
        if value is None:
            raise ValueError("The input has no content")
        if isinstance(value, (bytes, bytearray)):
            return value
        if isinstance(value, memoryview):
            return bytes(value)
        return (value if isinstance(value, str) else json.dumps(value)).encode("utf-8")


def _is_batch_key(key: str) -> bool:
    return key.startswith("batch_") and key[_INDEX].isdecimal() and key[_INDEX].isascii() and len(key) >= 10


def _read_text(body: Body) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        error.reason += ": the body is not UTF-8"
        raise


def read_csv_text(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names in the header, and the rows as dictionaries. A missing cell is None.

    Raises:
        ValueError: The text is not CSV, or too many cells are missing. Short rows under a long header could exhaust the
            memory.
    """
    try:
        reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
        names, rows, cells = list(reader.fieldnames or ()), [], 0
        for row in reader:
            cells += len(names)
            # Each cell in the text takes at least one character: the separator.
            if cells > len(text) + _MISSING_CELLS:
                raise ValueError(f"The body is not CSV: rows lack too many of the header's {len(names)} columns")
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"The body is not CSV: {error}") from error
    return names, rows


@cache
def _image_error() -> type[Exception]:
    """Return the class for image errors.

    It inherits from Pillow's error, which LMI's handlers catch, and from ValueError, which stands for malformed
    content.
    """
    unidentified = require("PIL", "an image body", "Pillow").UnidentifiedImageError
    return type("ImageError", (unidentified, ValueError), {"__doc__": "An image cannot be read."})
