"""Fields and files of a multipart form."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header


class MultipartError(Exception):
    """The body is no multipart form; the message says why."""


def multipart_fields(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of all parts, in order.

    Raises:
        MultipartError: the body is broken.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise MultipartError("the Content-Type has no boundary")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, callbacks=collector.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise MultipartError(str(error)) from error
    if not collector.complete:
        raise MultipartError("it ends before its last boundary")
    return collector.fields


class _Collector:
    """Receives what the parser finds."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, bytes]] = []
        self.complete = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name: str | None = None
        self._data = bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._take_name,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_part_data": self._take_data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name, self._data = None, bytearray()

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            name = parse_options_header(bytes(self._header_value))[1].get(b"name")
            self._name = None if name is None else name.decode("utf-8", "replace")
        self._header_name.clear()
        self._header_value.clear()

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._data += memoryview(data)[start:end]

    def _end(self) -> None:
        if self._name is None:
            raise MultipartError("a part has no name")
        self.fields.append((self._name, bytes(self._data)))

    def _finish(self) -> None:
        self.complete = True
