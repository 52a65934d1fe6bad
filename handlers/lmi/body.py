"""Bodies of LMI's calls, by content type: as a JSON document for an engine, or as an `Input` for a customer's handler.

Source: DJL Serving, `RequestParser.java`; djl_python, `encode_decode.py`.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from engines.errors import InvalidRequest
from handlers.constraints import CONSTRAINING, refuse_unread
from handlers.contract import Call
from handlers.json_cost import JsonDecoder
from handlers.json_fields import JsonError, decode_json, json_kind
from handlers.lmi.errors import JSON, bad_request

DEFAULT_PRIORITY = 3

_URLENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
_MAX_FIELDS = 1000
_MOST_SEPARATORS = 100_000  # Of a form, with those between empty fields; those that follow are part of the last field.
_MOST_CSV, _MOST_ROWS = 4 * 1024 * 1024, 10_000  # Bytes; each row is a prompt.
_PIECE = 64 * 1024  # Bytes of a form that are decoded at a time; other threads go on in between.
_ARRAYS = ("tensor/", "application/x-npy", "image/", "audio/", "video/")
_PROMPT = "inputs"
# Fields of a form that are not the prompt, whatever else is there.
_NO_PROMPT = frozenset({"parameters", "stream", "adapters", "adapter"})

_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ALLOW_OVERRIDE = "ALLOW_REQUEST_HANDLER_OVERRIDE"
# Properties by which the server controls a handler; a client cannot set them.
_RESERVED = re.compile(
    r"batch_size|batch_\d.*|reset_rollingbatch|model_dir|device_id|.*_formatter|prediction_handler|init_handler",
    re.IGNORECASE | re.DOTALL,
)


_decode_json = JsonDecoder[Any]().decode


class FormError(InvalidRequest):
    """The body is not the form that its content type says."""


class Body(msgspec.Struct):
    """What the bodies of all of LMI's contracts have."""

    document: dict[str, Any]
    prompts: tuple[str, ...]
    parameters: dict[str, Any]  # Empty where they are absent or null.


class HandlerInput(NamedTuple):
    """What a handler's `Input` holds."""

    properties: tuple[tuple[str, str], ...]
    contents: tuple[tuple[str | None, bytes], ...]


def media_type(content_type: str) -> str:
    """The content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def read_body(call: Call, prompts_of: Callable[[Any], tuple[str, ...]], wanted: str = "`inputs`") -> Body:
    """A call's body, whatever its content type.

    `prompts_of`: reads `inputs` that are not simply one prompt. `wanted`: what the body should have, for the message.

    Raises InvalidRequest: it is no object that could be a request, or has a constraint outside its parameters.
    """
    try:
        document = _decode_json(call.body) if call.content_type == JSON else decode(call.body, call.content_type)
    except (ValueError, RecursionError):
        document = decode(call.body, call.content_type)  # which says what is wrong
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
    return Body(document, prompts, parameters)


def decode(body: bytes, content_type: str) -> Any:
    """The JSON document that the body is or stands for.

    text/plain is the prompt itself, and text/csv has prompts in its column `inputs`; a form has the prompt in `inputs`,
    else in `data`, else in its first field of another name than `parameters`, `stream` and `adapters`. JSON is also
    taken where the content type is absent, application/octet-stream, or the one that curl sets by default.

    Raises InvalidRequest: the body is not of its content type, or the type cannot hold a prompt.
    """
    kind = media_type(content_type)
    if "application/json" in kind or kind in ("", "application/octet-stream"):
        return _json(body)
    if kind == "text/plain":
        return {_PROMPT: _text(body)}
    if kind == "text/csv":
        return _csv(body)
    if is_form(kind):
        return _json(body) if body.lstrip()[:1] == b"{" else _form(body, content_type)
    if kind.startswith(_ARRAYS):
        raise InvalidRequest(f"Content-Type {kind} cannot be a prompt; it is for a model with a handler of its own")
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
        reader = csv.DictReader(io.StringIO(_text(body.removeprefix(codecs.BOM_UTF8)), newline=""), strict=True)
        rows = list(islice(reader, _MOST_ROWS + 1))
    except csv.Error as error:
        raise InvalidRequest(f"the body is not valid CSV: {error}") from None
    if not rows or rows[0].get(_PROMPT) is None:
        raise InvalidRequest(f"the CSV must have a header row with a column `{_PROMPT}`, and at least one row after it")
    if len(rows) > _MOST_ROWS:
        raise InvalidRequest(f"the CSV has more than {_MOST_ROWS} rows")
    return {_PROMPT: [row[_PROMPT] for row in rows]}


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
    document: dict[str, Any] = {_PROMPT: _text(fields[name])}
    if (adapters := fields.get("adapters", fields.get("adapter"))) is not None:
        document["adapters"] = _text(adapters)
    return document


def stream_of(value: Any) -> bool:
    """The field `stream` of a body; false where it is absent or null. Raises InvalidRequest: it is not a boolean."""
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"`stream` must be true or false, got {json_kind(value)}")
    return bool(value)


def request_ids(call: Call, prompts: int) -> tuple[str, ...]:
    """An id for each prompt of a call: the call's own where there is one prompt."""
    return (call.request_id,) if prompts == 1 else tuple(f"{call.request_id}-{place}" for place in range(prompts))


