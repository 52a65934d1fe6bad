"""Frames between server and worker: a length, a kind, the number of a call, and a body. Both sides use this module."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct(">QBI")
_LENGTH_OF_REST = _HEADER.size - 8
_MAX_LENGTH = 1 << 36
_CREDIT = struct.Struct(">Q")

WINDOW = 256 * 1024
"""Bytes of one call's stream that may be on their way without the client having taken them."""


class Kind(IntEnum):
    """What a frame says."""

    # To the worker.
    LOAD = 1
    CALL = 2
    CREDIT = 3
    CANCEL = 4
    STOP = 5
    # To the server.
    LOADED = 16
    LOAD_FAILED = 17
    OUTPUT = 18
    CHUNK = 19
    STREAM_END = 20
    DONE = 21


class FrameError(Exception):
    """What was read is no frame; the connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    kind: Kind
    call: int
    body: bytes


def encode_frame(kind: Kind, call: int = 0, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(_LENGTH_OF_REST + len(body), kind, call) + body


def encode_credit(size: int) -> bytes:
    """The body of a CREDIT frame."""
    return _CREDIT.pack(size)


def decode_credit(body: bytes) -> int:
    """The bytes that a CREDIT frame allows in addition."""
    return int(_CREDIT.unpack(body)[0])


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            FrameError: the bytes are no frames.
        """
        self._pending += data
        frames: list[Frame] = []
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            length, kind, call = _HEADER.unpack_from(self._pending, start)
            if not _LENGTH_OF_REST <= length <= _MAX_LENGTH:
                raise FrameError(f"a frame of {length} bytes")
            end = start + 8 + length
            if len(self._pending) < end:
                break
            frames.append(Frame(_kind(kind), call, bytes(memoryview(self._pending)[start + _HEADER.size : end])))
            start = end
        del self._pending[:start]
        return frames


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FrameError(f"a frame of the unknown kind {number}") from None
