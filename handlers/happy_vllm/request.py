"""Reads the generation requests of happy_vllm's clients.

Source: happy_vllm, "Generating endpoints", sections "Keywords" and "Json format".
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from engines.errors import SHOWN, InvalidParameter, InvalidRequest
from engines.request import Constraint
from handlers.contract import Call
from handlers.happy_vllm.errors import WrongBody, not_json
from handlers.parsing.constraints import MAX_CHOICE_LENGTH, MAX_CHOICES, same_form
from handlers.parsing.json_fields import JsonError, Kind, decode_json, json_kind
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import TextReader, VllmParameters, read_vllm_parameters
from handlers.route_declarations import MOST_IDS

# Keywords of /v1/generate that vLLM does not have.
_OWN = frozenset({"prompt", "prompt_in_response", "response_pool", "json_format", "json_format_is_json_schema"})
_TYPES = ("string", "integer", "boolean", "number")  # Types of fields in the simple form of `json_format`.
_TYPES_IN_WORDS = ", ".join(f'"{name}"' for name in _TYPES)


def document(call: Call) -> dict[str, Any]:
    """Return the call's JSON object.

    Raises:
        WrongBody: The body is not a JSON object.
    """
    body = call.body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise WrongBody("the body is empty", "missing", "Field required")
    try:
        value = decode_json(body)
    except JsonError as error:
        raise not_json(str(error)) from None
    if not isinstance(value, dict):
        message = f"the body is {json_kind(value)}, not an object"
        raise WrongBody(message, "dict_type", "Input should be a valid dictionary")
    return value


class FieldReader(TextReader):
    """Reads a body's fields. Booleans and integers may be values that Pydantic would convert, such as "yes", 1 or "16".

    If a required field is absent, `WrongBody` is raised.
    """

    booleans = dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True) | dict.fromkeys(
        ("0", "f", "false", "n", "no", "off"), False
    )
    kinds: ClassVar[tuple[Kind, ...]] = ("integer",)

    def required_string(self, name: str) -> str:
        self._require(name)
        value = self._take(name, "string", None)
        if not isinstance(value, str):
            raise InvalidParameter(name, f"must be a string, got {json_kind(value)}")
        return value

    def required_ids(self, name: str, vocabulary_size: int) -> list[int]:
        self._require(name)
        ids = list(self.integers(name, minimum=0))
        if len(ids) > MOST_IDS:
            raise InvalidParameter(name, f"may have at most {MOST_IDS} token ids, got {len(ids)}")
        if ids and max(ids) >= vocabulary_size:
            raise InvalidParameter(name, f"must be ids of the vocabulary, below {vocabulary_size}, got {max(ids)}")
        return ids

    def _require(self, name: str) -> None:
        if not self.has(name):
            raise WrongBody(f"`{name}` is missing", "missing", "Field required", name)


class _SamplingReader(FieldReader):
    """Reads sampling parameters. Numbers and JSON documents may also be given as text."""

    kinds = TextReader.kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParameters:
    """One call's body, validated and translated."""

    prompt: str
    prompt_in_response: bool
    parameters: VllmParameters  # Includes the constraint of `response_pool` or `json_format`.


def read_generation(values: dict[str, Any], memo: ParameterMemo[tuple[bool, VllmParameters]]) -> GenerationParameters:
    """Validate and translate a body.

    Args:
        values: The body.
        memo: A cache of `prompt_in_response` and vLLM's parameters. The key is a body without its prompt.

    Raises:
        InvalidRequest: The prompt is missing, or keywords exclude each other.
        InvalidParameter: A keyword is unknown, or has the wrong type or value.
    """
    prompt = FieldReader(values).required_string("prompt")
    key = msgspec.json.encode({**values, "prompt": None})
    prompt_in_response, parameters = memo.get(key) or memo.keep(key, _read_parameters(values))
    return GenerationParameters(prompt=prompt, prompt_in_response=prompt_in_response, parameters=parameters)


def _read_parameters(values: dict[str, Any]) -> tuple[bool, VllmParameters]:
    read = FieldReader(values)
    prompt_in_response = read.boolean("prompt_in_response", False)
    constraints = [form for form in (_pool(read, values.get("response_pool")), _json_format(read)) if form is not None]
    parameters = read_vllm_parameters({name: values[name] for name in values.keys() - _OWN}, _SamplingReader)
    if parameters.request.sampling.constraint is not None:
        constraints.append(parameters.request.sampling.constraint)
    for other in constraints[1:]:
        if not same_form(other, constraints[0]):
            raise _conflict(constraints[0].parameter, other.parameter)
    if constraints:
        if constraints[0].parameter == "response_pool" and parameters.request.sampling.min_tokens > 0:
            raise _conflict("response_pool", "min_tokens")
        parameters = parameters.constrained(constraints[0])
    return prompt_in_response, parameters


def _conflict(one: str, other: str) -> InvalidRequest:
    return InvalidRequest(f"`{one}` cannot be combined with `{other}`")


def _pool(read: FieldReader, given: Any) -> Constraint | None:
    if given is not None and not isinstance(given, list):
        raise InvalidParameter("response_pool", f"must be an array of strings, got {json_kind(given)}")
    pool = read.strings("response_pool", most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH)
    return Constraint(parameter="response_pool", choice=tuple(dict.fromkeys(pool))) if pool else None


def _json_format(read: FieldReader) -> Constraint | None:
    form, is_json_schema = read.optional_object("json_format"), read.boolean("json_format_is_json_schema", False)
    if not form:
        return None
    json_schema = msgspec.json.encode(form if is_json_schema else _schema_of(form)).decode()
    # The JSON has no line breaks: white space costs tokens, and a small model may generate white space without end.
    return Constraint(parameter="json_format", json_schema=json_schema, any_whitespace=False)


def _schema_of(simple_form: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of these fields, and no others."""
    return {
        "type": "object",
        "properties": {name: _property(name, kind) for name, kind in simple_form.items()},
        "required": list(simple_form),
        "additionalProperties": False,
    }


def _property(name: str, kind: Any) -> dict[str, Any]:
    if kind in _TYPES:
        return {"type": kind}
    if isinstance(kind, list) and len(kind) == 1 and kind[0] in _TYPES:
        return {"type": "array", "items": {"type": kind[0]}}
    raise InvalidParameter(
        f"json_format.{name[:SHOWN]}",
        f"must be one of {_TYPES_IN_WORDS}, or an array of exactly one of them; "
        "a JSON schema needs `json_format_is_json_schema` true",
    )
