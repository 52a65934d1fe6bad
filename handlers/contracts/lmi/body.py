"""LMI request bodies by content type. Source: contracts/lmi.md section 3.1."""

from __future__ import annotations

import codecs
import csv
import io
from typing import Any

import msgspec

from handlers.contracts.json_fault import json_fault
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.lmi.form_fields import FormError, form_fields, is_form

_decode = msgspec.json.Decoder().decode
_JSON_LINES = frozenset(
    {"application/jsonlines", "application/x-jsonlines", "application/jsonl", "application/x-ndjson"}
)
_MESSAGE_PACK = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
_ARRAYS = ("tensor/", "application/x-npy", "image/", "audio/", "video/")
_COLUMN = "inputs"
_BESIDE = frozenset({"parameters", "stream", "adapters", "adapter"})
"""Fields of a form that are no prompt."""


class BodyError(ValueError):
    """The body is not what its content type says, or of a type that text generation cannot take."""


def decode(body: bytes, content_type: str) -> Any:
    """The JSON document that the body is or stands for.

    text/plain is the prompt itself, and text/csv has prompts in its column `inputs`; a form has the prompt in
    `inputs`, else in `data`, else in its first field that is nothing else. JSON is also taken where the content type is
    absent, says nothing, or is the one that curl sets by default.

    Raises:
        BodyError: with a message for the client.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if "application/json" in kind and kind not in _JSON_LINES:
        return _json(body)
    if kind in _JSON_LINES:
        return _json_lines(body)
    if kind == "text/plain":
        return {"inputs": _text(body)}
    if kind == "text/csv":
        return _csv(body)
    if kind in _MESSAGE_PACK:
        return _message_pack(body)
    if is_form(kind):
        return _json(body) if body.lstrip()[:1] == b"{" else _form(body, content_type)
    if kind in ("", "application/octet-stream"):
        return _json(body)
    if kind.startswith(_ARRAYS):
        raise BodyError(f"Content-Type {kind} cannot be a prompt; it is for a model with a handler of its own")
    raise BodyError(
        f"Content-Type {kind} is not supported here; send application/json, application/jsonlines, text/plain, "
        "text/csv, application/msgpack or a form"
    )


def decode_object(body: bytes, content_type: str, fields: str = "`inputs`") -> dict[str, Any]:
    """The same, where only an object will do. `fields`: what it should have, for the message.

    Raises:
        BodyError: with a message for the client.
    """
    document = decode(body, content_type)
    if not isinstance(document, dict):
        raise BodyError(f"the body must be a JSON object with {fields}, got {json_kind(document)}")
    return document


def _json(body: bytes) -> Any:
    if not body:
        raise BodyError("the body is empty; expected a JSON object with `inputs`")
    return _document(body.removeprefix(codecs.BOM_UTF8), "the body")


def _document(text: bytes, what: str) -> Any:
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"{what} is not valid JSON: {json_fault(text, error)}") from None


def _json_lines(body: bytes) -> Any:
    """One document, on one line or several; or a request on each line, which together are one client-side batch."""
    try:
        return _json(body)
    except BodyError:
        lines = [line for line in body.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
    documents = [_line(line, number) for number, line in enumerate(lines, start=1)]
    first = {name: value for name, value in documents[0].items() if name != "inputs"}
    for number, document in enumerate(documents[1:], start=2):
        if {name: value for name, value in document.items() if name != "inputs"} != first:
            raise BodyError(
                f"line {number} differs from line 1 in more than `inputs`; requests of one body share their parameters"
            )
    return {"inputs": [document.get("inputs") for document in documents], **first}


def _line(line: bytes, number: int) -> dict[str, Any]:
    document = _document(line, f"line {number}")
    if not isinstance(document, dict):
        raise BodyError(f"line {number} must be a JSON object with `inputs`")
    return document


def _message_pack(body: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"the body is not valid MessagePack: {error}") from None


def _csv(body: bytes) -> dict[str, Any]:
    try:
        rows = list(csv.DictReader(io.StringIO(_text(body.removeprefix(codecs.BOM_UTF8)), newline=""), strict=True))
    except csv.Error as error:
        raise BodyError(f"the body is not valid CSV: {error}") from None
    if not rows or rows[0].get(_COLUMN) is None:
        raise BodyError(f"the CSV must have a header row with a column `{_COLUMN}`, and at least one row after it")
    return {"inputs": [row[_COLUMN] for row in rows]}


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the text is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _form(body: bytes, content_type: str) -> dict[str, Any]:
    try:
        fields = dict(form_fields(body, content_type))
    except FormError as error:
        raise BodyError(str(error)) from None
    if not fields:
        raise BodyError("the form is empty; expected a field `inputs`")
    name = next((name for name in ("inputs", "data", *fields) if name in fields.keys() - _BESIDE), None)
    if name is None:
        raise BodyError("the form has no field `inputs`")
    document: dict[str, Any] = {"inputs": _text(fields[name])}
    if "parameters" in fields:
        document["parameters"] = _document(fields["parameters"], "`parameters`")
    if (adapters := fields.get("adapters", fields.get("adapter"))) is not None:
        document["adapters"] = _text(adapters)
    if "stream" in fields:
        text = _text(fields["stream"])
        document["stream"] = {"true": True, "false": False}.get(text.lower(), text)
    return document
