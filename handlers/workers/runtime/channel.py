"""The connection between server and worker: frames, and the messages in them. Both sides use this module.

A frame is a header with a length, a kind and the number of a call, and a body. A message is a header in JSON with
content behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn, TypeVar

WINDOW = 256 * 1024
"""Bytes of one call's answer that may be on their way before the client takes them."""

_HEADER = struct.Struct(">QBI")
HEADER_SIZE = _HEADER.size
_MAX_LENGTH = 1 << 36
_SIZE = struct.Struct(">I")

Properties = tuple[tuple[str, str], ...]
Contents = tuple[tuple[str | None, bytes], ...]
M = TypeVar("M", "InputMessage", "OutputMessage")


class Kind(IntEnum):
    """What a frame is.

    A handler may call the model's engine: then CALL and CANCEL go to the server, and OUTPUT, CHUNK and STREAM_END to
    the worker, under numbers of the worker's own.
    """

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


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. The body is a message, or for CREDIT the bytes that the client has taken, as a decimal number."""

    kind: Kind
    call: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        """Its bytes."""
        return _HEADER.pack(len(self.body), self.kind, self.call) + self.body


def decode_header(header: bytes) -> tuple[int, Kind, int]:
    """The length of the body that follows, the kind, and the call.

    Raises:
        ValueError: these bytes are no header.
    """
    length, kind, call = _HEADER.unpack(header)
    if length > _MAX_LENGTH:
        raise ValueError(f"a frame of {length} bytes")
    return length, Kind(kind), call


class Channel:
    """The worker's end of the connection. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, *frames: Frame) -> None:
        """Send frames together. Ends the process group if the server has gone."""
        data = b"".join([frame.encode() for frame in frames])
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            end_process_group()

    def read(self) -> Iterator[Frame]:
        """Frames as they come, until the server has gone."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while len(header := stream.read(HEADER_SIZE)) == HEADER_SIZE:
                length, kind, call = decode_header(header)
                body = stream.read(length)
                if len(body) < length:
                    return
                yield Frame(kind, call, body)

    def close(self) -> None:
        """Tell the server that nothing more comes, even if threads of the handler keep the process alive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


@dataclass(frozen=True, slots=True)
class InputMessage:
    """The body of a CALL, for an `Input`."""

    properties: Properties
    contents: Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputMessage:
    """The body of an OUTPUT: an `Output`, or an exception, which may also end a stream."""

    code: int = 200
    message: str = ""
    properties: Properties = ()
    contents: Contents = ()
    streams: bool = False
    """Chunks follow."""
    error: str | None = None
    """The text of the exception; None if there was none."""

    @property
    def data(self) -> bytes:
        """The reply's body."""
        return data_of(self.contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """The body of a LOAD, in JSON: what a worker is to serve."""

    model_dir: str
    entry_point: str
    function: str
    async_mode: bool
    properties: Mapping[str, str]
    """For the initializing call."""
    device_id: str = "-1"


def data_of(contents: Contents) -> bytes:
    """The entry `data`, else the first, else nothing."""
    return next((value for key, value in contents if key == "data"), contents[0][1] if contents else b"")


def encode_message(message: InputMessage | OutputMessage) -> bytes:
    """The body of a frame."""
    header = {name: getattr(message, name) for name in message.__slots__}
    header["contents"] = [(key, len(value)) for key, value in message.contents]
    text = json.dumps(header).encode()
    return b"".join([_SIZE.pack(len(text)), text, *(value for _, value in message.contents)])


def decode_message(kind: type[M], body: bytes) -> M:
    """The message that `encode_message` has encoded."""
    (size,) = _SIZE.unpack_from(body)
    at = _SIZE.size + size
    fields = json.loads(body[_SIZE.size : at])
    fields["properties"] = tuple([(name, value) for name, value in fields["properties"]])
    contents: list[tuple[str | None, bytes]] = []
    for key, length in fields["contents"]:
        contents.append((key, body[at : at + length]))
        at += length
    return kind(**{**fields, "contents": tuple(contents)})


_MOST_DESCRIPTORS = 1 << 16


def end_process_group() -> NoReturn:
    """End this process and all that it started: the server has gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def guard_group(server: int) -> None:
    """Start a process that ends this process's group when this process or the server ends.

    To be called before there are threads. It ends them even while a call holds the interpreter's lock. It belongs to
    the group itself, so that it ends with it. Before Linux 5.3, which has no file descriptors for processes, there is
    none; a worker then ends once it sees that the connection to the server is closed.
    """
    if os.getpgrp() != os.getpid():
        return
    try:
        watched = [os.pidfd_open(os.getpid()), os.pidfd_open(server)]
    except OSError:
        return
    if os.fork():
        for descriptor in watched:
            os.close(descriptor)
        return
    try:
        _wait_for_an_end(watched)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def _wait_for_an_end(processes: list[int]) -> None:
    # The worker's socket and pipe must be closed here: their other ends wait for the end of all copies.
    for place, descriptor in enumerate(processes):
        os.dup2(descriptor, place)
    os.closerange(len(processes), _MOST_DESCRIPTORS)
    end = select.poll()
    for place in range(len(processes)):
        end.register(place, select.POLLIN)
    end.poll()
