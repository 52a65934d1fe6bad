"""Compares two answers to one request, and lists the differences that a client could notice.

Ids, times and random numbers are masked. The text of a sampled answer, its number of tokens and its log probabilities
differ from call to call, so only their form is compared. Servers may split the same text into different numbers of
records. So of a stream, the first record, the last record, and all other records together are compared.
"""

from __future__ import annotations

import base64
import difflib
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from replay.answer import Answer, Framing, is_error
from replay.request import encodable
from replay.shapes import (
    FINISH_REASONS,
    PROBABILITIES,
    PROMPT_COUNTS,
    TEXTS,
    TOKEN_COUNTS,
    Field,
    Shape,
    cosine,
    has_any,
    inner,
    is_by_token,
    is_masked,
    is_per_token,
    is_vector,
    key_of,
    kind_of,
)

_WORD = re.compile(r"\s*\S+|\s+")
_WORDS = 200  # How many words are compared. The time grows with the cube of this number: 0.12 s for repeated words.
_SHOWN = 200
_NEAR = 0.99  # The lowest cosine at which vectors count as equal.
_TOLERANCE = 0.02  # The relative tolerance for scores.
_LEAST = 0.01  # Smaller differences between scores are ignored.
# The finish reasons of each contract. If two texts differ, their finish reasons may differ as well. This does not count
# as a difference if one contract has both reasons.
_REASONS = (
    frozenset(("length", "eos_token", "stop_sequence")),
    frozenset(("length", "stop", "tool_calls", "content_filter", "function_call")),
    frozenset(("max_tokens", "end_turn", "stop_sequence", "tool_use")),
)
# Headers that proxies or HTTP servers add. No client of a contract reads them.
_IRRELEVANT = re.compile(
    r"x-(envoy|b3|cloud|cache|powered|served|forwarded|real-ip|trace|runtime|amz-cf|amzn-trace|amz-id|content-type|"
    r"frame|xss|slipway-container|accel)"
)
_RELEVANT = ("retry-after", "www-authenticate", "location", "access-control-allow-origin", "allow")
FROM_THE_START = " from the start"  # Added to `Difference.where` if texts differ already in their first characters.
_ALIKE = 3  # Texts with a shorter common beginning, in characters, differ from the start.
_CUMULATIVE = "responses"  # Each record of happy_vllm's stream contains the whole text so far.


class Kind(StrEnum):
    """A kind of difference."""

    NO_ANSWER = "no answer"
    STATUS = "status"
    CONTENT_TYPE = "content type"
    FRAMING = "framing"
    EVENTS = "events"
    MISSING = "missing field"
    EXTRA = "extra field"
    TYPE = "type"
    NULL = "null or absent"
    ORDER = "order of fields"
    FINISH_REASON = "finish reason"
    TOKENS = "number of tokens"
    ERROR_BODY = "error body"
    ERROR_MESSAGE = "error message"
    TEXT = "text"
    RECORDS = "number of records"
    PROBABILITIES = "log probabilities"
    HEADER = "header"
    VALUE = "value"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two answers."""

    kind: Kind
    where: str  # A JSON path, the name of a header, or a part of the answer.
    old: str
    new: str
    is_text: bool = False  # Whether `old` and `new` may contain texts of users.


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two answers, and how similar their texts are."""

    differences: tuple[Difference, ...]
    similarity: float | None = None  # From 0 to 1. None: no text, an error, or servers with different models.


def compare(old: Answer, new: Answer, *, greedy: bool, other_model: bool = False) -> Comparison:
    """Compare two answers.

    Args:
        old: The answer of the old server.
        new: The answer of the new server.
        greedy: Whether the request asks for the most probable tokens, so that the texts must be equal.
        other_model: Whether the servers run different models. If so, texts and numbers of tokens are not compared.
    """
    return _Comparing(old, new, greedy and not other_model, other_model).result()


