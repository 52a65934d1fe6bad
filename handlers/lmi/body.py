"""Reads bodies in LMI's form as JSON documents, according to their content type.

Source: DJL Serving, `RequestParser.java`; djl_python, `encode_decode.py`.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from engines.errors import InvalidRequest
from handlers.contract import JSON, Call, media_type
from handlers.parsing.constraints import CONSTRAINING, decoded, refuse_unread
from handlers.parsing.forms import form_fields, is_form
from handlers.parsing.json_fields import JsonError, decode_json, json_kind
from handlers.parsing.json_limits import JsonDecoder

# The maximum size of a CSV body in bytes, and its maximum number of rows. Splitting a line of 64 MiB into its 33
# million cells takes 2 s, and blocks all other threads. Each row is a prompt.
_MOST_CSV, _MOST_ROWS = 4 * 1024 * 1024, 10_000
_ARRAYS = ("tensor/", "application/x-npy", "image/", "audio/", "video/")
_PROMPT = "inputs"
_READ_OF_CSV = CONSTRAINING | {
    _PROMPT,
    "parameters",
}  # Columns that are read. A row may have thousands of other columns.
# Form fields that never hold the prompt.
_NO_PROMPT = frozenset({"parameters", "stream", "adapters", "adapter"})

_decode_json = JsonDecoder[Any]().decode


class LmiBody(msgspec.Struct):
    """A body with `inputs`, for any contract of LMI."""

    document: dict[str, Any]
    prompts: tuple[str, ...]
    parameters: dict[str, Any]  # Empty if the field is absent or null.


def read_body(call: Call, prompts_of: Callable[[Any], tuple[str, ...]], wanted: str = "`inputs`") -> LmiBody:
    """Read the body of a call, with any content type.

    Args:
        call: The call.
        prompts_of: Returns the prompts of `inputs`. Not called if `inputs` is a non-empty string.
        wanted: The name of the expected field, for the error message.

    Raises:
        InvalidRequest: The body is not a request, or a field outside `parameters` would constrain the text.
    """
    try:
        document = _decode_json(call.body) if call.content_type == JSON else decode(call.body, call.content_type)
    except ValueError:
        document = decode(call.body, call.content_type)  # This call reports the error.
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body must be a JSON object with {wanted}, got {json_kind(document)}")
    inputs, parameters = document.get(_PROMPT), document.get("parameters")
    prompts = (inputs,) if inputs and isinstance(inputs, str) else prompts_of(inputs)
    if parameters is None:
        parameters = {}
    elif not isinstance(parameters, dict):
        raise InvalidRequest(f"`parameters` must be an object, got {json_kind(parameters)}")
    if not CONSTRAINING.isdisjoint(document):
        refuse_unread(document, document, "has no effect beside `inputs`: put it into `parameters`")
    return LmiBody(document, prompts, parameters)


def decode(body: bytes, content_type: str) -> Any:
    """Return a body as a JSON document.

    - text/plain: The body is the prompt.
    - text/csv: Each row has a prompt in the column `inputs`. If the body is a single cell, the cell is the prompt.
    - A form: The prompt is the field `inputs`. If it is missing, the prompt is the field `data`. If both are missing,
      the prompt is the first field whose name is not in `_NO_PROMPT`.
    - JSON is also accepted without a content type, as application/octet-stream, or with curl's default content type.

    Raises:
        InvalidRequest: The body does not match its content type, or a body of this type cannot hold a prompt.
    """
    kind = media_type(content_type)
    if JSON in kind or kind in ("", "application/octet-stream"):
        return _json(body)
    if kind == "text/plain":
        return {_PROMPT: _text(body)}
    if kind == "text/csv":
        return _csv(body)
    if is_form(kind):
        return _json(body) if body.lstrip()[:1] == b"{" else _form(body, content_type)
    if kind.startswith(_ARRAYS):
        raise InvalidRequest(f"Content-Type {kind} cannot be a prompt; it is for a model with a custom handler")
    raise InvalidRequest(
        f"Content-Type {kind} is not supported here; send application/json, text/plain, text/csv or a form"
    )


def _json(body: bytes) -> Any:
    if not body:
        raise InvalidRequest("the body is empty; expected a JSON object with `inputs`")
    try:
        return decode_json(body.removeprefix(codecs.BOM_UTF8))
    except JsonError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _csv(body: bytes) -> dict[str, Any]:
    if len(body) > _MOST_CSV:
        raise InvalidRequest(f"the CSV has {len(body)} bytes; at most {_MOST_CSV} are taken")
    try:
        reader = csv.reader(io.StringIO(_text(body.removeprefix(codecs.BOM_UTF8)), newline=""), strict=True)
        header = next(reader, [])
        columns = {name: place for place, name in enumerate(header) if name in _READ_OF_CSV}
        rows = list(islice(_cells(reader, columns), _MOST_ROWS + 1))
    except csv.Error as error:
        raise InvalidRequest(f"the body is not valid CSV: {error}") from None
    if not rows and len(header) == 1 and header[0] not in {"", *_READ_OF_CSV}:
        return {_PROMPT: header[0]}  # Batch transform has split a file, and the cell is a line of the file.
    if not rows or rows[0].get(_PROMPT) is None:
        raise InvalidRequest(
            f"the CSV must have a header row with a column `{_PROMPT}` and at least one row after it, or one cell"
        )
    if len(rows) > _MOST_ROWS:
        raise InvalidRequest(f"the CSV has more than {_MOST_ROWS} rows")
    for row in rows:
        _refuse_constraints(row, "CSV")
    return {_PROMPT: [row[_PROMPT] for row in rows]}


def _cells(rows: Iterable[Sequence[str]], columns: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the cells of some columns for each row that is not empty. A missing cell is None."""
    for row in rows:
        if row:
            yield {name: row[place] if place < len(row) else None for name, place in columns.items()}


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the text is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _form(body: bytes, content_type: str) -> dict[str, Any]:
    fields = dict(form_fields(body, content_type))
    if not fields:
        raise InvalidRequest("the form is empty; expected a field `inputs`")
    name = next((name for name in (_PROMPT, "data", *fields) if name in fields.keys() - _NO_PROMPT), None)
    if name is None:
        raise InvalidRequest("the form has no field `inputs`")
    others = {other: body.decode(errors="replace") for other, body in fields.items() if other != name}
    _refuse_constraints(others, "a form")
    document: dict[str, Any] = {_PROMPT: _text(fields[name])}
    if (adapters := fields.get("adapters", fields.get("adapter"))) is not None:
        document["adapters"] = _text(adapters)
    return document


