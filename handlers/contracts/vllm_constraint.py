"""vLLM's `structured_outputs` object, and `guided_decoding` as it was called earlier, as a `Constraint`.

Source: vLLM's `StructuredOutputsParams` and, before it, `GuidedDecodingParams`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contracts.parameter_reader import ParameterReader
from handlers.errors import InvalidParameter
from handlers.request import Constraint

CONSTRAINT_NAMES = frozenset({"structured_outputs", "guided_decoding"})
MAX_CHOICES, MAX_CHOICE_LENGTH = 1000, 10_000
"""The engine makes one grammar of them before it begins."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_WITHOUT_EFFECT = ("disable_fallback", "backend_was_auto")
"""Of earlier releases; they choose among back ends, which is the server's business."""


def read_constraint(read: ParameterReader) -> Constraint | None:
    """The request's constraint, if it has one.

    Raises:
        InvalidParameter: naming the field within the object.
    """
    given = [name for name in sorted(CONSTRAINT_NAMES) if read.has(name)]
    if len(given) > 1:
        raise InvalidParameter("guided_decoding", "is the earlier name of `structured_outputs`: send one of them")
    objects = {name: read.optional_object(name) for name in given}
    return next((_constraint(name, values or {}) for name, values in objects.items()), None)


def _constraint(parameter: str, values: dict[str, Any]) -> Constraint:
    within = f"{parameter}."
    read = ParameterReader({within + name: value for name, value in values.items()})
    kinds = [kind for kind in _KINDS if read.has(within + kind)]
    if len(kinds) != 1:
        raise InvalidParameter(
            parameter, f"must have exactly one of {', '.join(_KINDS)}; got {' and '.join(kinds) or 'none'}"
        )
    any_whitespace = not read.boolean(within + "disable_any_whitespace", False)
    if read.boolean(within + "disable_additional_properties", False):
        raise InvalidParameter(
            within + "disable_additional_properties",
            'cannot be switched on here: put "additionalProperties": false into the schema',
        )
    kind = kinds[0]
    constraint = Constraint(
        parameter=within + kind,
        json_schema=_schema(within + kind, values[kind]) if kind == "json" else None,
        regex=_text(read, within + kind) if kind == "regex" else None,
        choice=_choice(read, within + kind) if kind == "choice" else None,
        grammar=_text(read, within + kind) if kind == "grammar" else None,
        json_object=kind == "json_object" and _must_be_true(read, within + kind),
        any_whitespace=any_whitespace,
    )
    for name in sorted(read.unread() - {within + name for name in (*_KINDS, *_WITHOUT_EFFECT)}):
        raise InvalidParameter(name[:80], "is not a field that this server can follow")
    return constraint


def _schema(parameter: str, value: Any) -> str:
    """A schema as an object, or as its text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise InvalidParameter(parameter, "must be a JSON schema: an object, or the text of one")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _choice(read: ParameterReader, name: str) -> tuple[str, ...]:
    choice = read.strings(name, most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH)
    if not choice:
        raise InvalidParameter(name, "must have at least one string")
    return tuple(dict.fromkeys(choice))


def _text(read: ParameterReader, name: str) -> str:
    text = read.optional_string(name) or ""
    if not text.strip():
        raise InvalidParameter(name, "must not be empty")
    return text


def _must_be_true(read: ParameterReader, name: str) -> bool:
    if not read.boolean(name, True):
        raise InvalidParameter(name, "must be true if it is given")
    return True
