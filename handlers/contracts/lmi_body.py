"""LMI request bodies by content type. Source: contracts/lmi.md section 3.1."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import msgspec

_decode = msgspec.json.Decoder().decode


class BodyError(ValueError):
    """The body is not what its content type says, or of a type that text generation cannot take."""


def decode(body: bytes, content_type: str) -> Any:
    """The JSON document that the body is or stands for.

    text/plain is the prompt itself; a form has it in `inputs`, else in `data`, else in its first field. JSON is also
    taken where the content type is absent, says nothing, or is the one that curl sets by default.

    Raises:
        BodyError: with a message for the client.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if "application/json" in kind or kind == "application/jsonlines":
        return _json(body)
    if kind == "text/plain":
        return {"inputs": _text(body)}
    if kind == "application/x-www-form-urlencoded":
        return _json(body) if body.lstrip()[:1] == b"{" else _form(body)
    if kind in ("", "application/octet-stream"):
        return _json(body)
    raise BodyError(f"Content-Type {kind} is not supported here; send application/json, text/plain or a form")


def _json(body: bytes) -> Any:
    if not body:
        raise BodyError("the body is empty; expected a JSON object with `inputs`")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise BodyError(f"the text is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _form(body: bytes) -> dict[str, Any]:
    fields = dict(parse_qsl(_text(body), keep_blank_values=True))
    if not fields:
        raise BodyError("the form is empty; expected a field `inputs`")
    inputs = fields.get("inputs", fields.get("data", next(iter(fields.values()))))
    document: dict[str, Any] = {"inputs": inputs}
    if "parameters" in fields:
        document["parameters"] = _json(fields["parameters"].encode())
    if "stream" in fields:
        document["stream"] = {"true": True, "false": False}.get(fields["stream"].lower(), fields["stream"])
    return document
