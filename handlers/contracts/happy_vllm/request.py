"""What a happy_vllm client asks to be generated.

Source: happy_vllm_generate, Keywords; contracts/happy_vllm.md section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from handlers.contracts.happy_vllm.body import required_string
from handlers.contracts.happy_vllm.errors import conflict, refused
from handlers.contracts.happy_vllm.json_format import schema_of
from handlers.contracts.happy_vllm.lax import lax
from handlers.contracts.json_kinds import json_kind
from handlers.contracts.parameter_reader import ParameterReader
from handlers.contracts.vllm_constraint import MAX_CHOICE_LENGTH, MAX_CHOICES
from handlers.contracts.vllm_parameters import VllmParameters, read_vllm_parameters
from handlers.errors import InvalidParameter
from handlers.request import Constraint, GenerationRequest, SamplingParameters

_OWN = frozenset({"prompt", "prompt_in_response", "response_pool", "json_format", "json_format_is_json_schema"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One call, validated."""

    prompt: str
    prompt_in_response: bool
    parameters: VllmParameters
    sampling: SamplingParameters
    """With the constraint that `response_pool` or `json_format` stands for."""

    def request(self, request_id: str, stream: bool) -> GenerationRequest:
        """What the engine is asked for: text alone, since no answer shows tokens or their probabilities."""
        parameters = self.parameters
        return GenerationRequest(
            request_id=request_id,
            prompt=self.prompt,
            sampling=self.sampling,
            # No token of a beam is final before the last.
            stream=stream and parameters.beam_search is None,
            sequences=parameters.sequences,
            candidates=parameters.candidates,
            beam_search=parameters.beam_search,
            truncate_prompt_tokens=parameters.truncate_prompt_tokens,
        )


def read_generation(values: dict[str, Any]) -> Generation:
    """Validate and translate the body.

    Raises:
        ContractError: the prompt is missing, or keywords exclude each other.
        InvalidParameter: a keyword has the wrong type or value, or is unknown.
    """
    prompt = required_string(values, "prompt")
    values = lax(values)
    read = ParameterReader({name: values.get(name) for name in _OWN})
    prompt_in_response = read.boolean("prompt_in_response", False)
    pool = _pool(values.get("response_pool"))
    json_schema = _json_schema(read)
    others = {name: value for name, value in values.items() if name not in _OWN}
    parameters = read_vllm_parameters(others, text_values=True)
    sampling = parameters.sampling
    _check_together(pool, json_schema, sampling)
    constraint = sampling.constraint
    if pool:
        constraint = Constraint(parameter="response_pool", choice=pool)
    elif json_schema is not None:
        # On one line: white space costs tokens, and a small model can go on with it for ever.
        constraint = Constraint(parameter="json_format", json_schema=json_schema, any_whitespace=False)
    return Generation(
        prompt=prompt,
        prompt_in_response=prompt_in_response,
        parameters=parameters,
        sampling=msgspec.structs.replace(sampling, constraint=constraint),
    )


def _pool(value: Any) -> tuple[str, ...]:
    """The texts to choose from; none: switched off."""
    if value is not None and not isinstance(value, list):
        raise InvalidParameter("response_pool", f"must be an array of strings, got {json_kind(value)}")
    pool = ParameterReader({"response_pool": value}).strings(
        "response_pool", most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH
    )
    return tuple(dict.fromkeys(pool))


def _json_schema(read: ParameterReader) -> str | None:
    """What `json_format` stands for; an empty one is switched off."""
    json_format = read.optional_object("json_format")
    is_json_schema = read.boolean("json_format_is_json_schema", False)
    return schema_of(json_format, is_json_schema) if json_format else None


def _check_together(pool: tuple[str, ...], json_schema: str | None, sampling: SamplingParameters) -> None:
    given = [name for name, on in (("response_pool", bool(pool)), ("json_format", json_schema is not None)) if on]
    if sampling.constraint is not None:
        given.append(sampling.constraint.parameter)
    if len(given) > 1:
        message = f"`{given[0]}` cannot be combined with `{given[1]}`"
        raise refused(conflict(message), message)
    if pool and sampling.min_tokens > 0:
        message = "`response_pool` cannot be combined with `min_tokens`"
        raise refused(conflict(message), message)