def _refuse_constraints(fields: Mapping[str, str], body: str) -> None:
    """Refuse fields that would constrain the text. LMI reads only the prompt of a CSV body or a form."""
    parameters = decoded(fields.get("parameters")) or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"`parameters` must be an object, got {json_kind(parameters)}")
    given = {name: decoded(fields[name]) for name in CONSTRAINING.intersection(fields) if fields[name]} | parameters
    refuse_unread(given, given, f"has no effect in {body}: send JSON")


def stream_of(value: Any) -> bool:
    """Return the value of a body's field `stream`. It is False if the field is absent or null.

    Raises:
        InvalidRequest: The value is not a boolean.
    """
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"`stream` must be true or false, got {json_kind(value)}")
    return bool(value)


def request_ids(call: Call, prompts: int) -> tuple[str, ...]:
    """Return an id for each prompt of a call. A single prompt has the id of the call."""
    return (call.request_id,) if prompts == 1 else tuple(f"{call.request_id}-{place}" for place in range(prompts))


def notes_of(document: dict[str, Any], fields: Iterable[str], ignored: Iterable[str]) -> tuple[str, ...]:
    """Return the log lines about the parts of a request that have no effect.

    Args:
        document: The body.
        fields: The names of the body's known fields.
        ignored: The names of parameters without effect.
    """
    notes = []
    if names := ", ".join(ignored):
        notes.append(f"parameters without effect: {names}")
    if unknown := document.keys() - fields:
        notes.append(f"fields without effect: {', '.join(sorted(unknown))}")
    return tuple(notes)
