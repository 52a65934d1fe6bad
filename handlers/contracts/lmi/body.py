"""From an HTTP request to what the handler sees. Source: contracts/lmi.md section 1.3."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from handlers.contracts.json_fields import json_fault, json_kind
from handlers.contracts.lmi.errors import front_end_reply
from handlers.contracts.protocol import Call, ContractError

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


DEFAULT_PRIORITY = 3

_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ALLOW_OVERRIDE = "ALLOW_REQUEST_HANDLER_OVERRIDE"
_RESERVED = re.compile(
    r"batch_size|batch_\d.*|reset_rollingbatch|model_dir|device_id|.*_formatter|prediction_handler|init_handler",
    re.IGNORECASE | re.DOTALL,
)
"""Properties by which the server tells a handler something; a client cannot."""


class HandlerInput(NamedTuple):
    """What an `Input` holds."""

    properties: tuple[tuple[str, str], ...]
    contents: tuple[tuple[str | None, bytes], ...]


def input_of(call: Call) -> HandlerInput:
    """Query parameters and body as contents; headers, SageMaker's attributes and the request's id as properties.

    Raises:
        ContractError: 400; the form is broken, or the request names a handler function.
    """
    properties = _Properties()
    for name, value in call.headers:
        if name.lower() != _CUSTOM_ATTRIBUTES:
            properties.set(name, value)
            continue
        for attribute in value.split(";"):
            key, equals, text = attribute.partition("=")
            if equals:
                properties.set(key.strip(), text.strip())
    if call.content_type:
        properties.set("Content-Type", call.content_type)
    if properties.get("handler") is not None and os.environ.get(_ALLOW_OVERRIDE, "").lower() != "true":
        raise _bad_request("The handler can't be overridden in a request")
    properties.set("requestId", call.request_id)
    query = tuple((key, value.encode()) for key, value in call.query)
    return HandlerInput(properties.pairs(), (*query, *_body(call)))


def priority_of(given: HandlerInput) -> int:
    """Property `x-priority`; lower ones are served first.

    Raises:
        ContractError: 400; it is no integer.
    """
    text = next((value for name, value in given.properties if name.lower() == "x-priority"), "")
    try:
        return int(text) if text else DEFAULT_PRIORITY
    except ValueError:
        raise _bad_request(f"x-priority is no integer: {text}") from None


def _body(call: Call) -> tuple[tuple[str | None, bytes], ...]:
    if not is_form(call.content_type):
        return (("data", call.body),)
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError as error:
        raise _bad_request(str(error)) from None
    # An input without any content is the initializing call, which no client may make.
    return tuple(fields) or (("data", call.body),)


class _Properties:
    """Names count whatever their case; a later value replaces an earlier one."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[str, str]] = {}

    def set(self, name: str, value: str) -> None:
        if _RESERVED.fullmatch(name):
            return
        if name.lower() == "handler":  # handlers look it up as it is written here
            name = "handler"
        known = self._pairs.get(name.lower())
        self._pairs[name.lower()] = (known[0] if known else name, value)

    def get(self, name: str) -> str | None:
        pair = self._pairs.get(name.lower())
        return pair[1] if pair else None

    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._pairs.values())


def _bad_request(message: str) -> ContractError:
    return ContractError(front_end_reply(400, "BadRequestException", message), message)
