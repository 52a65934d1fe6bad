"""The connection between server and worker, and the messages on it. Both sides use this module.

A message is the lengths of its two parts, a header in JSON, and its contents.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

CREDIT = 64 * 1024  # Bytes of a call's answer that one CREDIT allows.
CREDITS = 3  # Credits that a call begins with.

SIZES = struct.Struct(">IQ")  # The lengths of header and contents.

Properties = tuple[tuple[str, str], ...]
Contents = tuple[tuple[str | None, bytes], ...]


class Kind(StrEnum):
    """What a message is. A handler may call the model's engine: then CALL and CANCEL go to the server, and OUTPUT,
    CHUNK and STREAM_END to the worker, under numbers of the worker's own."""

    # To the worker.
    LOAD = "load"  # The content is a `LoadOrder` in JSON.
    CALL = "call"
    CREDIT = "credit"  # The client has taken so much that CREDIT more bytes may be sent.
    CANCEL = "cancel"
    STOP = "stop"
    # To the server.
    LOADED = "loaded"  # The handler is ready, or has failed with an error.
    OUTPUT = "output"
    CHUNK = "chunk"
    STREAM_END = "stream_end"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message. That of a CALL is an `Input`; that of an OUTPUT an `Output`, or an exception, also within a stream."""

    kind: Kind = Kind.OUTPUT
    call: int = 0
    code: int = 200
    message: str = ""
    properties: Properties = ()
    contents: Contents = ()
    streams: bool = False  # Chunks follow.
    error: str | None = None  # The text of the exception; None if there was none.

    @property
    def data(self) -> bytes:
        """The content `data`, else the first, else nothing."""
        first = self.contents[0][1] if self.contents else b""
        return next((value for key, value in self.contents if key == "data"), first)

    @property
    def size(self) -> int:
        return sum(len(value) for _, value in self.contents)

    def encode(self) -> bytes:
        header = {name: getattr(self, name) for name in self.__slots__}
        header["contents"] = [(key, len(value)) for key, value in self.contents]
        text = json.dumps(header).encode()
        return b"".join([SIZES.pack(len(text), self.size), text, *(value for _, value in self.contents)])

    @classmethod
    def decode(cls, header: bytes, data: bytes) -> Message:
        """The message with this header and these contents. Raises ValueError if the header is none."""
        fields = json.loads(header)
        contents, at = [], 0
        for key, length in fields["contents"]:
            contents.append((key, data[at : at + length]))
            at += length
        properties = tuple((name, value) for name, value in fields["properties"])
        return cls(**fields | {"kind": Kind(fields["kind"]), "properties": properties, "contents": tuple(contents)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What a worker is to serve."""

    model_dir: str
    entry_point: str
    function: str
    async_mode: bool
    properties: Mapping[str, str]  # For the initializing call.
    device_id: str = "-1"


class Channel:
    """The worker's end of the connection. Any thread may send; one reads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._stream = sock, sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Send messages together. Ends the process group if the server has gone."""
        data = b"".join([message.encode() for message in messages])
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            end_process_group()

    def receive(self) -> Message | None:
        """The next message; None if the server has gone."""
        with contextlib.suppress(OSError):
            sizes = self._stream.read(SIZES.size)
            if len(sizes) == SIZES.size:
                header, contents = SIZES.unpack(sizes)
                data = self._stream.read(header + contents)
                if len(data) == header + contents:
                    return Message.decode(data[:header], data[header:])
        return None

    def listen(self, take: Callable[[Message], object]) -> None:
        """Have a thread take all messages. When the server goes, it ends the process and all that that has started."""

        def read() -> None:
            while (message := self.receive()) is not None:
                take(message)
            end_process_group()

        threading.Thread(target=read, name="worker-reader", daemon=True).start()

    def close(self) -> None:
        """Tell the server that nothing more comes, even if threads of the handler keep the process alive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def end_process_group() -> NoReturn:
    """End this process and all that it started: the server has gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
