"""The fields of an HTML form, urlencoded or multipart, as names and bytes."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

_URLENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
_MAX_FIELDS = 1000


class FormError(ValueError):
    """The body is not the form that its content type says; the message is for the client."""


def is_form(content_type: str) -> bool:
    """Whether a body of this type has fields."""
    return _media_type(content_type) in (_URLENCODED, _MULTIPART)


def form_fields(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """All fields and files in order; what a file is called on the client's disk is not kept.

    Raises:
        FormError: the form is broken.
    """
    return _urlencoded(body) if _media_type(content_type) == _URLENCODED else _multipart(body, content_type)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _urlencoded(body: bytes) -> list[tuple[str, bytes]]:
    # urllib's own reader takes text only, and a value may be any bytes.
    fields = [field for field in body.split(b"&") if field]
    if len(fields) > _MAX_FIELDS:
        raise FormError(f"the form has more than {_MAX_FIELDS} fields")
    return [_urlencoded_field(field) for field in fields]


def _urlencoded_field(field: bytes) -> tuple[str, bytes]:
    name, _, value = field.replace(b"+", b" ").partition(b"=")
    return unquote_to_bytes(name).decode("utf-8", "replace"), unquote_to_bytes(value)


def _multipart(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise FormError("the multipart form's Content-Type has no boundary")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, callbacks=collector.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise FormError(f"the multipart form is broken: {error}") from error
    if not collector.complete:
        raise FormError("the multipart form ends before its last boundary")
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
            raise FormError("a part of the multipart form has no name")
        if len(self.fields) >= _MAX_FIELDS:
            raise FormError(f"the form has more than {_MAX_FIELDS} fields")
        self.fields.append((self._name, bytes(self._data)))

    def _finish(self) -> None:
        self.complete = True
