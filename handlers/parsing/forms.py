"""Reads HTML forms, urlencoded or multipart. The values may be any bytes."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from engines.errors import InvalidRequest
from handlers.contract import media_type

_URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
MAX_FIELDS = 1000  # Without this limit, splitting 64 MiB of `&` would take 2 s and 500 MiB.
_PIECE = 64 * 1024  # The number of bytes that are decoded at once. Other threads can run between two pieces.


class FormError(InvalidRequest):
    """The body is not a valid form of its content type."""


def is_form(content_type: str) -> bool:
    """Return True if this is the content type of a form."""
    return media_type(content_type) in (_URLENCODED, MULTIPART)


def form_fields(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return all fields and files of a form in order, without file names.

    Raises:
        FormError: The form is broken.
    """
    return _urlencoded(body) if media_type(content_type) == _URLENCODED else _multipart(body, content_type)


def form_text(body: bytes, content_type: str, name: str) -> str | None:
    """Return the first field of this name as text. None if the field is missing, or the body is not a form."""
    if name.encode() not in body or not is_form(content_type):
        return None
    try:
        fields = form_fields(body, content_type)
    except FormError:
        return None  # the handler reports the error
    return next((value.decode("utf-8", "replace") for field, value in fields if field == name), None)


def _urlencoded(body: bytes) -> list[tuple[str, bytes]]:
    """Return the fields as `urllib.parse.parse_qsl` does. Unlike `parse_qsl`, accept any bytes as values."""
    if body.count(b"&") >= MAX_FIELDS:
        raise FormError(f"the form has more than {MAX_FIELDS} fields")
    pairs = (field.replace(b"+", b" ").partition(b"=") for field in body.split(b"&") if field)
    return [(_unquoted(name).decode("utf-8", "replace"), _unquoted(value)) for name, _, value in pairs]


def _unquoted(text: bytes) -> bytes:
    """Decode the escapes in a text, such as `%20`."""
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE
        if (escape := text.find(b"%", end - 2, end)) > 0:
            end = escape  # the escape continues in the next piece
        pieces.append(unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(pieces)


def _multipart(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise FormError("the multipart form's Content-Type has no boundary")
    fields: list[tuple[str, bytes]] = []
    ended: list[bool] = []

    def add(part: Field | File) -> None:
        if len(fields) >= MAX_FIELDS:
            raise FormError(f"the form has more than {MAX_FIELDS} fields")
        if isinstance(part, File):
            part.file_object.seek(0)
        data = part.value if isinstance(part, Field) else part.file_object.read()
        fields.append(((part.field_name or b"").decode("utf-8", "replace"), data or b""))

    in_memory = {"MAX_MEMORY_FILE_SIZE": float("inf")}
    try:
        parser = FormParser(MULTIPART, add, add, lambda: ended.append(True), boundary, config=in_memory)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        if str(error).startswith("Field name not found"):
            raise FormError("a part of the multipart form has no name") from None
        raise FormError(f"the multipart form is broken: {error}") from error
    if not ended:
        raise FormError("the multipart form ends before its last boundary")
    return fields