def notes_of(document: dict[str, Any], fields: Iterable[str], ignored: Iterable[str]) -> tuple[str, ...]:
    """What the log says of a request: `ignored` parameters, and fields of the body beside the known `fields`."""
    notes = []
    if names := ", ".join(ignored):
        notes.append(f"parameters without effect: {names}")
    if unknown := document.keys() - fields:
        notes.append(f"fields without effect: {', '.join(sorted(unknown))}")
    return tuple(notes)


def input_of(call: Call) -> HandlerInput:
    """Query parameters and body as contents; headers, SageMaker's attributes and the request's id as properties. Raises
    ContractError: 400; the form is broken, or the request names a handler function."""
    given: list[tuple[str, str]] = []
    for name, value in call.headers:
        if name.lower() != _CUSTOM_ATTRIBUTES:
            given.append((name, value))
            continue
        for attribute in value.split(";"):
            key, equals, text = attribute.partition("=")
            if equals:
                given.append((key.strip(), text.strip()))
    if call.content_type:
        given.append(("Content-Type", call.content_type))
    properties = _properties([*given, ("requestId", call.request_id)])
    if "handler" in properties and os.environ.get(_ALLOW_OVERRIDE, "").lower() != "true":
        raise bad_request("The handler can't be overridden in a request")
    query = tuple((key, value.encode()) for key, value in call.query)
    return HandlerInput(tuple(properties.values()), (*query, *_contents(call)))


def priority_of(given: HandlerInput) -> int:
    """The property `x-priority`; lower ones are served first. Raises ContractError: 400; it is not an integer."""
    text = next((value for name, value in given.properties if name.lower() == "x-priority"), "")
    try:
        return int(text) if text else DEFAULT_PRIORITY
    except ValueError:
        raise bad_request(f"x-priority is no integer: {text}") from None


def _contents(call: Call) -> tuple[tuple[str | None, bytes], ...]:
    whole = (("data", call.body),)
    if not is_form(call.content_type):
        return whole
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError as error:
        raise bad_request(error.message) from None
    return tuple(fields) or whole  # an input without any content is the initializing call, which no client may make


def _properties(given: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Properties by their names in lower case: these count in any case, and a later value replaces an earlier one."""
    found: dict[str, tuple[str, str]] = {}
    for name, value in given:
        key = name.lower()
        if _RESERVED.fullmatch(name):
            continue
        shown = "handler" if key == "handler" else found.get(key, (name, ""))[0]  # handlers look it up in this case
        found[key] = (shown, value)
    return found


def is_form(content_type: str) -> bool:
    """Whether a body of this type has fields."""
    return media_type(content_type) in (_URLENCODED, _MULTIPART)


def form_fields(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """All fields and files of a form in order, without file names. Raises FormError: the form is broken."""
    return _urlencoded(body) if media_type(content_type) == _URLENCODED else _multipart(body, content_type)


def _urlencoded(body: bytes) -> list[tuple[str, bytes]]:
    """As `urllib.parse.parse_qsl`, which takes text only: here a value may be any bytes."""
    fields = [field for field in body.split(b"&", _MOST_SEPARATORS) if field]
    if len(fields) > _MAX_FIELDS:
        raise FormError(f"the form has more than {_MAX_FIELDS} fields")
    pairs = (field.replace(b"+", b" ").partition(b"=") for field in fields)
    return [(_unquoted(name).decode("utf-8", "replace"), _unquoted(value)) for name, _, value in pairs]


def _unquoted(text: bytes) -> bytes:
    """The text without its escapes, such as `%20`."""
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE
        if (escape := text.find(b"%", end - 2, end)) > 0:
            end = escape  # it goes on in the next piece
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
        if len(fields) >= _MAX_FIELDS:
            raise FormError(f"the form has more than {_MAX_FIELDS} fields")
        if isinstance(part, File):
            part.file_object.seek(0)
        data = part.value if isinstance(part, Field) else part.file_object.read()
        fields.append(((part.field_name or b"").decode("utf-8", "replace"), data or b""))

    in_memory = {"MAX_MEMORY_FILE_SIZE": float("inf")}
    try:
        parser = FormParser(_MULTIPART, add, add, lambda: ended.append(True), boundary, config=in_memory)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        if str(error).startswith("Field name not found"):
            raise FormError("a part of the multipart form has no name") from None
        raise FormError(f"the multipart form is broken: {error}") from error
    if not ended:
        raise FormError("the multipart form ends before its last boundary")
    return fields
