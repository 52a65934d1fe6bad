"""Reads constraints on the generated text, under every name that clients use for them.

Source: vLLM, `StructuredOutputsParams`, and `guided_json` and similar fields of earlier releases; OpenAI, "Structured
model outputs"; TGI's router, `GrammarType` in `src/lib.rs`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engines.errors import SHOWN, InvalidParameter
from engines.request import Constraint
from handlers.parsing.json_fields import JsonError, Kind, ParameterReader, decode_json

MAX_CHOICES, MAX_CHOICE_LENGTH = 1000, 10_000  # Limits on choices, because the engine makes one grammar of all choices.

# The fields of a request that constrain the whole generated text, with the JSON types of their values.
FORMS: Mapping[str, Kind] = {
    "structured_outputs": "object",
    "guided_decoding": "object",
    "response_format": "object",
    "grammar": "object",
    "guided_json": ["object", "string"],
    "guided_regex": "string",
    "guided_choice": "array",
    "guided_grammar": "string",
}
# vLLM's older names for `structured_outputs`.
OLDER = frozenset({"guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
# The fields that constrain the text in at least one contract. A contract that does not support a field refuses it.
CONSTRAINING = frozenset(
    {
        *FORMS,
        *("guided_whitespace_pattern", "structural_tag", "json_schema", "regex", "ebnf", "json_format"),
        *("response_pool", "guided_decoding_guide", "tool_choice", "function_call"),
        *("logit_bias", "allowed_token_ids", "bad_words", "bad_sequences", "bad_words_ids"),
        *("force_words_ids", "suppress_tokens", "sequence_bias", "min_tokens", "min_new_tokens", "min_length"),
        *("stop", "stop_sequences", "stop_strings", "stop_token_ids", "stop_words"),
    }
)

_OUTPUTS = ("structured_outputs", "guided_decoding")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# In earlier releases, these fields selected a back end. Here the server selects the back end.
_WITHOUT_EFFECT = ("disable_fallback", "backend_was_auto")
# The allowed values of `type`. OpenAI and TGI have the field `response_format`. Only TGI has `grammar`.
_TYPES = {
    "response_format": ("text", "json_object", "json_schema", "json", "regex"),
    "grammar": ("json_object", "json_schema", "json", "regex"),
}
# The names of the member with the schema or the regular expression: in TGI, in OpenAI's API, and in similar servers.
_MEMBERS = ("value", "json_schema", "schema")
_CHOICES = ("tool_choice", "function_call")


def read_constraint(read: ParameterReader) -> Constraint | None:
    """Return the constraint of a request. It may be in any of the fields in `FORMS`.

    Raises:
        InvalidParameter: The constraint is invalid, or there are several different constraints.
    """
    read.optional_string("guided_decoding_backend")  # A field of earlier releases, without effect here.
    values = {name: read.value(name, kind) for name, kind in FORMS.items()}
    given = [(name, constraint_of(name, value)) for name, value in values.items() if value is not None]
    return agreed([(name, constraint) for name, constraint in given if constraint is not None])


def agreed(found: Sequence[tuple[str, Constraint]]) -> Constraint | None:
    """Return the only constraint of a request. The request may have it under several names.

    Clients that support several releases of vLLM send `structured_outputs` and the older names. As in vLLM, the older
    names are then ignored.

    Args:
        found: The constraints with their names, in the order of `FORMS`.

    Raises:
        InvalidParameter: The constraints differ.
    """
    if len(found) > 1 and found[0][0] == "structured_outputs":
        found = [found[0], *[pair for pair in found[1:] if pair[0] not in OLDER]]
    for name, constraint in found[1:]:
        if not same_form(constraint, found[0][1]):
            raise InvalidParameter(name, f"cannot be combined with `{found[0][0]}`: send one of them")
    kept = min([constraint for _, constraint in found], key=lambda each: each.any_whitespace, default=None)
    if len(found) > 1 and kept is not None:
        kept = msgspec.structs.replace(kept, strict=strictest([constraint.strict for _, constraint in found]))
    return kept


def strict_of(form: Any) -> bool | None:
    """Return the value of `strict` in a form. Its default is False for OpenAI's form, and None for other forms.

    Clients put `strict` next to `type`, next to the schema, or into forms that have no such field. All of these are
    read.
    """
    if not isinstance(form, dict):
        return None
    for holder in (form, form.get("json_schema"), form.get("value")):
        if isinstance(holder, dict) and holder.get("strict") not in (None, False):
            return True
    return False if form.get("type") == "json_schema" and form.get("value") is None else None


def strictest(values: Collection[bool | None]) -> bool | None:
    """Combine several values of `Constraint.strict` into one."""
    return True if True in values else None if None in values else False


def same_form(one: Constraint, other: Constraint) -> bool:
    """Return True if two constraints allow the same texts, apart from white space in JSON."""
    schemas = [decoded(each.json_schema) for each in (one, other)]
    plain = [
        msgspec.structs.replace(each, parameter="", any_whitespace=True, json_schema=None, strict=None)
        for each in (one, other)
    ]
    return bool(plain[0] == plain[1] and schemas[0] == schemas[1])


def constraint_of(name: str, value: Any) -> Constraint | None:
    """Return the constraint of a field with this name (one of `FORMS`), or None if the field asks for plain text.

    Raises InvalidParameter, which names the wrong field or member and the expected value.
    """
    if FORMS[name] != "object":
        return Constraint(parameter=name, **_form(name, name.removeprefix("guided_"), value))
    members = ParameterReader({name: value}).optional_object(name) or {}
    return _structured_outputs(name, members) if name in _OUTPUTS else _typed(name, members)


def asks(name: str, value: Any) -> bool:
    """Return True if this field constrains the text. Null and an empty list constrain nothing.

    Args:
        name: One of `CONSTRAINING`.
        value: The field's value.
    """
    if name in _CHOICES:
        return value not in (None, "", "auto", "none")
    if name in FORMS:
        return value is not None and value != {"type": "text"}
    return bool(value)


def refuse_unread(values: Mapping[str, Any], unread: Iterable[str], message: str) -> None:
    """Refuse the constraint fields that this contract does not support.

    Args:
        message: The text after the parameter's name, which says what to do.

    Raises:
        InvalidParameter: The request has such a field. The error names the first one.
    """
    for name in sorted(CONSTRAINING.intersection(unread)):
        if asks(name, values.get(name)):
            raise InvalidParameter(name, message)


def decoded(value: Any) -> Any:
    """Decode a text if it is JSON. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except JsonError:
        return value


