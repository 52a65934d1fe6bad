"""The binary form in which LMI's server and its Python workers exchange requests and answers.

All integers are big-endian. A string is an int32 byte length, -1 for None, and UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from socket import socket
from typing import Any

MORE_CHUNKS = b"\1"
LAST_CHUNK = b"\0"
STREAMED_CONTENT = -1  # In place of the number of content entries: chunks follow.


def read_exactly(connection: socket, size: int) -> bytearray:
    """The next `size` bytes. Raises ValueError if the connection ends first."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ValueError(f"Connection disconnected after {len(data)} of {size} bytes")
        data += part
    return data


def read_integer(connection: socket, code: str) -> int:
    """A signed integer; `code` is `h` for 16 bits or `i` for 32."""
    return int(struct.unpack(f">{code}", read_exactly(connection, struct.calcsize(f">{code}")))[0])


def read_utf8(connection: socket) -> str | None:
    """A length-prefixed string."""
    length = read_integer(connection, "i")
    return None if length < 0 else read_exactly(connection, length).decode("utf-8")


def int16(value: int) -> bytes:
    """A status or a number of entries. Raises ValueError if it does not fit."""
    try:
        return struct.pack(">h", value)
    except struct.error as error:
        raise ValueError(f"{value} does not fit into the 16 bits that a message has for it") from error


def utf8(text: str | None) -> bytes:
    """A string with its length in front; None is a length of -1."""
    return struct.pack(">i", -1) if text is None else sized(text.encode("utf-8"))


def sendable(text: str) -> str:
    """The text with `?` for lone surrogates, which UTF-8 cannot encode and a client's JSON may contain."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sized(data: bytes | bytearray) -> bytes:
    """Bytes with their length in front."""
    return struct.pack(">i", len(data)) + data


def string_map(entries: Mapping[Any, Any]) -> bytes:
    """A count, then keys and values as `str()` writes them."""
    return int16(len(entries)) + b"".join(utf8(str(key)) + utf8(str(value)) for key, value in entries.items())


def read_string_map(data: bytes | bytearray) -> tuple[dict[str, str], int]:
    """The map that `string_map` has encoded, None as an empty string, and the number of its bytes. Raises ValueError:
    the bytes end too early, or are not UTF-8."""
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
