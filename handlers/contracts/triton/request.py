"""What a generate request asks for, in vLLM's names or in TensorRT-LLM's.

Source: Triton 2.68, "Generate Extension", "Generate Request JSON Object"; the models of Triton's vLLM backend and of
its TensorRT-LLM backend. A request is read and answered as TensorRT-LLM does if it has an input that only its models
have, or if the model has TensorRT-LLM's parameters; all others as the vLLM backend does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from handlers.contracts.json_fields import MAX_INT64, MIN_INT64, JsonError, decode_json, json_fault, json_kind
from handlers.contracts.triton.errors import TritonRefusal
from handlers.contracts.vllm_parameters import VllmParameters, read_vllm_parameters
from handlers.errors import InvalidParameter
from handlers.request import Constraint

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
"""Inputs of a model that Triton's vLLM backend serves."""

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
"""Further inputs of a TensorRT-LLM ensemble; only it has inputs of these names."""

SAMPLING_PREFIX = "sampling_param_"
"""Prefix of sampling fields in the model of TensorRT-LLM's newer LLM API."""
_PREFIXED_INPUTS: dict[str, Kind] = {f"{SAMPLING_PREFIX}stop": "texts", f"{SAMPLING_PREFIX}bad": "texts"}
"""Those of them that may be arrays; the others are read as parameters."""

