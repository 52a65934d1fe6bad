"""What a happy_vllm client asks to be generated.

Source: happy_vllm, "Generating endpoints", sections "Keywords" and "Json format".
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.contracts.happy_vllm.errors import conflict, missing, no_body, not_an_object, not_json
from handlers.contracts.json_fields import JsonError, ParameterReader, decode_json, json_kind
from handlers.contracts.protocol import Call
from handlers.contracts.vllm_parameters import (
    BOOLEANS,
    MAX_CHOICE_LENGTH,
    MAX_CHOICES,
    VllmParameters,
    number_of_text,
    read_vllm_parameters,
)
from handlers.errors import InvalidParameter
from handlers.request import Constraint, GenerationRequest, SamplingParameters

_OWN = frozenset({"prompt", "prompt_in_response", "response_pool", "json_format", "json_format_is_json_schema"})
"""Keywords of /v1/generate that are not vLLM's."""
_BOOLEANS = BOOLEANS | {
    *("prompt_in_response", "json_format_is_json_schema", "vanilla", "with_tokens_str", "with_token_str"),
    *("add_special_tokens", "add_generation_prompt"),
}
_INTEGERS = frozenset({"num_tokens_in_chunk", "max_length"})
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_TYPES = ("string", "integer", "boolean", "number")
"""Types of fields in the simple form of `json_format`."""
_TYPES_IN_WORDS = ", ".join(f'"{name}"' for name in _TYPES)
_LONGEST_NAME = 80


def document(call: Call) -> dict[str, Any]:
    """The call's JSON object.

    Raises:
        ContractError: there is none.
    """
    body = call.body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise no_body()
    try:
        value = decode_json(body)
    except JsonError as error:
        raise not_json(str(error)) from None
    if not isinstance(value, dict):
        raise not_an_object(json_kind(value))
    return value


def required_string(values: dict[str, Any], name: str) -> str:
    """A string; null counts as absent.

    Raises:
        ContractError: it is absent.
        InvalidParameter: it is not a string.
    """
    value = values.get(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, str):
        raise InvalidParameter(name, f"must be a string, got {json_kind(value)}")
    return value


def required_ids(values: dict[str, Any], name: str, vocabulary_size: int) -> list[int]:
    """Token ids; null counts as absent.

    Raises:
        ContractError: they are absent.
        InvalidParameter: they are not ids of the vocabulary.
    """
    if values.get(name) is None:
        raise missing(name)
    ids = list(ParameterReader(values).integers(name, minimum=0))
    if ids and max(ids) >= vocabulary_size:
        raise InvalidParameter(name, f"must be ids of the vocabulary, below {vocabulary_size}, got {max(ids)}")
    return ids


def coerced(values: Mapping[str, Any]) -> dict[str, Any]:
    """The body's fields, with booleans and integers for what Pydantic takes as such: "yes", 1, "16"."""
    return {name: _coerced(name, value) for name, value in values.items()}


def _coerced(name: str, value: Any) -> Any:
    if name in _INTEGERS and isinstance(value, str):
        return number_of_text(value)
    if name not in _BOOLEANS:
        return value
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call's body, validated and translated."""

    prompt: str
    prompt_in_response: bool
    parameters: VllmParameters
    """With the constraint that `response_pool` or `json_format` stands for."""

    def request(self, request_id: str, stream: bool) -> GenerationRequest:
        """The request to the engine: for text alone, since no answer shows tokens or their probabilities."""
        # No token of a beam is final before the last.
        stream = stream and self.parameters.beam_search is None
        return self.parameters.request(request_id, self.prompt, stream=stream)


def read_generation(values: dict[str, Any]) -> Generation:
    """Validate and translate a body.

    Raises:
        ContractError: the prompt is missing, or keywords exclude each other.
        InvalidParameter: a keyword has the wrong type or value, or is unknown.
    """
    prompt = required_string(values, "prompt")
    values = coerced(values)
    read = ParameterReader({name: values.get(name) for name in _OWN})
    prompt_in_response = read.boolean("prompt_in_response", False)
    pool = _pool(values.get("response_pool"))
    json_schema = None
    json_format, is_json_schema = read.optional_object("json_format"), read.boolean("json_format_is_json_schema", False)
    if json_format:
        json_schema = msgspec.json.encode(json_format if is_json_schema else _schema_of(json_format)).decode()
    others = {name: value for name, value in values.items() if name not in _OWN}
    parameters = read_vllm_parameters(others, text_values=True)
    _check_together(pool, json_schema, parameters.sampling)
    if pool:
        parameters = parameters.constrained(Constraint(parameter="response_pool", choice=pool))
    elif json_schema is not None:
        # On one line: white space costs tokens, and a small model may generate it without end.
        constraint = Constraint(parameter="json_format", json_schema=json_schema, any_whitespace=False)
        parameters = parameters.constrained(constraint)
    return Generation(prompt=prompt, prompt_in_response=prompt_in_response, parameters=parameters)


def _pool(value: Any) -> tuple[str, ...]:
    """The texts to choose from; empty if there is no such constraint."""
    if value is not None and not isinstance(value, list):
        raise InvalidParameter("response_pool", f"must be an array of strings, got {json_kind(value)}")
    pool = ParameterReader({"response_pool": value}).strings(
        "response_pool", most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH
    )
    return tuple(dict.fromkeys(pool))


def _check_together(pool: tuple[str, ...], json_schema: str | None, sampling: SamplingParameters) -> None:
    given = [name for name, on in (("response_pool", bool(pool)), ("json_format", json_schema is not None)) if on]
    if sampling.constraint is not None:
        given.append(sampling.constraint.parameter)
    if len(given) > 1:
        raise conflict(given[0], given[1])
    if pool and sampling.min_tokens > 0:
        raise conflict("response_pool", "min_tokens")


def _schema_of(simple_form: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object that has all of these fields, and no other."""
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
        f"json_format.{name[:_LONGEST_NAME]}",
        f"must be one of {_TYPES_IN_WORDS}, or an array of exactly one of them; "
        "a JSON schema needs `json_format_is_json_schema` true",
    )
