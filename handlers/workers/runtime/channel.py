"""The connection between server and worker: frames, and the messages in them. Both sides use this module.

A frame is a length, a kind, the number of a call, and a body. A message is a header in JSON with content behind it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from .guardian import end_process_group

WINDOW = 256 * 1024
"""Bytes of one call's stream that may be on their way before the client takes them."""

_HEADER = struct.Struct(">QBI")
_LENGTH_OF_REST = _HEADER.size - 8
_MAX_LENGTH = 1 << 36
_CREDIT = struct.Struct(">Q")
_SIZE = struct.Struct(">I")
_READ_SIZE = 256 * 1024

Properties = tuple[tuple[str, str], ...]
Contents = tuple[tuple[str | None, bytes], ...]


class Kind(IntEnum):
    """What a frame is."""

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
    """The bytes are no frame; the connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    kind: Kind
    call: int
    body: bytes


def encode_frame(kind: Kind, call: int = 0, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(_LENGTH_OF_REST + len(body), kind, call) + body


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


class Channel:
    """The worker's end of the connection. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, *frames: tuple[Kind, int, bytes]) -> None:
        """Send frames together. Ends the process group if the server has gone."""
        data = b"".join(encode_frame(kind, call, body) for kind, call, body in frames)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            end_process_group()

    def read(self) -> Iterator[Frame]:
        """Frames as they come, until the server has gone."""
        reader = FrameReader()
        while data := self._receive():
            yield from reader.feed(data)

    def close(self) -> None:
        """Tell the server that nothing more comes, even if threads of the handler keep the process alive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_READ_SIZE)
        except OSError:
            return b""


@dataclass(frozen=True, slots=True)
class InputMessage:
    """The body of a CALL, for an `Input`."""

    properties: Properties
    contents: Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMessage:
    """The body of an OUTPUT, and of a STREAM_END that reports an error: an `Output`."""

    code: int = 200
    message: str = ""
    properties: Properties = ()
    contents: Contents = ()
    streams: bool = False
    """Chunks follow."""
    error: str = ""
    """The text of the exception, where there was one."""

    @property
    def data(self) -> bytes:
        """The reply's body."""
        return data_of(self.contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """The body of a LOAD: what a worker is to serve."""

    model_dir: str
    entry_point: str
    function: str
    async_mode: bool
    properties: Properties
    """For the initializing call."""
    standing_properties: Properties
    """For every call."""


def data_of(contents: Contents) -> bytes:
    """The entry `data`, else the first, else nothing."""
    return next((value for key, value in contents if key == "data"), contents[0][1] if contents else b"")


def encode_message(message: InputMessage | OutputMessage) -> bytes:
    """The body of a frame."""
    header = {name: getattr(message, name) for name in message.__slots__}
    header["contents"] = [(key, len(value)) for key, value in message.contents]
    text = json.dumps(header).encode()
    return b"".join([_SIZE.pack(len(text)), text, *(value for _, value in message.contents)])


def decode_input(body: bytes) -> InputMessage:
    """The message that `encode_message` has encoded."""
    return InputMessage(**_fields(body))


def decode_output(body: bytes) -> OutputMessage:
    """The message that `encode_message` has encoded."""
    return OutputMessage(**_fields(body))


def _fields(body: bytes) -> dict[str, Any]:
    (size,) = _SIZE.unpack_from(body)
    at = _SIZE.size + size
    fields = json.loads(body[_SIZE.size : at])
    contents: list[tuple[str | None, bytes]] = []
    for key, length in fields["contents"]:
        contents.append((key, body[at : at + length]))
        at += length
    return {**fields, "properties": _pairs(fields["properties"]), "contents": tuple(contents)}


def encode_order(order: LoadOrder) -> bytes:
    """The body of a LOAD frame."""
    return json.dumps({name: getattr(order, name) for name in LoadOrder.__slots__}).encode()


def decode_order(body: bytes) -> LoadOrder:
    """The order that `encode_order` has encoded."""
    fields = json.loads(body)
    for name in ("properties", "standing_properties"):
        fields[name] = _pairs(fields[name])
    return LoadOrder(**fields)


def encode_credit(size: int) -> bytes:
    """The body of a CREDIT frame: the client has taken `size` bytes."""
    return _CREDIT.pack(size)


def decode_credit(body: bytes) -> int:
    """The bytes that a CREDIT frame allows in addition."""
    return int(_CREDIT.unpack(body)[0])


def _pairs(pairs: Sequence[Sequence[str]]) -> Properties:
    return tuple((name, value) for name, value in pairs)