_REQUIRED = "text_input"
_NO_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
_TYPES: dict[Kind, tuple[type, str]] = {
    "text": (str, _NO_STRING),
    "texts": (str, _NO_STRING),
    "boolean": (bool, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    "integer": (int, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
}
"""Types of the elements of inputs, with Triton's message for others."""
_UNKNOWN_ID = "<id_unknown>"
_LONGEST_NAME = 80

_FOR_THE_SERVER = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Names that Triton reserves, and `id` as a parameter; they have no effect here."""
_LEAVES_OUT_PROMPT = "exclude_input_in_output"
_OUTPUT_SWITCHES = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_log_probs": "cum_log_probs",
}
"""Parameters that ask for outputs, and the fields of `Outputs`."""
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}

_RENAMED = {
    "stop_words": "stop",
    "bad": "bad_words",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "len_penalty": "length_penalty",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "exclude_input_from_output": "exclude_input_in_output",
}
"""Older names of the ensemble, and those of the LLM API's model."""
_LOGITS = ("return_context_logits", "return_generation_logits")
_GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
_WITHOUT_EFFECT = ("pad_id", "return_perf_metrics", "add_special_tokens")
_NO_END = -1

Members = list[tuple[str, Any]]


class _Object(Members):
    """A JSON object as a list of its members, which may have one name twice."""


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A body's inputs and parameters, with their types checked."""

    id: str
    """Empty if there is none."""
    text_input: str
    inputs: dict[str, Any]
    """Without `text_input`."""
    parameters: dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs, beside `text_output`, that the request asks for."""

    cum_log_probs: bool = False
    """TensorRT-LLM's, together with `output_log_probs`."""
    cumulative_logprob: bool = False
    finish_reason: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonParameters:
    """One request, validated and translated."""

    vllm: VllmParameters
    stream: bool
    """One response for each step of the engine, instead of one at the end."""
    repeat_prompt: bool
    """`text_output` begins with the prompt."""
    outputs: Outputs
    ignored: tuple[str, ...]
    """Names that were given and have no effect."""
    adapter: str | None = None
    """`lora_name`."""


def read_body(body: bytes, model: str) -> GenerateBody:
    """Read a request's body. `model`: the served model's name, for messages.

    Raises:
        TritonRefusal: it is not JSON, or a key has a wrong type or shape.
    """
    members = _members(body)
    request_id = _request_id(members)
    shown_id = request_id or _UNKNOWN_ID
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
    return GenerateBody(request_id, inputs.pop(_REQUIRED), inputs, parameters)


def _members(body: bytes) -> Members:
    if not body:
        raise TritonRefusal("failed to parse the request JSON buffer: The document is empty. at 0")
    try:
        document = msgspec.json.decode(body)
        if _repeats(body, document):
            document = json.loads(body, object_pairs_hook=_Object)
    except RecursionError:
        raise TritonRefusal("failed to parse the request JSON buffer: The document is nested too deeply") from None
    except ValueError as error:
        raise TritonRefusal(f"failed to parse the request JSON buffer: {json_fault(body, error)}") from None
    if isinstance(document, dict):
        return list(document.items())
    if isinstance(document, _Object):
        return document
    raise TritonRefusal("attempt to get members for non-object: the body must be a JSON object with `text_input`")


def _repeats(body: bytes, document: Any) -> bool:
    """Whether an input may occur twice in one object, of which the decoder has kept the last."""
    if not isinstance(document, dict):
        return False
    within = document.get("parameters")
    names = [*document, *within] if isinstance(within, dict) else document
    return any(_kind(name) is not None and body.count(b'"%b"' % name.encode()) > 1 for name in names)


def _request_id(members: Members) -> str:
    request_id = next((value for name, value in reversed(members) if name == "id"), "")
    if not isinstance(request_id, str):
        raise TritonRefusal("Unable to parse 'id': attempt to access JSON non-string as string")
    return request_id


def _flattened(members: Members) -> Iterator[tuple[str, Any, str]]:
    """Every name and value, and the beginning of Triton's messages about those within `parameters`."""
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
    """The kind of an input; None for a parameter."""
    return VLLM_INPUTS.get(name) or TENSORRT_LLM_INPUTS.get(name) or _PREFIXED_INPUTS.get(name)


def _parameter(name: str, value: Any, within: str) -> str | int | float | bool:
    shown = name[:_LONGEST_NAME]
    if name.startswith("triton_"):
        raise TritonRefusal(
            f"{within}parameter '{shown}': keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | int | float):
        raise TritonRefusal(
            f"{within}parameter '{shown}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if isinstance(value, int) and not MIN_INT64 <= value <= MAX_INT64:
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
    expected, message = _TYPES[kind]
    if any(type(item) is not expected for item in value):
        raise TritonRefusal(f"{within}{message} (input '{name}')")
    return value if kind == "texts" else value[0]


def read_parameters(
    body: GenerateBody,
    *,
    on_tensorrt_llm: bool,
    eos_token_ids: frozenset[int] = frozenset(),
    adapters: bool = False,
) -> TritonParameters:
    """Validate and translate a body's inputs and parameters. `adapters`: there are adapters (`option.enable_lora`).

    Raises:
        InvalidParameter: naming the one that is wrong, and what is allowed.
    """
    inputs = dict(body.inputs)
    if inputs.pop("image", None):
        raise InvalidParameter("image", "cannot be used: this model takes text only")
    values = _sampling_values(inputs.pop("sampling_parameters", None), body.parameters)
    ignored = tuple(sorted(values.keys() & _FOR_THE_SERVER))
    values = {name: value for name, value in {**values, **inputs}.items() if name not in _FOR_THE_SERVER}
    names_tensorrt_llm = (name in TENSORRT_LLM_INPUTS or name.startswith(SAMPLING_PREFIX) for name in values)
    tensorrt_llm = on_tensorrt_llm or any(names_tensorrt_llm)
    if tensorrt_llm:
        values = _plain_names(values)
    stream = _switch(values, "stream") or _switch(values, "streaming") or False
    leaves_out_prompt = _switch(values, _LEAVES_OUT_PROMPT)
    if stream and leaves_out_prompt is False:
        raise InvalidParameter(_LEAVES_OUT_PROMPT, "must not be false when streaming: send true, or leave it out")
    outputs = Outputs(**{field: _switch(values, name) or False for name, field in _OUTPUT_SWITCHES.items()})
    constraint: Constraint | None = None
    if tensorrt_llm:
        values, constraint = _to_vllm(values, eos_token_ids)
    adapter = _adapter(values, adapters)
    if leaves_out_prompt is None:
        leaves_out_prompt = stream or tensorrt_llm
    return TritonParameters(
        vllm=_vllm(values, constraint, stream),
        stream=stream,
        repeat_prompt=not leaves_out_prompt,
        outputs=outputs,
        ignored=ignored,
        adapter=adapter,
    )


def _adapter(values: dict[str, Any], adapters: bool) -> str | None:
    """Take `lora_name` out of the values."""
    name = values.pop("lora_name", None)
    if name is None:
        return None
    if not adapters:
        raise InvalidParameter("lora_name", "cannot be used: this server has no adapters")
    if not isinstance(name, str):
        raise InvalidParameter("lora_name", f"must be a string, got {json_kind(name)}")
    return name or None


def _sampling_values(text: str | None, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling_parameters`, where it is given, takes the place of all parameters."""
    if text is None:
        return parameters
    try:
        document = decode_json(text)
    except JsonError as error:
        raise InvalidParameter("sampling_parameters", f"must be a JSON object in a string: {error}") from None
    if not isinstance(document, dict):
        raise InvalidParameter("sampling_parameters", f"must hold a JSON object, got {json_kind(document)}")
    return document


def _switch(values: dict[str, Any], name: str) -> bool | None:
    """Take a boolean out of the values; None if it is absent. Within `sampling_parameters` it may be text."""
    value = values.pop(name, None)
    if value is None or isinstance(value, bool):
        return value
    meant = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        raise InvalidParameter(name, f"must be true or false, got {json_kind(value)}")
    return meant


def _vllm(values: dict[str, Any], constraint: Constraint | None, stream: bool) -> VllmParameters:
    parameters = read_vllm_parameters(values, text_values=True)
    if stream and parameters.beam_search is not None:
        raise InvalidParameter("stream", "cannot be true with beam search: no token is final before the last")
    if constraint is None:
        return parameters
    if parameters.sampling.constraint is not None:
        raise InvalidParameter(constraint.parameter, "cannot be combined with `structured_outputs`")
    return parameters.constrained(constraint)


def _plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under today's names, without the prefix."""
    plain: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for given, value in values.items():
        bare = given.removeprefix(SAMPLING_PREFIX)
        name = _RENAMED.get(bare, bare)
        if name in plain:
            raise InvalidParameter(name[:80], f"is given twice: as `{origin[name][:120]}` and as `{given[:120]}`")
        plain[name], origin[name] = value, given
    return plain


def _to_vllm(values: dict[str, Any], eos_token_ids: frozenset[int]) -> tuple[dict[str, Any], Constraint | None]:
    """vLLM's names and values for those of TensorRT-LLM, and the constraint."""
    values = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT}
    for name in _LOGITS:
        if values.pop(name, False):
            raise InvalidParameter(name, "cannot be true: this server has no logits to give")
    if "lora_task_id" in values:
        raise InvalidParameter("lora_task_id", "cannot be used: this server has no adapters")
    constraint = _constraint(values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None))
    for name in ("stop", "bad_words"):
        if name in values:
            values[name] = _words(values[name])
    return _with_end(_with_beams(_with_sampling(values)), eos_token_ids), constraint


def _words(value: Any) -> Any:
    """The words of a list; an empty string stands for none."""
    words = [value] if isinstance(value, str) else value
    return [word for word in words if word] if isinstance(words, list) else value


def _with_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """With vLLM's greedy decoding: `top_k` and `top_p` of 0 are off, and both together are greedy decoding."""
    off = {name for name in ("top_k", "top_p") if name in values and _is_zero(values[name])}
    kept = {name: value for name, value in values.items() if name not in off}
    if len(off) == 2 or not kept.keys() & {"temperature", "top_k", "top_p"}:
        kept["temperature"] = 0.0
    return kept


def _is_zero(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in ("0", "0.0")
    return not isinstance(value, bool) and value == 0


def _with_beams(values: dict[str, Any]) -> dict[str, Any]:
    """With vLLM's beam search: all beams are returned, or the best `num_return_sequences` of them."""
    width = values.pop("beam_width", 1)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise InvalidParameter("beam_width", "must be a whole number, at least 1")
    if width == 1:
        return {name: value for name, value in values.items() if name not in ("length_penalty", "early_stopping")}
    return {"n": width, **values, "use_beam_search": True, "best_of": width}


def _with_end(values: dict[str, Any], eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """With `end_id` in the place of the model's own end tokens; -1 is none."""
    end_id = values.pop("end_id", None)
    if end_id is None:
        return values
    if not isinstance(end_id, int) or isinstance(end_id, bool) or end_id < _NO_END:
        raise InvalidParameter("end_id", "must be a token id, or -1 for none")
    if end_id in eos_token_ids:
        return values
    return values | {"ignore_eos": True, "stop_token_ids": [] if end_id == _NO_END else [end_id]}


def _constraint(kind: Any, guide: Any) -> Constraint | None:
    if kind is None:
        if guide is not None:
            raise InvalidParameter("guided_decoding_guide", "needs `guided_decoding_guide_type`")
        return None
    if kind not in _GUIDES:
        raise InvalidParameter(
            "guided_decoding_guide_type", f"must be one of {', '.join(_GUIDES)}, got {str(kind)[:80]!r}"
        )
    name = "guided_decoding_guide"
    if kind == "json":
        return Constraint(parameter=name, json_object=True)
    if not isinstance(guide, str) or not guide.strip():
        raise InvalidParameter(name, f"must be a text, and not empty, where `guided_decoding_guide_type` is {kind}")
    if kind == "json_schema":
        if not _is_object(guide):
            raise InvalidParameter(name, "must be a JSON schema: the text of an object")
        return Constraint(parameter=name, json_schema=guide)
    if kind == "regex":
        return Constraint(parameter=name, regex=guide)
    return Constraint(parameter=name, grammar=guide)


def _is_object(text: str) -> bool:
    try:
        return isinstance(decode_json(text), dict)
    except JsonError:
        return False