class _Comparing:
    """A comparison in progress."""

    def __init__(self, old: Answer, new: Answer, greedy: bool, other_model: bool) -> None:
        self._old, self._new = old, new
        self._greedy, self._other_model = greedy, other_model
        self._found: dict[tuple[Kind, str], Difference] = {}
        self._texts_equal = False
        self._in_error = False

    def result(self) -> Comparison:
        old, new = self._old, self._new
        if old.reply.status != new.reply.status:
            self._add(Kind.STATUS, "", str(old.reply.status), str(new.reply.status))
        both_failed = old.error is not None and new.error is not None
        if (old.error is None) != (new.error is None):
            # Only one body is an error. A comparison of the bodies' fields would report the same again.
            if old.reply.status == new.reply.status:
                self._add(Kind.ERROR_BODY, "", _said(old.error), _said(new.error), is_text=True)
            return Comparison(tuple(self._found.values()))
        self._content_type()
        self._headers()
        self._framing()
        similarity = None if both_failed else self._texts()
        if both_failed and old.reply.status >= 400:
            self._in_error = True
            self._errors()
        elif old.is_stream and new.is_stream:
            self._events()
            self._streams()
        elif old.is_stream or new.is_stream:
            pass  # `_framing` reports this difference.
        elif old.records and new.records:
            self._json("", _unwrapped(old, new), _unwrapped(new, old))
        return Comparison(tuple(self._found.values()), similarity)

    def _add(self, kind: Kind, where: str, old: str, new: str, *, is_text: bool = False) -> None:
        if self._in_error and kind in _OF_ERRORS:
            kind = Kind.ERROR_BODY
        where = encodable(where)
        self._found.setdefault((kind, where), Difference(kind, where, _short(old), _short(new), is_text))

    # The head of a reply, and its format.

    def _content_type(self) -> None:
        replies = self._old.reply, self._new.reply
        (old, old_more), (new, new_more) = (_media_type(reply.content_type) for reply in replies)
        if (not old and not replies[0].headers_known) or (not new and not replies[1].headers_known):
            return
        if old != new:
            self._add(Kind.CONTENT_TYPE, "", old or "none", new or "none")
        elif old_more != new_more:
            self._add(Kind.CONTENT_TYPE, "parameters", old_more or "none", new_more or "none")

    def _headers(self) -> None:
        old, new = self._old.reply, self._new.reply
        if not (old.headers_known and new.headers_known):
            return
        given = {name for name, _ in new.headers}
        for name, _ in old.headers:
            relevant = name in _RELEVANT or (name.startswith("x-") and not _IRRELEVANT.match(name))
            if relevant and name not in given:
                self._add(Kind.HEADER, name, "present", "absent")

    def _framing(self) -> None:
        old, new = self._old, self._new
        if old.framing != new.framing:
            self._add(Kind.FRAMING, "", old.framing.value, new.framing.value)
        elif old.framing is Framing.TEXT and old.reply.status < 400 and old.text != new.text and self._greedy:
            self._add(Kind.TEXT, "", old.text, new.text, is_text=True)
        if new.broken and not old.broken:
            self._add(Kind.FRAMING, "records", "JSON", f"{new.broken} records are no JSON")

    def _events(self) -> None:
        old, new = self._old.events, self._new.events
        if old is None or new is None:
            return
        for name in old.names:
            if name not in new.names:
                self._add(Kind.EVENTS, "event", name, "absent")
        for name in new.names:
            if name not in old.names:
                self._add(Kind.EVENTS, "event", "absent", name)
        for where, one, other in (
            ("[DONE]", old.done, new.done),
            ("comment", old.comments, new.comments),
            ("space after data:", old.spaced, new.spaced),
            ("id", "id" in old.fields, "id" in new.fields),
            ("retry", "retry" in old.fields, "retry" in new.fields),
        ):
            if one != other:
                self._add(Kind.EVENTS, where, _presence(one), _presence(other))
        if old.line_end != new.line_end and self._old.records and self._new.records:
            self._add(Kind.EVENTS, "line end", repr(old.line_end), repr(new.line_end))

    # Texts.

    def _texts(self) -> float | None:
        """Compare the texts of both answers, and return how similar they are."""
        old, new = texts(self._old.records), texts(self._new.records)
        # If the answers have their texts in different fields, the longest text of each answer is compared.
        pairs = [(name, old[name], new[name]) for name in old if name in new] or [("", _longest(old), _longest(new))]
        apart = [(name, one, other) for name, one, other in pairs if one != other]
        self._texts_equal = not apart
        if apart and self._greedy:
            name, one, other = apart[0]
            begins_alike = len(one[: _common(one, other)].strip()) >= _ALIKE
            self._add(
                Kind.TEXT,
                name if begins_alike else f"{name}{FROM_THE_START}".strip(),
                *_apart(one, other),
                is_text=True,
            )
        if self._other_model or not (old or new):
            return None
        return similarity(" ".join(old.values()), " ".join(new.values())) if apart else 1.0

    # Errors.

    def _errors(self) -> None:
        old, new = self._old, self._new
        if not old.records or not new.records:
            # If only one body is JSON, `_framing` reports the difference.
            if old.framing == new.framing and old.text != new.text:
                self._add(Kind.ERROR_MESSAGE, "", old.text, new.text, is_text=True)
            return
        self._json("", old.records[-1], new.records[-1])

    # Streams.

    def _streams(self) -> None:
        old, new = self._old.records, self._new.records
        if not old or not new:
            if len(old) != len(new):
                self._add(Kind.RECORDS, "", str(len(old)), str(len(new)))
            return
        failed = is_error(old[-1])
        self._in_error = failed
        self._json("last", old[-1], new[-1])
        self._in_error = False
        if len(old) > 1 and len(new) > 1:
            self._json("first", old[0], new[0])
        if len(old) > 2 and len(new) > 2:
            self._middle(Shape.of(old[1:-1]), Shape.of(new[1:-1]))
        ids = token_ids(old), token_ids(new)
        if ids[0] and ids[0] == ids[1] and len(old) != len(new):
            self._add(Kind.RECORDS, "", str(len(old)), str(len(new)))

    def _middle(self, old: Shape, new: Shape) -> None:
        gone: list[str] = []
        for where, found in old.fields.items():
            name = f"middle.{where}" if where else "middle"
            other = new.fields.get(where)
            if other is None:
                if _in_each(old, where, found) and not any(_is_below(where, one) for one in gone):
                    gone.append(where)
                    self._missing(name, found, extra=False)
                continue
            if _in_each(old, where, found) and not _in_each(new, where, other):
                self._missing(name, found, extra=False)
            self._kinds(name, found, other)
            self._constants(name, found, other)
        come: list[str] = []
        for where, found in new.fields.items():
            is_new = where not in old.fields and not any(_is_below(where, one) for one in come)
            if is_new and _in_each(new, where, found):
                come.append(where)
                self._missing(f"middle.{where}", found, extra=True)
        for where, keys in old.orders.items():
            if where in new.orders:
                self._order(f"middle.{where}" if where else "middle", keys, new.orders[where])

    def _missing(self, where: str, found: Field, *, extra: bool) -> None:
        is_empty = found.example == [] and found.kinds == {"array"}
        if found.kinds == {"null"} or is_empty:
            value = "an empty array" if is_empty else "null"
            self._add(Kind.NULL, where, *(("absent", value) if extra else (value, "absent")))
        elif has_any(where, PROBABILITIES):
            self._add(Kind.PROBABILITIES, where, *(("absent", "present") if extra else ("present", "absent")))
        else:
            is_text = isinstance(found.example, str)
            example = "present" if is_text and key_of(where) in TEXTS else _said(found.example)
            kind, pair = (Kind.EXTRA, ("absent", example)) if extra else (Kind.MISSING, (example, "absent"))
            self._add(kind, where, *pair, is_text=is_text and example != "present")

    def _kinds(self, where: str, old: Field, new: Field) -> None:
        alike = old.kinds & new.kinds or (is_masked(where) and "null" in old.kinds | new.kinds)
        if alike and (new.kinds <= old.kinds or not self._texts_equal):
            return
        kind = Kind.PROBABILITIES if has_any(where, PROBABILITIES) else Kind.TYPE
        self._add(kind, where, " or ".join(sorted(old.kinds)), " or ".join(sorted(new.kinds)))

    def _constants(self, where: str, old: Field, new: Field) -> None:
        """Compare a field whose value is the same in all records of each stream."""
        if is_masked(where) or key_of(where) in TEXTS or has_any(where, PROBABILITIES) or _is_token(where):
            return
        if len(old.values) == 1 and len(new.values) == 1 and old.values != new.values:
            (one,), (other,) = old.values, new.values
            if type(one) is type(other):
                kind = Kind.FINISH_REASON if key_of(where) in FINISH_REASONS else Kind.VALUE
                self._add(kind, where, _said(one), _said(other), is_text=isinstance(one, str))

    # JSON values.

    def _json(self, where: str, old: Any, new: Any) -> None:
        kinds = kind_of(old), kind_of(new)
        if kinds[0] != kinds[1]:
            self._types(where, old, new, kinds)
        elif isinstance(old, dict):
            self._objects(where, old, new)
        elif isinstance(old, list):
            self._arrays(where, old, new)
        else:
            self._values(where, old, new)

    def _types(self, where: str, old: Any, new: Any, kinds: tuple[str, str]) -> None:
        if is_masked(where) and "null" in kinds:
            return  # A random seed or a fingerprint may be missing.
        if key_of(where) in FINISH_REASONS:
            self._finish_reason(where, old, new)
        elif has_any(where, PROBABILITIES):
            self._add(Kind.PROBABILITIES, where, *kinds)
        elif self._is_message(where):
            self._add(Kind.ERROR_BODY, where, *kinds)
        elif "null" in kinds and key_of(where) in TEXTS and not self._texts_equal:
            return  # The text ends in a different record.
        else:
            self._add(Kind.TYPE, where, *kinds)

    def _objects(self, where: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        if is_by_token(where, old) and is_by_token(where, new):
            for one, other in zip(old.values(), new.values(), strict=False):
                self._json(f"{where}.*", one, other)
            return
        for key in old:
            name = inner(where, key)
            if key not in new:
                self._missing(name, _field(old[key]), extra=False)
            else:
                self._json(name, old[key], new[key])
        for key in new:
            if key not in old:
                self._missing(inner(where, key), _field(new[key]), extra=True)
        self._order(where, tuple(old), tuple(new))

    def _order(self, where: str, old: Sequence[str], new: Sequence[str]) -> None:
        both = set(old) & set(new)
        one, other = [key for key in old if key in both], [key for key in new if key in both]
        if one != other:
            self._add(Kind.ORDER, where, ", ".join(one), ", ".join(other))

    def _arrays(self, where: str, old: list[Any], new: list[Any]) -> None:
        if is_vector(old) and is_vector(new):
            self._vectors(where, old, new)
            return
        if len(old) != len(new):
            depends = is_per_token(where) or has_any(where, PROBABILITIES)
            if not depends:
                self._add(Kind.VALUE, f"{where}[]", f"{len(old)} elements", f"{len(new)} elements")
            elif self._texts_equal and not self._other_model:
                self._add(Kind.TOKENS, f"{where}[]", f"{len(old)} elements", f"{len(new)} elements")
            elif not old or not new:
                kind = Kind.PROBABILITIES if has_any(where, PROBABILITIES) else Kind.TOKENS
                self._add(kind, f"{where}[]", f"{len(old)} elements", f"{len(new)} elements")
        for one, other in zip(old, new, strict=False):
            self._json(f"{where}[]", one, other)

    def _vectors(self, where: str, old: list[float], new: list[float]) -> None:
        if len(old) != len(new):
            if not is_per_token(where):
                self._add(Kind.NUMBER, where, f"{len(old)} numbers", f"{len(new)} numbers")
        elif not self._other_model and not is_per_token(where) and not (near := cosine(old, new)) >= _NEAR:
            self._add(Kind.NUMBER, where, "", f"the cosine of the vectors is {near:.3f}")

    def _values(self, where: str, old: Any, new: Any) -> None:
        if old == new or is_masked(where):
            return
        name = key_of(where)
        if name in FINISH_REASONS:
            self._finish_reason(where, old, new)
        elif name in PROMPT_COUNTS or name in TOKEN_COUNTS:
            depends = name in TOKEN_COUNTS and not self._texts_equal
            if not self._other_model and not depends and name != "cached_tokens":
                self._add(Kind.TOKENS, where, _said(old), _said(new))
        elif has_any(where, PROBABILITIES) or _is_token(where):
            return
        elif where == "last.index" and not self._texts_equal:
            return  # In TGI's streams, `index` is the number of the record, which depends on the text.
        elif self._is_message(where):
            self._add(Kind.ERROR_MESSAGE, where, str(old), str(new), is_text=True)
        elif name == "embedding" and (vectors := _decoded(old, new)) is not None:
            self._vectors(where, *vectors)
        elif isinstance(old, str) and name in TEXTS:
            return  # Texts are compared as a whole.
        elif isinstance(old, float) or isinstance(new, float):
            if not self._other_model and not math.isclose(old, new, rel_tol=_TOLERANCE, abs_tol=_LEAST):
                self._add(Kind.NUMBER, where, _said(old), _said(new))
        else:
            self._add(Kind.VALUE, where, _said(old), _said(new), is_text=isinstance(old, str))

    def _finish_reason(self, where: str, old: Any, new: Any) -> None:
        alike = any({old, new} <= reasons for reasons in _REASONS if isinstance(old, str) and isinstance(new, str))
        # vLLM's `stop_reason` is the stop text or null.
        of_stop = key_of(where) == "stop_reason" and None in (old, new)
        if (alike or of_stop) and (self._other_model or not self._texts_equal):
            return
        self._add(Kind.FINISH_REASON, where, _said(old), _said(new))

    def _is_message(self, where: str) -> bool:
        """Return True if a field contains the wording of an error."""
        return self._in_error and key_of(where) in ("error", "message", "msg", "error_msg", "detail", "messages")


_OF_ERRORS = frozenset((Kind.MISSING, Kind.EXTRA, Kind.TYPE, Kind.NULL, Kind.VALUE, Kind.ORDER))


def texts(records: Sequence[Any]) -> dict[str, str]:
    """Return the generated texts of an answer, keyed by JSON path. The texts of a stream's records are joined."""
    found: dict[str, list[str]] = {}
    for record in records:
        for where, text in _texts_of(record, ""):
            found.setdefault(where, []).append(text)
    joined = {where: parts[-1] if where.startswith(_CUMULATIVE) else "".join(parts) for where, parts in found.items()}
    return {where: text for where, text in joined.items() if text}


def _longest(found: dict[str, str]) -> str:
    return max(found.values(), key=len, default="")


def _texts_of(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in PROBABILITIES and key not in ("tokens", "prefill", "top_tokens", "details", "usage"):
                yield from _texts_of(part, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _texts_of(part, f"{where}[{number}]")
    elif isinstance(value, str) and re.sub(r"\[\d+\]$", "", where).rpartition(".")[2] in TEXTS:
        yield where, value


def token_ids(records: Sequence[Any]) -> list[int]:
    """Return the token ids in a stream. Empty if the records do not contain them."""
    tokens = [record.get("token") for record in records if isinstance(record, dict)]
    found: list[Any] = [token.get("id") for token in tokens if isinstance(token, dict)]
    return found if all(isinstance(number, int) for number in found) else []


def similarity(old: str, new: str) -> float:
    """Return how similar two texts are, from 0 to 1. Only the beginnings of the texts are compared."""
    one, other = (_WORD.findall(text[: _WORDS * 12])[:_WORDS] for text in (old, new))
    return difflib.SequenceMatcher[str](None, one, other, autojunk=False).ratio()


def _common(old: str, new: str) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(old), len(new)))


def _apart(old: str, new: str) -> tuple[str, str]:
    """Return two texts from shortly before their first difference."""
    begin = max(0, _common(old, new) - 20)
    mark = "..." if begin else ""
    return mark + old[begin : begin + _SHOWN], mark + new[begin : begin + _SHOWN]


def _field(value: Any) -> Field:
    return Field(1, {kind_of(value)}, value)


def _in_each(shape: Shape, where: str, found: Field) -> bool:
    """Return True if every object that could have the field has it."""
    if where.endswith("[]"):
        return False  # An array may be empty.
    parent = where.rpartition(".")[0]
    return not where or found.count >= shape.parents.get(parent, 0) > 0


def _is_below(where: str, above: str) -> bool:
    return where.startswith((f"{above}.", f"{above}["))


def _is_token(where: str) -> bool:
    """Return True for a field of a token, such as its id or text, and for arrays with an entry for each token."""
    parts = [part.rstrip("[]*") for part in where.split(".")]
    return parts[-1] in ("token", "token_id", "special", "special_token") or is_per_token(where)


def _unwrapped(answer: Answer, other: Answer) -> Any:
    """Return the JSON value of an answer. If only one of the two answers is an array, return its first element."""
    value = answer.records[0]
    if answer.framing is Framing.ARRAY and other.framing is Framing.OBJECT and value:
        return value[0]
    return value


def _decoded(old: Any, new: Any) -> tuple[list[float], list[float]] | None:
    """Decode two vectors in base64, which OpenAI's Python client requests. None if the texts are not vectors."""
    vectors = array("f"), array("f")
    try:
        for vector, text in zip(vectors, (old, new), strict=True):
            vector.frombytes(base64.b64decode(text, validate=True))
    except (TypeError, ValueError):
        return None
    return vectors[0].tolist(), vectors[1].tolist()


def _media_type(text: str) -> tuple[str, str]:
    kind, _, more = text.partition(";")
    return kind.strip().lower(), more.replace(" ", "").lower()


def _presence(there: bool) -> str:
    return "present" if there else "absent"


def _said(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return kind_of(value) if isinstance(value, dict | list) else str(value)


def _short(text: str) -> str:
    text = encodable(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
