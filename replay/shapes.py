"""The fields of JSON answers: masked fields, fields with text, and the combined fields of a stream's records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

# Fields that differ from call to call: ids, times, random numbers.
_MASKED = frozenset(
    (
        *("id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "response_id", "item_id"),
        *("seed", "call_id", "tool_call_id", "timestamp", "kv_transfer_params", "sequence_number"),
    )
)
# Fields that contain a part of the generated text.
TEXTS = frozenset(
    (
        *("generated_text", "text", "content", "text_output", "responses", "outputs", "generation", "completion"),
        *("reasoning", "reasoning_content", "arguments", "partial_json", "thinking", "output_text", "refusal"),
        *("decoded_token", "delta", "prompt", "inputs", "templated_text", "split_text", "predictions"),
    )
)
FINISH_REASONS = frozenset(("finish_reason", "finish_reasons", "stop_reason"))
# Numbers of tokens. The number of tokens in the prompt depends only on the request.
PROMPT_COUNTS = frozenset(("prompt_tokens", "input_tokens", "input_length", "num_input_tokens", "max_model_len"))
TOKEN_COUNTS = frozenset(
    (
        *("completion_tokens", "total_tokens", "generated_tokens", "output_tokens", "num_output_tokens"),
        *("reasoning_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
    )
)
# Log probabilities, and arrays with an entry for each token. Their values and lengths depend on the model.
PROBABILITIES = frozenset(
    (
        *("logprob", "log_prob", "logprobs", "log_probs", "cumulative_logprob", "token_logprobs", "top_logprobs"),
        *("cum_log_probs", "output_log_probs", "prompt_logprobs", "rank"),
    )
)
_OF_TOKENS = frozenset(
    (
        *("tokens", "top_tokens", "prefill", "text_offset", "bytes", "token_ids", "prompt_token_ids", "tokens_str"),
        *("tokens_ids", "top_logprobs", "token_logprobs", "output_log_probs", "tokenize_response"),
    )
)
_BY_TEXT = frozenset(("top_logprobs", "logprobs", "logit_bias"))  # Objects whose keys are tokens.
_NUMBERED = re.compile(r"-?\d+")
_LONGEST_KEY = 200  # In characters. Each path repeats its outer keys, so all paths together grow quadratically.
_MANY = 16  # An array of at least this many numbers is a vector.


def key_of(where: str) -> str:
    """Return the last name of a JSON path."""
    return where.rstrip("[]*").rpartition(".")[2].rstrip("[]*")


def is_masked(where: str) -> bool:
    """Return True if the value of a field differs from call to call."""
    return key_of(where) in _MASKED


def has_any(where: str, names: frozenset[str]) -> bool:
    """Return True if a JSON path contains one of these names."""
    return any(part.rstrip("[]*") in names for part in where.split("."))


def is_per_token(where: str) -> bool:
    """Return True if an array has an entry for each token, so its length depends on the text."""
    return has_any(where, _OF_TOKENS) or (has_any(where, PROBABILITIES) and key_of(where) == "content")


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def inner(where: str, key: str) -> str:
    """Return the JSON path of a field. A key becomes `*` if it is a number, or if it is a token of a text."""
    name = key_of(where)
    is_token = name in _BY_TEXT and not (name == "logprobs" and key in _LOGPROB_FIELDS)
    if is_token or _NUMBERED.fullmatch(key):
        key = "*"
    key = key[:_LONGEST_KEY]
    return f"{where}.{key}" if where else key


_LOGPROB_FIELDS = frozenset(("content", "refusal", "text_offset", "token_logprobs", "tokens", "top_logprobs"))


def is_by_token(where: str, value: Mapping[str, Any]) -> bool:
    """Return True if the keys of an object are tokens or numbers, which differ from answer to answer."""
    if value and all(_NUMBERED.fullmatch(key) for key in value):
        return True
    return key_of(where) in _BY_TEXT and _LOGPROB_FIELDS.isdisjoint(value)


def is_vector(value: Any) -> bool:
    """Return True for an array of many numbers, such as an embedding."""
    return (
        isinstance(value, list)
        and len(value) >= _MANY
        and all(isinstance(number, int | float) and not isinstance(number, bool) for number in value)
    )


def cosine(one: Iterable[float], other: Iterable[float]) -> float:
    """Return the cosine of two vectors."""
    product = first = second = 0.0
    for left, right in zip(one, other, strict=False):
        product, first, second = product + left * right, first + left * left, second + right * right
    return product / (first * second) ** 0.5 if first and second else float(first == second)


@dataclass(slots=True)
class Field:
    """The values of a field, combined over records."""

    count: int = 0
    kinds: set[str] = field(default_factory=set)
    example: Any = None
    values: set[Any] = field(default_factory=set)  # The first eight different strings and booleans.


@dataclass(slots=True)
class Shape:
    """The fields of many records, keyed by JSON path, in the order in which they first occur."""

    fields: dict[str, Field] = field(default_factory=dict)
    parents: dict[str, int] = field(default_factory=dict)  # The number of objects at each path.
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)  # The keys of the first object of each path.

    @classmethod
    def of(cls, records: Iterable[Any]) -> Shape:
        shape = cls()
        for where, value in chain.from_iterable(map(walk, records)):
            found = shape.fields.setdefault(where, Field())
            found.count += 1
            found.kinds.add(kind_of(value))
            if found.example is None:
                found.example = value
            if isinstance(value, str | bool) and len(found.values) < 8:
                found.values.add(value)
            if isinstance(value, dict):
                shape.orders.setdefault(where, tuple(value))
                shape.parents[where] = shape.parents.get(where, 0) + 1
        return shape


def walk(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a JSON value and all values in it, except the numbers of vectors, each with its path.

    All elements of an array share one path.
    """
    yield where, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from walk(part, inner(where, key))
    elif isinstance(value, list) and not is_vector(value):
        for part in value:
            yield from walk(part, f"{where}[]")
