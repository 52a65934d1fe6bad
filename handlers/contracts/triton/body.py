"""The body of a generate request: which of its keys are inputs of the model, and which are parameters.

Source: Triton generate 2.68, "Generate Request JSON Object"; contracts/triton_generate.md section 2. A key that the
model has as an input must have the input's type and shape; any other key, at the top or within `parameters`, is a
parameter and may be text, a number or a boolean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from handlers.contracts.json_fault import json_fault
from handlers.contracts.triton.errors import TritonRefusal

Kind = Literal["text", "texts", "boolean", "integer"]

VLLM_INPUTS: dict[str, Kind] = {
    "text_input": "text",
    "stream": "boolean",
    "exclude_input_in_output": "boolean",
    "sampling_parameters": "text",
    "image": "texts",
    "return_finish_reason": "boolean",
    "return_cumulative_logprob": "boolean",
    "return_logprobs": "boolean",
    "return_num_input_tokens": "boolean",
    "return_num_output_tokens": "boolean",
}
"""Of a model that Triton's vLLM backend serves."""

TENSORRT_LLM_INPUTS: dict[str, Kind] = {
    "streaming": "boolean",
    "bad_words": "texts",
    "stop_words": "texts",
    "end_id": "integer",
    "pad_id": "integer",
    "beam_width": "integer",
    "num_return_sequences": "integer",
    "min_length": "integer",
    "random_seed": "integer",
    "return_log_probs": "boolean",
    "return_context_logits": "boolean",
    "return_generation_logits": "boolean",
    "lora_task_id": "integer",
    "guided_decoding_guide_type": "text",
    "guided_decoding_guide": "text",
}
"""What a TensorRT-LLM ensemble has beside them; only it has inputs of these names."""

SAMPLING_PREFIX = "sampling_param_"
"""What sampling fields are called with in the model of TensorRT-LLM's newer LLM API."""

_REQUIRED = "text_input"
_WRONG_TYPE = {
    "text": "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    "boolean": "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    "integer": "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
}
_UNKNOWN_ID = "<id_unknown>"
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
_LONGEST_NAME = 80
_decode = msgspec.json.Decoder().decode

Members = list[tuple[str, Any]]


class _Object(Members):
    """A JSON object as its members in order, those that occur twice included."""


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A body whose keys have been sorted into inputs and parameters; types are checked, meanings are not."""

    id: str
    """Empty if there is none."""
    text_input: str
    inputs: dict[str, Any]
    """Those given, `text_input` excepted."""
    parameters: dict[str, str | int | float | bool]


def read_body(body: bytes, model: str) -> GenerateBody:
    """Read a request's body; `model` is the served model's name, for messages.

    Raises:
        TritonRefusal: it is not JSON, or a key has a wrong type or shape.
    """
    members = _members(body)
    identity = _identity(members)
    shown_id = identity or _UNKNOWN_ID
    inputs: dict[str, Any] = {}
    parameters: dict[str, str | int | float | bool] = {}
    for name, value, within in _flattened(members):
        kind = _kind(name)
        if kind is None:
            parameters[name] = _parameter(name, value, within)
            continue
        if name in inputs:
            raise TritonRefusal(f"{within}[request id: {shown_id}] input '{name}' already exists in request")
        inputs[name] = _input(name, value, kind, within)
    if _REQUIRED not in inputs:
        given = ", ".join(f"'{name}'" for name in inputs)
        raise TritonRefusal(
            f"[request id: {shown_id}] expected number of inputs between 1 and {len(VLLM_INPUTS)} but got "
            f"{len(inputs)} inputs for model '{model}'. Got input(s) [{given}], but missing required input(s) "
            f"['{_REQUIRED}']. Please provide all required input(s)."
        )
    return GenerateBody(identity, inputs.pop(_REQUIRED), inputs, parameters)


def _members(body: bytes) -> Members:
    if not body:
        raise TritonRefusal("failed to parse the request JSON buffer: The document is empty. at 0")
    try:
        document = _decode(body)
        if _repeats(body, document):
            document = json.loads(body, object_pairs_hook=_Object)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = "The document is nested too deeply" if isinstance(error, RecursionError) else json_fault(body, error)
        raise TritonRefusal(f"failed to parse the request JSON buffer: {reason}") from None
    if isinstance(document, dict):
        return list(document.items())
    if isinstance(document, _Object):
        return document
    raise TritonRefusal("attempt to get members for non-object: the body must be a JSON object with `text_input`")


def _repeats(body: bytes, document: Any) -> bool:
    """Whether an input may stand twice in one object, of which the decoder has kept the last."""
    if not isinstance(document, dict):
        return False
    within = document.get("parameters")
    names = [*document, *within] if isinstance(within, dict) else document
    return any(_kind(name) is not None and body.count(b'"%b"' % name.encode()) > 1 for name in names)


def _identity(members: Members) -> str:
    for name, value in reversed(members):
        if name != "id":
            continue
        if not isinstance(value, str):
            raise TritonRefusal("Unable to parse 'id': attempt to access JSON non-string as string")
        return value
    return ""


def _flattened(members: Members) -> Iterator[tuple[str, Any, str]]:
    """Every name and value, with what Triton puts before its messages about those within `parameters`."""
    for name, value in members:
        if name == "id":
            continue
        if name != "parameters":
            yield name, value, ""
            continue
        if not isinstance(value, dict | _Object):
            raise TritonRefusal("Expected JSON object for keyword: 'parameters': attempt to access JSON non-object")
        for inner, inner_value in value.items() if isinstance(value, dict) else value:
            yield inner, inner_value, "Converting keyword: 'parameters': "


def _kind(name: str) -> Kind | None:
    return VLLM_INPUTS.get(name) or TENSORRT_LLM_INPUTS.get(name) or _prefixed_kind(name)


def _prefixed_kind(name: str) -> Kind | None:
    """Of the prefixed inputs, those that may be arrays; the others are read as parameters."""
    return "texts" if name in (f"{SAMPLING_PREFIX}stop", f"{SAMPLING_PREFIX}bad") else None


def _parameter(name: str, value: Any, within: str) -> str | int | float | bool:
    shown = name[:_LONGEST_NAME]
    if name.startswith("triton_"):
        raise TritonRefusal(
            f"{within}parameter '{shown}': keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        if isinstance(value, bool):
            return value
        raise TritonRefusal(
            f"{within}parameter '{shown}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if isinstance(value, int) and not _MIN_INT64 <= value <= _MAX_INT64:
        try:
            return float(value)
        except OverflowError:
            raise TritonRefusal(f"{within}parameter '{shown}' is a number beyond what a double holds") from None
    return value


def _input(name: str, value: Any, kind: Kind, within: str) -> Any:
    if isinstance(value, _Object) or not isinstance(value, list):
        value = [value]
    elif kind != "texts" and len(value) != 1:
        raise TritonRefusal(f"{within}The schema can not convert input '{name}' to tensor with proper shape")
    texts = kind in ("text", "texts")
    for item in value:
        if not _is(item, kind):
            raise TritonRefusal(f"{within}{_WRONG_TYPE['text' if texts else kind]} (input '{name}')")
    return value if kind == "texts" else value[0]


def _is(value: Any, kind: Kind) -> bool:
    if kind in ("text", "texts"):
        return isinstance(value, str)
    if kind == "boolean":
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool)
