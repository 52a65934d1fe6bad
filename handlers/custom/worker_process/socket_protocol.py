"""The protocol on the socket between server and worker. Both sides use this module.

A message on the socket consists of the lengths of its header and its contents, the header as JSON, and the contents.
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

CREDIT_BYTES = 64 * 1024  # The number of bytes of an answer that one CREDIT message allows.
INITIAL_CREDITS = 3  # The credits that a call has at its start.

SIZES = struct.Struct(">IQ")  # The lengths of the header and of the contents, in bytes.

Properties = tuple[tuple[str, str], ...]
Contents = tuple[tuple[str | None, bytes], ...]


ONE_BY_ONE: Properties = (("batch_size", "1"),)  # Properties of LOADED if the handler takes no dynamic batches.


class MessageKind(StrEnum):
    """The kinds of messages.

    A handler may call the model's engine. For such a call, CALL and CANCEL go to the server, and OUTPUT, CHUNK and
    STREAM_END go to the worker. The worker numbers these calls. Each CALL also has the number of the server's call that
    the handler answers at that time.
    """

    # Messages to the worker.
    LOAD = "load"  # The content is a `LoadRequest` as JSON.
    CALL = "call"
    CREDIT = "credit"  # The client has read enough of the answer: the worker may send CREDIT_BYTES more.
    CANCEL = "cancel"
    STOP = "stop"
    # Messages to the server.
    LOADED = "loaded"  # The handler is ready, or has failed with an error.
    OUTPUT = "output"
    CHUNK = "chunk"
    STREAM_END = "stream_end"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message between server and worker.

    A CALL holds an `Input`. An OUTPUT holds an `Output` or an exception. An exception may also follow chunks.
    """

    kind: MessageKind = MessageKind.OUTPUT
    call: int = 0  # The number of the call.
    within: int = 0  # The number of the server's call during which the handler calls the engine, or 0.
    code: int = 200
    message: str = ""
    properties: Properties = ()
    headers: Properties = ()  # All headers of the request, in a CALL. Only a script gets them.
    contents: Contents = ()
    streams: bool = False  # Whether chunks follow.
    error: str | None = None  # The text of the exception, or None.

    @property
    def data(self) -> bytes:
        """The content `data`, otherwise the first content. Empty if the message has no content."""
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
        """Return the message with this header and these contents.

        Raises:
            ValueError: The header is not valid.
        """
        fields = json.loads(header)
        contents, at = [], 0
        for key, length in fields["contents"]:
            contents.append((key, data[at : at + length]))
            at += length
        pairs = {name: tuple((key, value) for key, value in fields[name]) for name in ("properties", "headers")}
        return cls(**fields | pairs | {"kind": MessageKind(fields["kind"]), "contents": tuple(contents)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The handler that a worker has to load."""

    model_dir: str
    entry_point: str
    function: str
    async_mode: bool
    properties: Mapping[str, str]  # The properties of the initializing call.
    model_name: str = "model"
    server_version: str = ""
    device_id: str = "-1"
    sets_python_path: bool = True  # False if option.env has PYTHONPATH.


class ServerConnection:
    """The worker's connection to the server. Any thread may send. Only one thread may read."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._stream = sock, sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Send messages together. End the process group if the server has closed the connection."""
        data = b"".join([message.encode() for message in messages])
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            end_process_group()

    def receive(self) -> Message | None:
        """Return the next message, or None if the server has closed the connection."""
        with contextlib.suppress(OSError):
            sizes = self._stream.read(SIZES.size)
            if len(sizes) == SIZES.size:
                header, contents = SIZES.unpack(sizes)
                data = self._stream.read(header + contents)
                if len(data) == header + contents:
                    return Message.decode(data[:header], data[header:])
        return None

    def listen(self, take: Callable[[Message], object]) -> None:
        """Start a thread that calls `take` with each message.

        The thread ends the process group when the server closes the connection.
        """

        def read() -> None:
            while (message := self.receive()) is not None:
                take(message)
            end_process_group()

        threading.Thread(target=read, name="worker-reader", daemon=True).start()

    def close(self) -> None:
        """Tell the server that no message follows, even if threads of the handler keep the process alive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def end_process_group() -> NoReturn:
    """End this process and all processes that it started, because the server has closed the connection."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