def _structured_outputs(parameter: str, values: dict[str, Any]) -> Constraint:
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
    name = within + kinds[0]
    form = _form(name, kinds[0], values[kinds[0]])
    if unknown := read.unread() - {within + name for name in (*_KINDS, *_WITHOUT_EFFECT)}:
        raise InvalidParameter(min(unknown)[:SHOWN], "is not a field that this server can follow")
    return Constraint(parameter=name, any_whitespace=any_whitespace, **form)


def _form(name: str, kind: str, value: Any) -> dict[str, Any]:
    read = ParameterReader({name: value})
    match kind:
        case "json":
            return {"json_schema": _schema(name, value)}
        case "choice":
            choice = read.strings(name, most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH)
            if not choice:
                raise InvalidParameter(name, "must have at least one string")
            return {"choice": tuple(dict.fromkeys(choice))}
        case "json_object":
            if not read.boolean(name, True):
                raise InvalidParameter(name, "must be true if it is given")
            return {"json_object": True}
        case _:
            text = read.optional_string(name) or ""
            if not text.strip():
                raise InvalidParameter(name, "must not be empty")
            return {kind: text}


def _schema(name: str, value: Any) -> str:
    if not isinstance(decoded(value), dict):
        raise InvalidParameter(name, "must be a JSON schema: an object, or the text of one")
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _typed(name: str, form: dict[str, Any]) -> Constraint | None:
    """Return the constraint of an object with a `type`: OpenAI's `response_format` or TGI's `grammar`."""
    kind, members = form.get("type"), [member for member in _MEMBERS if form.get(member) is not None]
    if kind not in _TYPES[name]:
        given = str(kind)[:SHOWN] if kind is not None else "none"
        raise InvalidParameter(f"{name}.type", f"must be one of {', '.join(_TYPES[name])}; got {given}")
    if kind == "text":
        if members:
            raise InvalidParameter(f"{name}.{members[0]}", "has no effect where `type` is text")
        return None
    if kind == "json_object" and not members and name == "response_format":
        return Constraint(parameter=name, json_object=True)
    if len(members) != 1:
        expected = "json_schema" if kind == "json_schema" and name == "response_format" else "value"
        raise InvalidParameter(name, f"of type {kind} must have `{expected}`; got {' and '.join(members) or 'none'}")
    (member,) = members
    place, value = f"{name}.{member}", form[member]
    if kind == "regex":
        if member != "value":
            raise InvalidParameter(place, "has no effect where `type` is regex; put the expression into `value`")
        return Constraint(parameter=place, **_form(place, "regex", value))
    # In these cases, the value is `{"name": ..., "schema": ...}`. Otherwise the value is the schema itself.
    if member == "json_schema" or (member == "value" and kind == "json_schema"):
        if not isinstance(value, dict):
            raise InvalidParameter(place, "must be an object with `schema`")
        place, value = f"{place}.schema", value.get("schema")
    return Constraint(
        parameter=place,
        json_schema=_schema(place, value),
        any_whitespace=member != "value",  # In TGI, the generated JSON has only single spaces as white space.
        strict=strict_of(form) if name == "response_format" else strict_of(form) or None,
    )
