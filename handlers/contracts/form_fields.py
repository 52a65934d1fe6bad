"""The fields of an HTML form, urlencoded or multipart, as names and bytes."""

from __future__ import annotations

import io
from urllib.parse import parse_qsl

from python_multipart import parse_form
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/"
_MAX_FIELDS = 1000


class FormError(ValueError):
    """The body is not the form that its content type says; the message is for the client."""


def is_form(content_type: str) -> bool:
    """Whether a body of this type has fields."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == URLENCODED or kind.startswith(MULTIPART)


def form_fields(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """All fields and files in order; a file's name on the client's disk is not kept.

    Raises:
        FormError: the form is broken.
    """
    if content_type.partition(";")[0].strip().lower() == URLENCODED:
        return _urlencoded(body)
    return _multipart(body, content_type)


def _urlencoded(body: bytes) -> list[tuple[str, bytes]]:
    try:
        # Latin-1 both ways keeps every byte; values may be anything.
        pairs = parse_qsl(
            body.decode("latin-1"), keep_blank_values=True, encoding="latin-1", max_num_fields=_MAX_FIELDS
        )
    except ValueError:
        raise FormError(f"the form has more than {_MAX_FIELDS} fields") from None
    return [(_name(name.encode("latin-1")), value.encode("latin-1")) for name, value in pairs]


def _multipart(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    fields: list[tuple[str, bytes]] = []

    def on_field(field: Field) -> None:
        _add(fields, field.field_name, field.value or b"")

    def on_file(file: File) -> None:
        file.file_object.seek(0)
        _add(fields, file.field_name, file.file_object.read())
        file.close()

    headers = {"Content-Type": content_type.encode("latin-1")}
    closing = _closing_boundary(content_type)
    try:
        parse_form(headers, io.BytesIO(body), on_field, on_file)
    except FormError:
        raise
    except (FormParserError, ValueError) as error:
        raise FormError(f"the multipart form is broken: {error}") from None
    if closing not in body:
        raise FormError("the multipart form ends before its closing boundary")
    return fields


def _closing_boundary(content_type: str) -> bytes:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "boundary" and value:
            return b"--" + value.strip().strip('"').encode("latin-1") + b"--"
    raise FormError("the multipart form's Content-Type has no boundary")


def _add(fields: list[tuple[str, bytes]], name: bytes | None, value: bytes) -> None:
    if len(fields) >= _MAX_FIELDS:
        raise FormError(f"the form has more than {_MAX_FIELDS} fields")
    fields.append((_name(name or b""), value))


def _name(name: bytes) -> str:
    return name.decode("utf-8", errors="replace")
