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

from handlers.contracts.family import ContractSetting
from handlers.contracts.json_fields import MAX_INT64, MIN_INT64, JsonError, decode_json, json_fault, json_kind
from handlers.contracts.triton.errors import TritonRefusal
from handlers.contracts.triton.tensorrt_llm import SAMPLING_PREFIX, plain_names, to_vllm
from handlers.contracts.vllm_parameters import TEXT_BOOLEANS, TextReader, VllmParameters, read_vllm_parameters
from handlers.errors import InvalidParameter
from handlers.request import Constraint, GenerationRequest

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

_INPUTS = VLLM_INPUTS | TENSORRT_LLM_INPUTS | {f"{SAMPLING_PREFIX}stop": "texts", f"{SAMPLING_PREFIX}bad": "texts"}
"""All of them, and the sampling fields of the LLM-API model that may be arrays; what is not here is a parameter."""
_NO_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
_TYPES: dict[Kind, tuple[type, str]] = {
    "text": (str, _NO_STRING),
    "texts": (str, _NO_STRING),
    "boolean": (bool, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    "integer": (int, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
}
"""Types of the elements of inputs, with Triton's message for others."""
_OUTPUTS = {
    **{name: (name.removeprefix("return_"),) for name in VLLM_INPUTS if name.startswith("return_")},
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
"""Outputs, beside `text_output`, by the inputs that ask for them."""
_FOR_THE_SERVER = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Names that Triton reserves, and `id` as a parameter; they have no effect here."""
_WITHIN = "Converting keyword: 'parameters': "
"""How Triton's messages about what is within `parameters` begin."""
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRequest:
    """One request, validated and translated."""

    id: str
    """Empty: the request has none, and so have the responses."""
    prompt: str
    vllm: VllmParameters
    stream: bool
    """One response for each step of the engine, instead of one at the end."""
    repeat_prompt: bool
    """`text_output` begins with the prompt."""
    outputs: frozenset[str]
    """Those that the request asks for beside `text_output`."""
    adapter: str | None
    """`lora_name`."""
    ignored: tuple[str, ...]
    """Names that were given and have no effect."""

    @property
    def shows_logprobs(self) -> bool:
        """Whether the output `logprobs` has any; without the parameter of that name it is "null"."""
        return "logprobs" in self.outputs and self.vllm.logprobs is not None

    def for_engine(self, request_id: str) -> GenerationRequest:
        """The request to the engine."""
        want_logprobs = self.shows_logprobs or not self.outputs.isdisjoint(("cumulative_logprob", "cum_log_probs"))
        return self.vllm.request(
            request_id,
            self.prompt,
            stream=self.stream,
            want_tokens=want_logprobs,
            want_logprobs=want_logprobs,
            want_ranks=self.shows_logprobs,
            top_tokens=(self.vllm.logprobs or 0) if self.shows_logprobs else 0,
            adapter=self.adapter,
        )


def read_request(body: bytes, setting: ContractSetting) -> TritonRequest:
    """Read a request's body.

    Raises:
        TritonRefusal: it is not JSON, or a key has a wrong type or shape.
        InvalidParameter: naming the one that is wrong, and what is allowed.
    """
    members = _members(body)
    request_id = next((value for name, value in reversed(members) if name == "id"), "")
    if not isinstance(request_id, str):
        raise TritonRefusal("Unable to parse 'id': attempt to access JSON non-string as string")
    inputs, parameters = _inputs_and_parameters(members, f"[request id: {request_id or '<id_unknown>'}]", setting)
    prompt = inputs.pop("text_input")
    if inputs.pop("image", None):
        raise InvalidParameter("image", "cannot be used: this model takes text only")
    sampling_parameters = inputs.pop("sampling_parameters", None)
    if sampling_parameters is not None:
        parameters = _document(sampling_parameters)
    ignored = tuple(sorted(parameters.keys() & _FOR_THE_SERVER))
    values = {name: value for name, value in {**parameters, **inputs}.items() if name not in _FOR_THE_SERVER}
    tensorrt_llm = setting.settings.rolling_batch == "trtllm" or any(
        name in TENSORRT_LLM_INPUTS or name.startswith(SAMPLING_PREFIX) for name in values
    )
    if tensorrt_llm:
        values = plain_names(values)
    stream = _switch(values, "stream") or _switch(values, "streaming") or False
    leaves_out_prompt = _switch(values, "exclude_input_in_output")
    if stream and leaves_out_prompt is False:
        raise InvalidParameter(
            "exclude_input_in_output", "must not be false when streaming: send true, or leave it out"
        )
    outputs = frozenset(output for name, named in _OUTPUTS.items() if _switch(values, name) for output in named)
    constraint: Constraint | None = None
    if tensorrt_llm:
        values, constraint = to_vllm(values, setting.model.eos_token_ids)
    adapter = _adapter(values.pop("lora_name", None), setting)
    if leaves_out_prompt is None:
        leaves_out_prompt = stream or tensorrt_llm
    return TritonRequest(
        id=request_id,
        prompt=prompt,
        vllm=_vllm(values, constraint, stream),
        stream=stream,
        repeat_prompt=not leaves_out_prompt,
        outputs=outputs,
        adapter=adapter,
        ignored=ignored,
    )


@dataclass(frozen=True, slots=True)
class _Object:
    """A JSON object whose members may have one name twice."""

    members: list[tuple[str, Any]]

    def items(self) -> list[tuple[str, Any]]:
        return self.members


def _members(body: bytes) -> list[tuple[str, Any]]:
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
    if not isinstance(document, dict | _Object):
        raise TritonRefusal("attempt to get members for non-object: the body must be a JSON object with `text_input`")
    return list(document.items())


def _repeats(body: bytes, document: Any) -> bool:
    """Whether an input may occur twice in one object, of which the decoder has kept the last."""
    if not isinstance(document, dict):
        return False
    within = document.get("parameters")
    names = [*document, *within] if isinstance(within, dict) else document
    return any(name in _INPUTS and body.count(b'"%b"' % name.encode()) > 1 for name in names)


def _inputs_and_parameters(
    members: list[tuple[str, Any]], whose: str, setting: ContractSetting
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is an input of the model, and all the rest. `whose`: says in messages which request it is."""
    inputs: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value, within in _flattened(members):
        kind = _INPUTS.get(name)
        if kind is None:
            parameters[name] = _parameter(name, value, within)
        elif name in inputs:
            raise TritonRefusal(f"{within}{whose} input '{name}' already exists in request")
        else:
            inputs[name] = _input(name, value, kind, within)
    if "text_input" not in inputs:
        given = ", ".join(f"'{name}'" for name in inputs)
        raise TritonRefusal(
            f"{whose} expected number of inputs between 1 and {len(VLLM_INPUTS)} but got {len(inputs)} inputs for "
            f"model '{setting.settings.name}'. Got input(s) [{given}], but missing required input(s) ['text_input']. "
            "Please provide all required input(s)."
        )
    return inputs, parameters


def _flattened(members: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Every name and value, and the beginning of Triton's messages about it."""
    for name, value in members:
        if name == "parameters":
            if not isinstance(value, dict | _Object):
                raise TritonRefusal("Expected JSON object for keyword: 'parameters': attempt to access JSON non-object")
            yield from ((inner, inner_value, _WITHIN) for inner, inner_value in value.items())
        elif name != "id":
            yield name, value, ""


def _parameter(name: str, value: Any, within: str) -> str | int | float | bool:
    shown = name[:_LONGEST_NAME]
    if name.startswith("triton_"):
        raise TritonRefusal(
            f"{within}parameter '{shown}': keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
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
    elements = value if isinstance(value, list) else [value]
    if kind != "texts" and len(elements) != 1:
        raise TritonRefusal(f"{within}The schema can not convert input '{name}' to tensor with proper shape")
    expected, message = _TYPES[kind]
    if any(type(element) is not expected for element in elements):
        raise TritonRefusal(f"{within}{message} (input '{name}')")
    return elements if kind == "texts" else elements[0]


def _document(text: str) -> dict[str, Any]:
    """What `sampling_parameters` holds; it takes the place of all parameters."""
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
    meant = TEXT_BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else None
    if meant is None:
        raise InvalidParameter(name, f"must be true or false, got {json_kind(value)}")
    return meant


def _adapter(name: Any, setting: ContractSetting) -> str | None:
    if name is None:
        return None
    if not setting.settings.enable_lora:
        raise InvalidParameter("lora_name", "cannot be used: this server has no adapters")
    if not isinstance(name, str):
        raise InvalidParameter("lora_name", f"must be a string, got {json_kind(name)}")
    return name or None


def _vllm(values: Mapping[str, Any], constraint: Constraint | None, stream: bool) -> VllmParameters:
    parameters = read_vllm_parameters(values, TextReader)
    if stream and parameters.beam_search is not None:
        raise InvalidParameter("stream", "cannot be true with beam search: no token is final before the last")
    if constraint is None:
        return parameters
    if parameters.sampling.constraint is not None:
        raise InvalidParameter(constraint.parameter, "cannot be combined with `structured_outputs`")
    return parameters.constrained(constraint)
