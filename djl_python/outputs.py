"""The output of a handler: status, headers, and content or a stream."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from socket import socket
from typing import Any, Self

from djl_python import wire
from djl_python.np_util import to_nd_list, to_npz
from djl_python.pair_list import PairList

StreamFormatter = Callable[[Any], Any]


class _JsonEncoder(json.JSONEncoder):
    """Writes dates as text, and numpy's scalars and arrays as numbers."""

    def default(self, value: Any) -> Any:
        if isinstance(value, (datetime.datetime, datetime.date)):
            return str(value)
        # A numpy value can only exist if something has imported numpy already.
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating, numpy.ndarray)):
            return value.tolist()
        return super().default(value)


def _encode_json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2, cls=_JsonEncoder, separators=(",", ":"))
    return text.encode("utf-8")


def default_stream_formatter(item: Any) -> bytes:
    """One line of JSON, `{"outputs": <item>}`, with non-ASCII characters escaped."""
    return (json.dumps({"outputs": item}) + "\n").encode("utf-8")


class Output:
    """The answer of a handler. Methods that change it return it, so that calls can be chained."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        """`code` is the HTTP status and `message` its reason phrase."""
        self.code = code
        self.message = message
        self.properties: dict[str, Any] = {}
        self.content = PairList()
        self.stream_content: Iterable[Any] | None = None
        self.stream_output_formatter: StreamFormatter | None = None
        self.finalize_function: Callable[..., Any] | None = None
        self.finalize_args: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        pairs = zip(self.content.keys, self.content.values, strict=True)
        shown = {
            "code": self.code,
            "message": self.message,
            "properties": self.properties,
            "content": {key: f"type: {type(value)}" for key, value in pairs},
        }
        return json.dumps(shown, indent=2, default=str)

    def set_code(self, code: int) -> Self:
        self.code = code
        return self

    def set_message(self, message: str) -> Self:
        self.message = message
        return self

    def error(self, error: str, code: int = 424, message: str = "invoke handler failure") -> Self:
        """Makes this an error with LMI's JSON body. Characters that UTF-8 does not have become `?`."""
        self.set_code(code).set_message(message)
        self.add_property("content-type", "application/json")
        return self.add_as_json({"code": code, "message": message, "error": wire.sendable(error)})

    def add_property(self, key: str, val: Any) -> Self:
        """Sets a response header, which is sent as `str(val)`."""
        self.properties[key] = val
        return self

    def get_property(self, key: str) -> Any:
        """A header, whatever its case; None if there is none."""
        return next((value for name, value in self.properties.items() if name.lower() == key.lower()), None)

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def add(self, value: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Adds content: a string as UTF-8, bytes as they are, anything else as JSON.

        `batch_index` is the request that the content answers: it goes before the key, as `batch_<i>.<key>`.

        Raises ValueError, TypeError: the value cannot be written as JSON; NaN and infinity cannot.
        """
        if key is not None and not isinstance(key, str):
            logging.warning("Output key should be str type, got %s", type(key))
            key = str(key)
        if batch_index is not None:
            key = f"batch_{batch_index}.{key or ''}"
        self.content.add(key=key, value=self.encode_value(value))
        return self

    def add_as_string(self, value: str, key: Any = None, batch_index: int | None = None) -> Self:
        return self.add(value, key, batch_index)

    def add_as_json(self, val: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Adds indented JSON, also for a string. Errors as for `add`."""
        return self.add(_encode_json(val), key, batch_index)

    def add_as_numpy(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Adds a list of arrays, or one, as NDList. Raises ValueError for arrays of other things than numbers."""
        return self.add(to_nd_list(np_list), key, batch_index)

    def add_as_npz(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Adds a list of arrays as an npz file. Raises ValueError for arrays of Python objects."""
        return self.add(to_npz(np_list), key, batch_index)

    def add_stream_content(
        self, stream_content: Iterable[Any], output_formatter: StreamFormatter | None = default_stream_formatter
    ) -> Self:
        """Streams the items as they come, each through the formatter. Without a formatter strings and bytes are sent as
        they are, and anything else as JSON."""
        self.stream_content = stream_content
        self.stream_output_formatter = output_formatter
        return self

    def stream_chunks(self) -> Iterator[bytes]:
        """The bytes of each streamed item. Raises whatever the iterator or the formatter raises."""
        for item in self.stream_content or ():
            yield self.encode_value(self.stream_output_formatter(item) if self.stream_output_formatter else item)

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Self:
        """Sets a function that is called once the answer has been sent."""
        self.finalize_function = finalize_function
        self.finalize_args = args
        return self

    def execute_finalize(self) -> Any:
        return self.finalize_function(*(self.finalize_args or ())) if self.finalize_function else None

    def send(self, cl_socket: socket) -> None:
        """Writes LMI's wire form. An error while streaming ends the stream with the error's text."""
        head = wire.int16(self.code) + wire.utf8(self.message) + wire.string_map(self.properties)
        if self.stream_content is None:
            pairs = zip(self.content.keys, self.content.values, strict=True)
            content = [wire.utf8(key) + wire.sized(self.encode_value(value)) for key, value in pairs]
            cl_socket.sendall(head + wire.int16(len(content)) + b"".join(content))
            return
        cl_socket.sendall(head + wire.int16(wire.STREAMED_CONTENT))
        failure = ""
        try:
            for chunk in self.stream_chunks():
                cl_socket.sendall(wire.MORE_CHUNKS + wire.sized(chunk))
        except OSError:
            raise
        except Exception as error:
            logging.exception("Failed to read the streamed content")
            failure = wire.sendable(str(error))
        cl_socket.sendall(wire.LAST_CHUNK + wire.utf8(failure))

    @staticmethod
    def encode_value(value: Any) -> bytes:
        """The bytes of a value: a string as UTF-8, bytes as they are, anything else as JSON. Raises ValueError,
        TypeError: the value cannot be written as UTF-8 or as JSON."""
        if isinstance(value, str):
            return value.encode("utf-8")
        return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else _encode_json(value)

    @staticmethod
    def binary_encode(data: Mapping[Any, Any]) -> bytearray:
        """A flat map in the binary form of rolling-batch and async answers. Values are written as `str(value)`, so a
        flag is `True` or `False`."""
        return bytearray(wire.string_map(data))

    @staticmethod
    def write_utf8(msg: bytearray, val: str | None) -> None:
        msg += wire.utf8(val)
