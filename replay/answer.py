"""The parts of a reply that a client reads: its framing, its records and its last error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from replay.request import Reply, objects_in

_LINES = frozenset(("application/jsonlines", "application/x-jsonlines", "application/x-ndjson", "application/jsonl"))
_EVENTS = "text/event-stream"
_DONE = "[DONE]"
_LINE_END = re.compile(r"\r\n|\n|\r")
_FIELD = re.compile(r"(data|event|id|retry)(: ?|$)")


class Framing(StrEnum):
    """The format of a body."""

    EMPTY = "an empty body"
    OBJECT = "one JSON value"
    ARRAY = "a JSON array"
    LINES = "JSON lines"
    EVENTS = "server-sent events"
    TEXT = "text"
    BINARY = "binary data"


@dataclass(slots=True)
class Events:
    """The properties of a stream of server-sent events that are not visible in its data."""

    names: list[str] = field(default_factory=list)  # The distinct names of the events, in the order of occurrence.
    comments: bool = False  # Whether there is a comment with text. Empty comments only keep a connection open.
    done: bool = False  # Whether the last event is `[DONE]`.
    spaced: bool = False  # Whether a space follows `data:`.
    fields: set[str] = field(default_factory=set)  # `id` and `retry`, if they occur.
    line_end: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed reply."""

    reply: Reply
    framing: Framing
    records: list[Any]  # JSON values. A JSON body that is not a stream is one record. A text has no records.
    events: Events | None = None
    broken: int = 0  # The number of stream records that are not JSON.

    @property
    def text(self) -> str:
        """The body, if it is plain text."""
        return self.reply.body.decode(errors="replace") if self.framing is Framing.TEXT else ""

    @property
    def is_stream(self) -> bool:
        return self.framing in (Framing.EVENTS, Framing.LINES)

    def has(self, field: str) -> bool:
        """Return True if the first record has a field with this name at any depth."""
        return any(field in found for found in objects_in(self.records[:1]))

    @property
    def error(self) -> Any:
        """The error that ends the answer. None if the answer succeeded."""
        last = self.records[-1] if self.records else None
        if self.reply.status >= 400:
            return last if last is not None else self.text
        return last if is_error(last) else None


def is_error(record: Any) -> bool:
    """Return True if a record is an error of one of the contracts."""
    if not isinstance(record, dict):
        return False
    if record.get("error") not in (None, "") or record.get("object") == "error" or record.get("type") == "error":
        return True
    token, details = record.get("token"), record.get("details")
    if isinstance(token, dict) and token.get("error_msg"):
        return True
    return isinstance(details, dict) and details.get("finish_reason") == "error"


def parse(reply: Reply, *, streams: bool) -> Answer:
    """Parse a reply.

    Args:
        streams: Whether the request asks for a stream. If True, a one-line body without a content type is a stream.

    Raises:
        RecursionError: The JSON is nested too deeply.
    """
    if not reply.body:
        return Answer(reply, Framing.EMPTY, [])
    kind = reply.content_type.partition(";")[0].strip().lower()
    try:
        text = reply.body.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Answer(reply, Framing.BINARY, [])
    if kind == _EVENTS or (kind not in _LINES and _begins_with_event(text)):
        events, data = _events(text)
        records, broken = _values(data)
        return Answer(reply, Framing.EVENTS, records, events, broken)
    if kind not in _LINES and not (streams and not kind):
        found, value = _value(text)
        if found:
            return Answer(reply, Framing.ARRAY if isinstance(value, list) else Framing.OBJECT, [value])
    lines = [line for line in _LINE_END.split(text) if line.strip()]
    records, broken = _values(lines)
    if kind in _LINES or (records and not broken):
        return Answer(reply, Framing.LINES, records, None, broken)
    return Answer(reply, Framing.TEXT, [])


def _begins_with_event(text: str) -> bool:
    line = _LINE_END.split(text.lstrip("\r\n"), maxsplit=1)[0]
    return line.startswith(":") or _FIELD.match(line) is not None


def _events(text: str) -> tuple[Events, list[str]]:
    """Return the properties of the events, and the data of each event."""
    events = Events()
    data: list[str] = []
    found: list[str] = []  # The data lines of the current event.
    first = _LINE_END.search(text)
    events.line_end = first[0] if first else ""
    for line in [*_LINE_END.split(text), ""]:
        if not line:
            if found:
                data.append("\n".join(found))
                found = []
            continue
        if line.startswith(":"):
            events.comments |= bool(line[1:].strip())
            continue
        name, _, value = line.partition(":")
        if name == "data":
            if value.strip() != _DONE:
                events.spaced |= value.startswith(" ")
            found.append(value.removeprefix(" "))
        elif name == "event" and (given := value.strip()) not in events.names:
            events.names.append(given)
        elif name in ("id", "retry"):
            events.fields.add(name)
    if data and data[-1].strip() == _DONE:
        events.done = True
        data.pop()
    return events, data


def _values(texts: Iterable[str]) -> tuple[list[Any], int]:
    """Return the JSON values, and the number of texts that are not JSON."""
    records, broken = [], 0
    for text in texts:
        found, value = _value(text)
        if found:
            records.append(value)
        broken += not found
    return records, broken


def _value(text: str) -> tuple[bool, Any]:
    try:
        return True, json.loads(text)
    except ValueError:
        return False, None
