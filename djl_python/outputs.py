"""The output of a handler: its status, its headers, and its content or stream."""

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
        # A numpy value can only exist if numpy was already imported.
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating, numpy.ndarray)):
            return value.tolist()
        return super().default(value)


def _encode_json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2, cls=_JsonEncoder, separators=(",", ":"))
    return text.encode("utf-8")


def _items(stream: Any) -> Iterator[Any]:
    """Yield the items of an object that has only `__next__`. LMI also accepts such an object."""
    while True:
        try:
            item = next(stream)
        except StopIteration:
            return
        yield item


def default_stream_formatter(item: Any) -> bytes:
    """Return one line of JSON, `{"outputs": <item>}`, with non-ASCII characters escaped."""
    return (json.dumps({"outputs": item}) + "\n").encode("utf-8")


class Output:
    """The answer of a handler. Methods that change the answer also return it, so that calls can be chained."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        """Create an answer without content.

        Args:
            code: The HTTP status.
            message: The reason phrase of the status.
        """
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

    def error(self, error: Any, code: int = 424, message: str = "invoke handler failure") -> Self:
        """Turn this answer into an error with LMI's JSON body.

        Args:
            error: Text, or another JSON value. Characters that UTF-8 cannot encode become `?`.
            code: The status.
            message: The reason phrase of the status.
        """
        self.set_code(code).set_message(message)
        self.add_property("content-type", "application/json")
        shown = wire.sendable(error) if isinstance(error, str) else error
        return self.add_as_json({"code": code, "message": message, "error": shown})

    def add_property(self, key: str, val: Any) -> Self:
        """Set a response header, which is sent as `str(val)`."""
        self.properties[key] = val
        return self

    def get_property(self, key: str) -> Any:
        """Return a header, or None. The case of the name is ignored."""
        return next((value for name, value in self.properties.items() if name.lower() == key.lower()), None)

    def get_properties(self) -> dict[str, Any]:
        return self.properties

    def add(self, value: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Add content: a string as UTF-8, bytes unchanged, other values as JSON.

        Args:
            value: The content.
            key: The content's name.
            batch_index: The index of the request that the content answers. The key becomes `batch_<i>.<key>`.

        Raises:
            TypeError: JSON does not support the type of the value.
            ValueError: JSON cannot represent the value, for example NaN or infinity.
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
        """Add indented JSON, even for a string. This method raises the same errors as `add`."""
        return self.add(_encode_json(val), key, batch_index)

    def add_as_numpy(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Add a list of arrays, or one array, as NDList.

        Raises:
            ValueError: An array contains values other than numbers.
        """
        return self.add(to_nd_list(np_list), key, batch_index)

    def add_as_npz(self, np_list: Any, key: Any = None, batch_index: int | None = None) -> Self:
        """Add a list of arrays as an npz file.

        Raises:
            ValueError: An array contains Python objects.
        """
        return self.add(to_npz(np_list), key, batch_index)

    def add_stream_content(
        self, stream_content: Iterable[Any], output_formatter: StreamFormatter | None = default_stream_formatter
    ) -> Self:
        """Stream the items of an iterable.

        Args:
            output_formatter: The function that is called with each item. Without it, strings and bytes are sent
                unchanged, and other items as JSON.
        """
        self.stream_content = stream_content
        self.stream_output_formatter = output_formatter
        return self

    def stream_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of each streamed item. Exceptions from the iterator and the formatter propagate."""
        content: Any = self.stream_content if self.stream_content is not None else ()
        for item in content if hasattr(content, "__iter__") else _items(content):
            yield self.encode_value(self.stream_output_formatter(item) if self.stream_output_formatter else item)

    def finalize(self, finalize_function: Callable[..., Any], *args: Any) -> Self:
        """Set a function to call after the answer has been sent."""
        self.finalize_function = finalize_function
        self.finalize_args = args
        return self

    def execute_finalize(self) -> Any:
        return self.finalize_function(*(self.finalize_args or ())) if self.finalize_function else None

    def send(self, cl_socket: socket) -> None:
        """Write the answer in LMI's binary format. If a stream fails, it ends with the error's text."""
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
        """Return the bytes of a value: a string as UTF-8, bytes unchanged, other values as JSON.

        Raises:
            TypeError: JSON does not support the type of the value.
            ValueError: UTF-8 or JSON cannot represent the value.
        """
        if isinstance(value, str):
            return value.encode("utf-8")
        return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else _encode_json(value)

    @staticmethod
    def binary_encode(data: Mapping[Any, Any]) -> bytearray:
        """Return a flat map in the binary format of rolling-batch and async answers.

        Values are written as `str(value)`, so a flag becomes `True` or `False`.
        """
        return bytearray(wire.string_map(data))

    @staticmethod
    def write_utf8(msg: bytearray, val: str | None) -> None:
        msg += wire.utf8(val)
