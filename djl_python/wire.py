"""The binary format of requests and answers between LMI's server and its Python workers.

All integers are big-endian. A string is written as its length in bytes (an int32), followed by its UTF-8 bytes. None is
written as the length -1.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from socket import socket
from typing import Any

MORE_CHUNKS = b"\1"
LAST_CHUNK = b"\0"
STREAMED_CONTENT = -1  # Sent instead of the number of content entries if chunks follow.


def read_exactly(connection: socket, size: int) -> bytearray:
    """Read the next `size` bytes.

    Raises:
        ValueError: The connection closes before all bytes are read.
    """
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ValueError(f"Connection disconnected after {len(data)} of {size} bytes")
        data += part
    return data


def read_integer(connection: socket, code: str) -> int:
    """Read a signed integer. `code` is `h` for 16 bits or `i` for 32 bits."""
    return int(struct.unpack(f">{code}", read_exactly(connection, struct.calcsize(f">{code}")))[0])


def read_utf8(connection: socket) -> str | None:
    """Read a string, or None."""
    length = read_integer(connection, "i")
    return None if length < 0 else read_exactly(connection, length).decode("utf-8")


def int16(value: int) -> bytes:
    """Encode a status code or a number of entries.

    Raises:
        ValueError: The value does not fit into 16 bits.
    """
    try:
        return struct.pack(">h", value)
    except struct.error as error:
        raise ValueError(f"{value} does not fit into the 16 bits that a message has for it") from error


def utf8(text: str | None) -> bytes:
    """Encode a string or None, preceded by its length."""
    return struct.pack(">i", -1) if text is None else sized(text.encode("utf-8"))


def sendable(text: str) -> str:
    """Replace lone surrogates with `?`. A client's JSON may contain them, and UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sized(data: bytes | bytearray) -> bytes:
    """Return the bytes, preceded by their length."""
    return struct.pack(">i", len(data)) + data


def string_map(entries: Mapping[Any, Any]) -> bytes:
    """Encode a map as the number of entries, followed by the `str()` of each key and value."""
    return int16(len(entries)) + b"".join(utf8(str(key)) + utf8(str(value)) for key, value in entries.items())


def read_string_map(data: bytes | bytearray) -> tuple[dict[str, str], int]:
    """Decode a map that `string_map` encoded. None becomes an empty string.

    Returns:
        The map, and its size in bytes.

    Raises:
        ValueError: The bytes end too early, or are not UTF-8.
    """
    texts: list[str] = []
    try:
        (count,), at = struct.unpack_from(">h", data), 2
        for _ in range(2 * count):
            (length,) = struct.unpack_from(">i", data, at)
            text = bytes(data[at + 4 : at + 4 + max(length, 0)])
            if len(text) < length:
                raise ValueError(f"{length} bytes of text wanted at {at}, {len(text)} left")
            texts.append(text.decode("utf-8"))
            at += 4 + len(text)
    except struct.error as error:
        raise ValueError(f"The map is cut off: {error}") from error
    return dict(zip(texts[::2], texts[1::2], strict=True)), at
